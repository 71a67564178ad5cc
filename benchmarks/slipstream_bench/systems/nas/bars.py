"""``slipstream bench nas``: architecture search in the user's own network.

The peer is NVIDIA Model Optimizer: its rows are measured if the package ``modelopt`` can be
imported. Latencies are CPU time of one thread.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from slipstream.durations import Durations
from slipstream.heap import keep_pages
from slipstream.nas import (
    Supernet,
    derive_space,
    estimate,
    fit,
    predict_latency,
    search,
)
from slipstream.search import Budget
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.nas.families import FAMILIES, Basic

_TOLERANCE = 1e-5
_UNCOUNTED = ("lstm", "rnn", "vit", "bert", "gpt")
"""Families whose recurrent layers or attention torch's counter does not count on CPUs."""
_NO_PEER = "the package modelopt is not installed"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: 10 subnets per family, 8 latencies; full: 200, 30, and 3 seeds."""
    keep_pages()
    with one_thread(gradients=False):
        yield from _exact_rows(options)
        yield from _peer_rows(options)
        yield from _latency_rows(options)
    with one_thread():
        yield from _digits_rows(options)


def _exact_rows(options: BenchOptions) -> Iterator[Bar]:
    count = 200 if options.full else 10
    rows = (
        "families whose whole configuration is not bit-identical to the model",
        "subnets that differ from their export", "subnets with other parameters than estimated",
        "subnets with other multiply-accumulates than estimated",
        "free channel dimensions that are searchable, all families",
    )  # fmt: skip
    if not any(options.wants(bar, 30) for bar in rows):
        return
    found = np.zeros(4, np.int64)
    searchable, worst = [], 0.0
    for family in FAMILIES:
        options.progress(f"subnets of {family}")
        model, x, net = _family(family)
        with torch.enable_grad():  # without gradients, torch runs other kernels for encoders
            found[0] += not torch.equal(net.configure({})(x), model(x))
        searchable.append(net.space.coverage)
        rng = np.random.default_rng(0)
        for _ in range(count):
            config = net.space.sample(rng)
            exported, size = net.export(config), estimate(net, config)
            with FlopCounterMode(display=False) as counter:
                output = exported(x)
            gap = float((net.configure(config)(x) - output).abs().max())
            worst = max(worst, gap)
            macs = counter.get_total_flops() / 2 / len(x)
            params = sum(p.numel() for p in exported.parameters())
            found[1:] += [
                not gap <= _TOLERANCE, params != size["params"],
                family not in _UNCOUNTED and macs != size["macs"],
            ]  # fmt: skip
    n = count * len(FAMILIES)
    details = (f"{len(FAMILIES)} families", f"largest difference {worst:.1e}", "", "")
    for bar, value, detail in zip(rows[:4], found.tolist(), details, strict=True):
        if options.wants(bar):
            yield at_most(
                bar, value, 0, "", n=len(FAMILIES) if bar is rows[0] else n, detail=detail
            )
    if options.wants(rows[4]):
        worst_family = list(FAMILIES)[int(np.argmin(searchable))]
        yield at_least(
            rows[4], 100 * float(np.mean(searchable)), 97, "%", n=len(searchable),
            detail=f"mean; least {100 * min(searchable):.1f} % ({worst_family})",
        )  # fmt: skip


def _family(name: str) -> tuple[nn.Module, torch.Tensor, Supernet]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, inputs = FAMILIES[name]
        model, x = make().eval(), inputs()
    return model, x, Supernet(derive_space(model, x))


def _resnet(images: int = 3, widths: tuple[int, ...] = (32, 64, 128)) -> nn.Module:
    """Return a ResNet with two blocks per stage and seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stages, before = [], widths[0]
        for number, width in enumerate(widths):
            first = Basic(before, width, 2 if number else 1)
            stages.append(nn.Sequential(first, Basic(width, width, 1)))
            before = width
        return nn.Sequential(
            nn.Conv2d(images, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(),
            *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10),
        ).eval()  # fmt: skip


