"""``slipstream bench quadratic``: what quadratic layers keep, how long they take, what they learn.

Times are CPU time of one thread. Accuracies are of scikit-learn's digits, one layer, over seeds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from slipstream.heap import keep_pages
from slipstream.surgery import saved_bytes
from slipstream.techniques.quadratic import Conv2d, Linear, convert
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

_SHAPES = ((64, 64, 16, 32), (16, 32, 16, 32), (128, 128, 4, 16), (32, 32, 32, 8))
"""Channels in and out, images, height and width."""
_EPOCHS = 60


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of the bench. Quick takes three minutes: two seeds."""
    keep_pages()
    blocks = 15 if options.full else 7
    with one_thread():
        yield from _memory_rows(options)
        yield from _conversion_rows(options)
        yield from _time_rows(options, blocks)
        yield from _accuracy_rows(options)


def _memory_rows(options: BenchOptions) -> Iterator[Bar]:
    x = torch.randn(32, 64, 32, 32, requires_grad=True)
    first = nn.Conv2d(64, 64, 3, padding=1)
    cases: dict[str, tuple[nn.Module, nn.Module, float]] = {
        "saved bytes over a first-order convolution": (Conv2d(64, 64, 3, padding=1), first, 1.05),
        "saved bytes with branch norm over convolution and norm": (
            Conv2d(64, 64, 3, padding=1, branch_norm=True),
            nn.Sequential(first, nn.BatchNorm2d(64)),
            1.1,
        ),
    }
    for bar, (ours, theirs, target) in cases.items():
        if options.wants(bar):
            options.progress(bar)
            kept = [
                saved_bytes(functools.partial(one, x), one.parameters()) for one in (ours, theirs)
            ]
            detail = f"{kept[0] / 1e6:.2f} MB, first order {kept[1] / 1e6:.2f} MB; 64 to 64, 3 x 3"
            yield at_most(bar, kept[0] / kept[1], target, "x", n=1, detail=detail)
    bar = "saved bytes of 7 convolutions, hybrid over naive"
    if options.wants(bar):
        options.progress(bar)
        kept = []
        for memory in ("hybrid", "naive"):
            widths = (1, 16, 16, 32, 32, 32, 64, 64)
            layers = [
                Conv2d(a, b, 3, padding=1, branch_norm=True, memory=memory)
                for a, b in itertools.pairwise(widths)
            ]
            model = nn.Sequential(*layers)
            images = torch.randn(16, 1, 28, 28)
            kept.append(saved_bytes(functools.partial(model, images), model.parameters()))
        detail = f"{kept[0] / 1e6:.1f} of {kept[1] / 1e6:.1f} MB, with branch norm"
        yield at_most(bar, kept[0] / kept[1], 0.5, "x", n=1, detail=detail)


def _conversion_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "conversion: largest difference of outputs at step 0"
    if not options.wants(bar):
        return
    options.progress(bar)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip
    x = torch.randn(8, 3, 16, 16)
    before = model(x).detach()
    convert(model)
    worst = float((model(x) - before).abs().max() / before.abs().max())
    yield at_most(bar, worst, 1e-6, "", n=1, detail="three layers, a norm between")


def _time_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for inputs, outputs, images, size in _SHAPES:
        shape = f"{inputs} to {outputs}, {images} images of {size} x {size}"
        step, again = f"step over naive: {shape}", f"step over checkpointing: {shape}"
        if not (options.wants(step) or options.wants(again)):
            continue
        options.progress(step)
        x = torch.randn(images, inputs, size, size, requires_grad=True)
        arms = {
            "hybrid": _step(Conv2d(inputs, outputs, 3, padding=1), x),
            "naive": _step(_Separate(inputs, outputs), x),
            "checkpoint": _step(_Separate(inputs, outputs), x, checkpointed=True),
        }
        taken = paired(arms, blocks=blocks, budget_s=8.0)
        if options.wants(step):
            yield taken.ratio("hybrid", "naive").at_most(step, 1.0, detail=f"{taken}")
        if options.wants(again):
            yield taken.ratio("hybrid", "checkpoint").at_most(again, 0.85, detail=f"{taken}")


class _Separate(nn.Module):
    """The same neuron as anybody would write it: three convolutions, a product, a sum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(inputs, outputs, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.a(x) * self.b(x) + self.c(x)
        return made


def _step(layer: nn.Module, x: torch.Tensor, *, checkpointed: bool = False) -> Callable[[], object]:
    sources = [x, *layer.parameters()]
    gradient = torch.ones_like(layer(x))

    def step() -> object:
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return torch.autograd.grad(y, sources, gradient)

    return step


def _accuracy_rows(options: BenchOptions) -> Iterator[Bar]:
    bars = {
        "digits: ours over an equal ReLU MLP": ("mlp", 0.2), "digits: ours over t4": ("t4", 0.0),
        "digits: ours over t3": ("t3", 0.0), "digits: ours over t2": ("t2", 0.0),
    }  # fmt: skip
    wanted = {bar: case for bar, case in bars.items() if options.wants(bar)}
    if not wanted:
        return
    seeds = range(5 if options.full else 2)
    found: dict[str, list[float]] = {}
    for name in ("ours", *(name for name, _ in wanted.values())):
        options.progress(f"digits: {name}")
        found[name] = [_accuracy(name, seed) for seed in seeds]
    means = ", ".join(f"{name} {np.mean(values):.2f}" for name, values in found.items())
    for bar, (other, target) in wanted.items():
        gains = np.array(found["ours"]) - np.array(found[other])
        sizes = f"{_EPOCHS} epochs; ours has 1,930 parameters, the MLP 1,960"
        detail = f"{means} %; {sizes}; each seed {np.round(gains, 2)}"
        yield at_least(bar, float(gains.mean()), target, "points", n=len(gains), detail=detail)


def _accuracy(name: str, seed: int) -> float:
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    x = torch.tensor(digits.data[order] / 16 - 0.3, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    model: nn.Module
    if name == "mlp":
        model = nn.Sequential(nn.Linear(64, 26), nn.ReLU(), nn.Linear(26, 10))
    else:
        model = Linear(64, 10, neuron=name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(1347).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return 100 * float((model(x[1347:]).argmax(1) == y[1347:]).float().mean())
