"""``slipstream bench ensembles``: networks without redundant units, and ensembles of peers.

Fashion-MNIST, 20,000 images to train with, a perceptron of two hidden layers. Times are CPU time of
one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.measure import timed
from slipstream.techniques.ensembles import Ensemble, build, compact, evaluate
from slipstream_bench.harness import one_thread
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.adasum.study import Samples
from slipstream_bench.systems.adasum.tasks import MISSING, fashion

_EPOCHS, _SAMPLE = 8, 5_000
_THRESHOLDS = {0.95: 0.1, 0.9: 0.3, 0.8: 0.8}
_TIME, _ACCURACY = "8 members: CPU time over independent", "8 members: accuracy lost"
_NLL, _SIZE = "8 members: negative log-likelihood added", "8 members: parameters over independent"
_DISAGREE, _ECE = "8 members: disagreement over independent", "8 members: calibration error added"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of the bench. Quick takes three minutes: one seed, four epochs."""
    study = fashion("MLP")
    if study is None:
        yield not_judged(_TIME, "x", "<= 0.4", MISSING)
        return
    with one_thread():
        yield from _compaction_rows(options, study.train, study.held)
        yield from _ensemble_rows(options, study.train, study.held)


def _network(width: int = 256) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def _trainer(train: Samples, epochs: int) -> Callable[[nn.Module, float, int], None]:
    def run(model: nn.Module, share: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rounds = max(1, round(share * epochs))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
        for _ in range(rounds):
            for rows in torch.randperm(len(train.y), generator=generator).split(128):
                optimizer.zero_grad()
                cross_entropy(model(train.x[rows]), train.y[rows]).backward()
                optimizer.step()
            schedule.step()

    return run


def _compaction_rows(options: BenchOptions, train: Samples, held: Samples) -> Iterator[Bar]:
    names = {
        correlation: f"compaction at {correlation}: points of accuracy lost"
        for correlation in _THRESHOLDS
    }
    wanted = [one for one, bar in names.items() if options.wants(bar)]
    if not wanted:
        return
    options.progress("a network to compact")
    torch.manual_seed(0)
    model = _network(512)
    _trainer(train, _EPOCHS if options.full else 4)(model, 1.0, 0)
    before = evaluate(Ensemble([model]), held.x, held.y)
    for correlation in wanted:
        options.progress(names[correlation])
        made = compact(model, list(train.x[:_SAMPLE].split(1000)), correlation)
        after = evaluate(Ensemble([made.model]), held.x, held.y)
        lost = 100 * (before.accuracy - after.accuracy)
        gone = ", ".join(f"{one.dead} + {one.dependent} of {one.units}" for one in made.layers)
        shares = f"{100 * before.accuracy:.2f} to {100 * after.accuracy:.2f} %"
        detail = (
            f"{shares}, {made.parameters:.2f} of the parameters, not trained again; "
            f"dead + dependent: {gone}"
        )
        target = _THRESHOLDS[correlation]
        yield at_most(names[correlation], lost, target, "points", n=1, detail=detail)


def _ensemble_rows(options: BenchOptions, train: Samples, held: Samples) -> Iterator[Bar]:
    rows = (_TIME, _ACCURACY, _NLL, _SIZE, _DISAGREE, _ECE)
    if not any(options.wants(bar) for bar in rows):
        return
    seeds = range(3 if options.full else 1)
    found: dict[str, list[float]] = {bar: [] for bar in rows}
    told = []
    for seed in seeds:
        made: dict[str, Ensemble] = {}
        cpu: dict[str, float] = {}
        for method in ("independent", "peers"):
            options.progress(f"8 members, {method}, seed {seed}")
            torch.manual_seed(seed)

            def run(made: dict[str, Ensemble], method: str, seed: int) -> None:
                made[method] = build(
                    _network(), _trainer(train, _EPOCHS if options.full else 4), members=8,
                    method=method, sample=list(train.x[:_SAMPLE].split(1000)),  # type: ignore[arg-type]
                    correlation=0.9, share=0.25, seed=100 * seed,
                )  # fmt: skip

            cpu[method] = timed(functools.partial(run, made, method, seed))["cpu"]
        one, other = (evaluate(made[m], held.x, held.y) for m in ("peers", "independent"))
        sizes = [sum(p.numel() for p in made[m].parameters()) for m in ("peers", "independent")]
        found[_TIME].append(cpu["peers"] / cpu["independent"])
        found[_ACCURACY].append(100 * (other.accuracy - one.accuracy))
        found[_NLL].append(one.nll - other.nll)
        found[_SIZE].append(sizes[0] / sizes[1])
        found[_DISAGREE].append(one.disagreement / other.disagreement)
        found[_ECE].append(one.ece - other.ece)
        told.append(f"{100 * one.accuracy:.2f} and {100 * other.accuracy:.2f} %")
    targets = {_TIME: 0.4, _ACCURACY: 0.15, _NLL: 0.005, _SIZE: 0.75, _ECE: 0.01}
    for bar in rows:
        values = np.array(found[bar])
        detail = f"peers and independent: {', '.join(told)}; each seed {np.round(values, 4)}"
        unit = "points" if bar == _ACCURACY else "x" if "over" in bar else ""
        if bar == _DISAGREE:
            yield at_least(bar, float(values.mean()), 0.6, unit, n=len(values), detail=detail)
        else:
            mean = float(values.mean())
            yield at_most(bar, mean, targets[bar], unit, n=len(values), detail=detail)