def _peer_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare with the peer on one network that both accept, in one run."""
    rows = {
        "subnets switched per second over modelopt's": (5.0, "x"),
        "time to derive the space over modelopt's": (1.0, "x"),
        "convolutions with searchable channels beyond modelopt's": (0.0, ""),
    }
    requested = [bar for bar in rows if options.wants(bar, 40)]
    if not requested:
        return
    options.progress(requested[0])
    if importlib.util.find_spec("modelopt") is None:
        yield from (
            not_judged(bar, rows[bar][1], f"{rows[bar][0]:g}", _NO_PEER) for bar in requested
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer: Any = importlib.import_module("modelopt.torch.nas")
        tools: Any = importlib.import_module("modelopt.torch.nas.utils")

        model, x = _resnet(), torch.randn(2, 3, 32, 32)
        divisors = {"nn.Conv2d": {"*": {"channel_divisor": 8}},
                    "nn.BatchNorm2d": {"*": {"feature_divisor": 8}}}  # fmt: skip

        def convert() -> Any:
            return peer.convert(copy.deepcopy(model), mode=[("fastnas", divisors)])

        theirs, net = convert(), Supernet(derive_space(model, x))
        rng = np.random.default_rng(0)
        runs = paired({
            "ours": lambda: net.configure(net.space.sample(rng)),
            "modelopt": lambda: tools.sample(theirs),
        })  # fmt: skip
        deriving = paired(
            {"ours": lambda: derive_space(model, x), "modelopt": convert}, blocks=6, once=True
        )
    each = f"{1 / runs.median_s('ours'):,.0f} and {1 / runs.median_s('modelopt'):,.0f} per second"
    if requested[0] == next(iter(rows)):
        yield runs.ratio("modelopt", "ours").at_least(requested[0], 5.0, detail=each)
    if list(rows)[1] in requested:
        yield deriving.ratio("ours", "modelopt").at_most(list(rows)[1], 1.0, detail=str(deriving))
    if list(rows)[2] in requested:
        layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)]
        ours = sum((f"{name}.weight", 0) not in net.space.reasons for name in layers)
        peers = {
            name.rpartition(".")[0] for name in tools.get_subnet_config(theirs) if "out_ch" in name
        }
        yield at_least(
            list(rows)[2], ours - len(peers & set(layers)), 0, "",
            detail=f"{ours} and {len(peers & set(layers))} of {len(layers)} convolutions",
        )  # fmt: skip


def _latency_rows(options: BenchOptions) -> Iterator[Bar]:
    rows = ("latency of exported subnets: median error of the prediction",
            "latency of exported subnets: rank correlation of the prediction")  # fmt: skip
    if not any(options.wants(bar, 60) for bar in rows):
        return
    options.progress(rows[0])
    x = torch.randn(8, 3, 32, 32)
    net = Supernet(derive_space(_resnet(), x))
    rng = np.random.default_rng(0)
    configs = [net.space.sample(rng) for _ in range(30 if options.full else 8)]
    with tempfile.TemporaryDirectory() as folder:  # timed under the same load
        durations = Durations(path=Path(folder) / "durations.db")
        predicted = [predict_latency(net, config, durations=durations) for config in configs]
    modules = [net.export(config) for config in configs]
    arms = {str(n): functools.partial(module, x) for n, module in enumerate(modules)}
    runs = paired(arms, blocks=40, budget_s=90.0, warm=True, once=True)
    measured = [1e3 * runs.minimum_s(name) for name in arms]
    signed = np.array(predicted) / measured - 1
    errors = np.abs(signed)
    spread = f"{100 * signed.min():+.1f} to {100 * signed.max():+.1f} %"
    detail = f"{min(measured):.2f} to {max(measured):.2f} ms; errors {spread}"
    if options.wants(rows[0]):
        yield at_most(
            rows[0], 100 * float(np.median(errors)), 10, "%", n=len(configs), detail=detail
        )
    if options.wants(rows[1]):
        tau = float(spearmanr(predicted, measured).statistic)
        yield at_least(rows[1], tau, 0.95, "", n=len(configs), detail="Spearman's")


def _digits_rows(options: BenchOptions) -> Iterator[Bar]:
    """Search a ResNet for the digits of scikit-learn, train the result again, and measure it."""
    seeds = 3 if options.full else 1
    rows = (
        "digits: measured latency over the whole network's", "digits: accuracy lost",
        "digits: accuracy over uniformly narrowed networks of this latency", "digits: CPU minutes",
    )  # fmt: skip
    if not any(options.wants(bar, 120 * seeds) for bar in rows):
        return
    ratios, lost, gained, minutes = [], [], [], []
    for seed in range(seeds):
        options.progress(f"{rows[0]}, seed {seed}")
        ratio, whole, small, uniform, cpu_s = _digits(seed)
        ratios.append(ratio)
        lost.append(100 * (whole - small))
        gained.append(100 * (small - uniform))
        minutes.append(cpu_s / 60)
    spread = ", ".join(f"{value:+.2f}" for value in lost)
    results = (
        at_most(rows[0], float(np.mean(ratios)), 0.6, "x", n=seeds),
        at_most(rows[1], float(np.mean(lost)), 0.5, "points", n=seeds, detail=spread),
        at_least(rows[2], float(np.mean(gained)), 0.5, "points", n=seeds),
        at_most(rows[3], max(minutes), 15, "min", n=seeds, detail="supernet, search, training"),
    )
    yield from (bar for bar in results if options.wants(bar.bar))


def _digits(seed: int) -> tuple[float, float, float, float, float]:
    """Return latency ratio, accuracy (whole, searched, uniform), CPU seconds of the search."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    images = torch.tensor(found.images[order] / 16, dtype=torch.float32)[:, None]
    classes = torch.tensor(found.target[order], dtype=torch.int64)
    train, valid, test = slice(800, None), slice(400, 800), slice(0, 400)
    torch.manual_seed(seed)
    x = images[valid]

    def accuracy(module: nn.Module, of: slice) -> float:
        with torch.no_grad():
            return float((module.eval()(images[of]).argmax(1) == classes[of]).float().mean())

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in torch.randperm(len(images[train])).split(64):
            yield images[train][batch], classes[train][batch]

    def trained(module: nn.Module, epochs: int = 12) -> nn.Module:
        optimizer = torch.optim.Adam(module.parameters(), 2e-3)
        module.train()
        for _ in range(epochs):
            for inputs, targets in batches():
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(inputs), targets).backward()
                optimizer.step()
        return module.eval()

    whole = trained(_resnet(1, (16, 32, 64)))
    began = _cpu_s()
    net = Supernet(derive_space(whole, x[:64]))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    fit(net, batches, nn.functional.cross_entropy, optimizer, epochs=6, seed=seed)
    study = search(
        net, lambda module: accuracy(module, valid), constraints={"latency": "<= 0.5x"},
        calibration=images[train][:256], seed=seed,
    ).run(budget=Budget(trials=60))  # fmt: skip
    best = study.best()
    assert best is not None  # the smallest network satisfies the limit
    small = trained(net.export(best.candidate))
    spent = _cpu_s() - began
    durations = Durations()
    limit = predict_latency(net, best.candidate, durations=durations)
    with durations.measuring():
        for uniform in _uniform(net):  # if none is as fast, the fastest one
            if predict_latency(net, uniform, durations=durations) <= 1.05 * limit:
                break
    narrow = trained(net.export(uniform))
    whole = trained(net.export(net.space.full))  # as many epochs as the others had
    sample = x[:64]
    with torch.no_grad():
        runs = paired({"small": lambda: small(sample), "whole": lambda: whole(sample)}, blocks=12)
    return (
        1 / runs.ratio("whole", "small").value, accuracy(whole, test), accuracy(small, test),
        accuracy(narrow, test), spent,
    )  # fmt: skip


def _cpu_s() -> float:
    """Return the CPU time of this process and of those it started and waited for, in s."""
    return sum(os.times()[:4])


def _uniform(net: Supernet) -> Iterator[dict[str, int]]:
    """Yield configurations of the whole depth with all widths at one fraction, widest first."""
    for share in np.linspace(1, 0, 41):
        yield {
            name: c.choices[round(share * (len(c.choices) - 1))] if name.startswith("width")
            else c.choices[-1]
            for name, c in net.space.choices.items()
        }  # fmt: skip
