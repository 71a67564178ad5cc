"""What Adasum does to training: simulated workers, tuned averages and sums beside it.

Two ways of putting it in are judged: `AdasumOptimizer`, where each worker has a momentum of its
own, and `adasum_hook` before one SGD with momentum.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from scipy.stats import spearmanr
from torch import nn

from slipstream.bars import Bar, BenchOptions, at_least, not_judged
from slipstream.techniques.distributed.adasum.benefit import benefit
from slipstream.techniques.distributed.adasum.study import Study

# The learning rate that is best for one worker is found among these.
_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
_WAYS = {"adasum": "AdasumOptimizer", "adasum_hook": "adasum_hook"}
_MISSING = "Fashion-MNIST is not on this machine"
_SEEDS = 5
_PROFILED_AFTER = 20


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: one seed, and fewer learning rates for 64 workers."""
    yield from _headline(options)
    yield from _window(options)
    yield from _benefit(options)


def _headline(options: BenchOptions) -> Iterator[Bar]:
    for name in ("MLP", "CNN"):
        of = {
            rule: (
                f"16 workers, {name}, {way}: over averaging at one worker's learning rate",
                f"16 workers, {name}, {way}: over the best tuned average or sum",
            )
            for rule, way in _WAYS.items()
        }
        if not any(options.wants(bar) for bars in of.values() for bar in bars):
            continue
        study, alone = _study(name, 16), _study(name, 1, epochs=1)
        if study is None or alone is None:
            yield not_judged(of["adasum"][0], "points", ">= 3", _MISSING)
            continue
        options.progress(of["adasum"][0])
        seeds = range(_SEEDS if options.full else 1)
        lr = _best_rate(alone, seeds)
        mean = _reached(study, "average", lr, seeds)
        tried = {
            (rule, rate): _reached(study, rule, rate, seeds)
            for rule, rate in itertools.product(("average", "sum"), (*_RATES[1:], 0.16))
        }
        (rule, rate), best = max(tried.items(), key=lambda one: one[1])
        for way, (gain, beside) in of.items():
            ours = _reached(study, way, lr, seeds)
            said = f"{ours:.1f} against {mean:.1f} %, lr {lr:g}; momentum 0.9, 32 samples a worker"
            yield at_least(gain, ours - mean, 3.0, "points", n=len(seeds), detail=said)
            yield at_least(
                beside, ours - best, -0.5, "points", n=len(seeds),
                detail=f"{ours:.1f} against {best:.1f} %: {rule} at {rate:g}",
            )  # fmt: skip


def _best_rate(alone: Study, seeds: Iterable[int]) -> float:
    """The learning rate that is best for one worker."""
    return max(_RATES, key=lambda rate: _reached(alone, "average", rate, seeds))


def _reached(study: Study, rule: str, lr: float, seeds: Iterable[int]) -> float:
    return statistics.mean(study.accuracy(rule, lr, seed) for seed in seeds)


def _window(options: BenchOptions) -> Iterator[Bar]:
    of = {rule: f"64 workers, {way}: learning rates within 95 % of the best, largest over smallest"
          for rule, way in _WAYS.items()}  # fmt: skip
    if not any(map(options.wants, of.values())):
        return
    study = _study("MLP", 64)
    if study is None:
        yield not_judged(of["adasum"], "x", ">= 8", _MISSING)
        return
    options.progress(of["adasum"])
    rates = [0.0005 * 2**k for k in range(10)]
    seeds = range(_SEEDS if options.full else 1)
    width, said = _window_of(study, "sum", rates, seeds)
    for rule, bar in of.items():
        ours, detail = _window_of(study, rule, rates, seeds)
        yield Bar(
            bar, ours, "x", ">= 8, and >= 4 times that of sums", ours >= max(8.0, 4.0 * width),
            len(seeds), f"{detail}; sums {width:g}x, {said}",
        )  # fmt: skip


def _window_of(
    study: Study, rule: str, rates: Sequence[float], seeds: Iterable[int]
) -> tuple[float, str]:
    """Largest over smallest rate of those around the best that are within 95 % of it."""
    found = [_reached(study, rule, rate, seeds) for rate in rates]
    best = max(range(len(rates)), key=found.__getitem__)
    good = [accuracy >= 0.95 * found[best] for accuracy in found]
    first = last = best
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(rates) and good[last + 1]:
        last += 1
    said = f"{found[best]:.1f} % at {rates[best]:g}, from {rates[first]:g} to {rates[last]:g}"
    return rates[last] / rates[first], said


def _benefit(options: BenchOptions) -> Iterator[Bar]:
    bar = "benefit told from one step's gradients, rank correlation with the gain of 4 tasks"
    if not options.wants(bar):
        return
    tasks = _tasks()
    if tasks is None:
        yield not_judged(bar, "", ">= 0.8", _MISSING)
        return
    options.progress(bar)
    seeds = range(3 if options.full else 1)
    told, gains, said = [], [], []
    for name, (study, alone) in tasks.items():
        lr = _best_rate(alone, seeds)
        told.append(benefit(study.products(lr, 0, _PROFILED_AFTER)).orthogonality)
        reached = [_reached(study, rule, lr, seeds) for rule in ("adasum_hook", "average")]
        gains.append(reached[0] - reached[1])
        said.append(f"{name}: {told[-1]:.2f}, {gains[-1]:+.1f} points")
    value = float(spearmanr(told, gains).statistic)
    yield at_least(
        bar, value, 0.8, "", n=len(tasks),
        detail=f"16 workers, each task's best rate of one worker; orthogonality after "
        f"{_PROFILED_AFTER} steps, gain over averaging: {'; '.join(said)}",
    )  # fmt: skip


def _tasks() -> dict[str, tuple[Study, Study]] | None:
    """Of each: 16 workers, and one."""
    from sklearn.datasets import load_digits

    found = {}
    for name in ("MLP", "CNN"):
        study, alone = _study(name, 16), _study(name, 1, epochs=1)
        if study is None or alone is None:
            return None
        found[f"Fashion-MNIST, {name}"] = (study, alone)
    digits = load_digits()
    x = torch.from_numpy(digits.data).float() / 16.0
    y = torch.from_numpy(digits.target)
    for batch in (4, 16):
        study = Study(_small, x[:1400], y[:1400], x[1400:], y[1400:], batch=batch, epochs=12)
        found[f"digits, {batch} samples a worker"] = (study, replace(study, workers=1, epochs=3))
    return found


@functools.cache
def _images(split: str, limit: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    from slipstream import data
    from slipstream.data import MissingDataError

    try:
        found = data.get("fashion_mnist", split=split, limit=limit)
    except MissingDataError:
        return None
    pixels = torch.from_numpy(found.images.copy()).float() / 255
    return (pixels - pixels.mean()) / pixels.std(), torch.from_numpy(found.labels.copy())


def _study(name: str, workers: int, epochs: int = 3) -> Study | None:
    """Fashion-MNIST, 20,000 samples, as the specification's table."""
    train, held = _images("train", 20_000), _images("test", 10_000)
    if train is None or held is None:
        return None
    shape = (-1, 784) if name == "MLP" else (-1, 1, 28, 28)
    make = _mlp if name == "MLP" else _cnn
    return Study(
        make, train[0].view(shape), train[1], held[0].view(shape), held[1], workers=workers,
        epochs=epochs,
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
