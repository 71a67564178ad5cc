"""``slipstream bench trials``: schedulers compared with each other and a bound, on a virtual clock.

Trials are drawn as in the literature: log-normal work, a speed-up of w / (1 + gamma (w - 1)) over w
devices, a share that uses one device; a resize costs 15 s.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engines.trials import (
    ClusterState,
    Level,
    TrialSet,
    bound_s,
    makespan,
    scheduler_by_name,
    simulate,
)
from slipstream.engines.trials.forecast import predict
from slipstream.engines.trials.ray_executor import RayExecutor
from slipstream.errors import MissingExtraError
from slipstream.search import (
    Asha,
    Cost,
    Estimator,
    Float,
    Halving,
    Hyperband,
    Int,
    Space,
    State,
    Study,
    estimator,
    study,
)
from slipstream_bench.harness import one_thread, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.trial_training import resized_trial, train, train_epoch

_NAMES = ("fifo", "uniform", "fluid", "level")
_HALVING = {4: 1.9, 8: 2.7, 16: 3.6, 32: 4.2, 64: 4.5}


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: three seeds, and no thousand devices in the grid."""
    yield from _grid(options)
    yield from _halving(options)
    yield from _policies(options)
    yield from _scale(options)
    yield from _resized(options)
    yield from _real(options)


def drawn(m: int, seed: int) -> TrialSet:
    """Draw `m` typical trials."""
    rng = np.random.default_rng(seed)
    return TrialSet.of(
        rng.lognormal(5, 0.6, m), rng.uniform(0.03, 0.15, m), rng.uniform(0.3, 0.9, m)
    )


def _grid(options: BenchOptions) -> Iterator[Bar]:
    mean, worst = "makespan over T*, mean of cells", "makespan over T*, worst cell"
    simpler = "makespan over the best simpler rule, worst cell"
    if not any(options.wants(bar, 60.0) for bar in (mean, worst, simpler)):
        return
    devices, seeds = ((4, 10, 100, 1000), 10) if options.full else ((4, 10, 100), 3)
    cells: dict[str, dict[str, float]] = {}
    for n in devices:
        for m in (n // 2, n, 2 * n + 1, 5 * n):
            options.progress(f"{n} devices, {m} trials")
            few = min(seeds, 2) if n == 1000 else seeds
            found: dict[str, list[float]] = {name: [] for name in _NAMES}
            for seed in range(few):
                trials = drawn(m, seed)
                bound = bound_s(trials, n)
                for name in _NAMES:
                    found[name].append(makespan(trials, n, scheduler_by_name(name)) / bound)
            cells[f"{n} devices, {m} trials"] = {k: float(np.mean(v)) for k, v in found.items()}
    level = {cell: row["level"] for cell, row in cells.items()}
    over_simpler = {c: row["level"] / min(row[k] for k in _NAMES[:3]) for c, row in cells.items()}
    data: Mapping[str, Any] = {"cells": cells}
    n = len(cells)
    if options.wants(mean):
        value = float(np.mean(list(level.values())))
        yield at_most(mean, value, 1.2, "x", n=n, detail=f"{seeds} seeds per cell", data=data)
    if options.wants(worst):
        at = max(level, key=level.__getitem__)
        yield at_most(worst, level[at], 1.35, "x", n=n, detail=at)
    if options.wants(simpler):
        at = max(over_simpler, key=over_simpler.__getitem__)
        yield at_most(simpler, over_simpler[at], 1.02, "x", n=n, detail=at)


def _halving(options: BenchOptions) -> Iterator[Bar]:
    """Simulate rung by rung, like a synchronous policy with a barrier."""
    for n, target in _HALVING.items():
        bar = f"synchronous halving 81 to 1 on {n} devices, over first come first served"
        if not options.wants(bar, 5.0):
            continue
        options.progress(bar)
        seeds = 10 if options.full else 3
        ratios = [_rungs_s(n, seed, "fifo") / _rungs_s(n, seed, "level") for seed in range(seeds)]
        detail = f"{min(ratios):.2f} to {max(ratios):.2f}; the paper reports 3"
        yield at_least(bar, float(np.mean(ratios)), target, "x", n=seeds, detail=detail)


def _rungs_s(devices: int, seed: int, scheduler: str) -> float:
    rng = np.random.default_rng(seed)
    m, eta, rungs = 81, 3, 5
    unit_s = rng.lognormal(0.0, 0.35, m) * 60.0
    gamma, used = rng.uniform(0.03, 0.15, m), rng.uniform(0.3, 0.9, m)
    alive, before, total_s = np.arange(m), 0, 0.0
    for rung in range(rungs):
        trials = TrialSet.of(unit_s[alive] * (eta**rung - before), gamma[alive], used[alive])
        total_s += makespan(trials, devices, scheduler_by_name(scheduler))
        before = eta**rung
        alive = rng.permutation(alive)[: max(1, len(alive) // eta)]
    return total_s


SPACE = Space({"size": Float(0.0, 1.0), "gamma": Float(0.03, 0.15), "used": Float(0.3, 0.9)})


@estimator(
    {"loss": ""},
    cost=lambda c: Cost(60.0 * math.exp(0.7 * (2 * c["size"] - 1)), c["gamma"], c["used"]),
)
def never_run(config: Mapping[str, Any]) -> float:
    """Return the loss; never called, since a prediction needs the cost alone."""
    return config["size"]  # type: ignore[no-any-return]


def _policies(options: BenchOptions) -> Iterator[Bar]:
    policies: dict[str, Callable[[], Any]] = {
        "ASHA": lambda: Asha(1, 81, n=150),
        "Hyperband (BOHB's brackets)": lambda: Hyperband(1, 81, rounds=1),
        "halving, promoted early": lambda: Halving(1, 81),
    }
    for name, make in policies.items():
        bar = f"{name} through the search loop, over first come first served"
        if not options.wants(bar, 10.0):
            continue
        options.progress(bar)
        ratios = {}
        for n in (8, 16, 64):
            takes = {
                scheduler: predict(
                    study("s", SPACE, "loss", estimator=never_run, rungs=make()), [n],
                    scheduler=scheduler,
                )[0].makespan_s
                for scheduler in ("fifo", "level")
            }  # fmt: skip
            ratios[n] = takes["fifo"] / takes["level"]
        detail = ", ".join(f"{n} devices {ratio:.2f}" for n, ratio in ratios.items())
        yield at_least(bar, min(ratios.values()), 1.3, "x", n=len(ratios), detail=detail)


class _Timed(Level):
    """The level rule, which records the time of its decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.took_s: list[float] = []

    def decide(self, state: ClusterState) -> None:
        began = time.process_time()
        super().decide(state)
        self.took_s.append(time.process_time() - began)


def _scale(options: BenchOptions) -> Iterator[Bar]:
    whole, decision = "5000 trials on 1000 devices, simulated", "a decision at 1000 devices, p99"
    if not (options.wants(whole, 20.0) or options.wants(decision, 20.0)):
        return
    options.progress(whole)
    trials, scheduler = drawn(5000, 0), _Timed()
    began = time.process_time()
    clock = simulate(trials, 1000, scheduler)
    elapsed_s = time.process_time() - began
    if options.wants(whole):
        over = clock.now_s / bound_s(trials, 1000)
        yield at_most(whole, elapsed_s, 20.0, "s", detail=f"makespan {over:.2f} times T*")
    if options.wants(decision):
        slow = float(np.quantile(scheduler.took_s, 0.99))
        detail = f"{len(scheduler.took_s)} decisions, the first of all {scheduler.took_s[0]:.1f} s"
        yield at_most(decision, 1e3 * slow, 10.0, "ms", n=len(scheduler.took_s), detail=detail)


def _resized(options: BenchOptions) -> Iterator[Bar]:
    bar = "a resized trial's loss curve, largest relative difference"
    if not options.wants(bar, 60.0):
        return
    options.progress(bar)
    try:
        with tempfile.TemporaryDirectory() as folder:
            resized, alone, widths = resized_trial(Path(folder))
    except MissingExtraError as error:
        yield not_judged(bar, "", "<= 1e-05", error.what)
        return
    differences = [abs(a / b - 1.0) for a, b in zip(resized, alone, strict=True)]
    detail = (
        f"widths {widths} one after another on Ray, {len(differences)} steps over gloo, against "
        "width 1 alone"
    )
    data = {"resized": resized, "alone": alone}
    row = at_most(bar, max(differences), 1e-5, "", n=len(differences), detail=detail, data=data)
    yield replace(row, holds=row.holds and widths == [1, 2, 1])


NETS = Space({"lr": Float(0.01, 0.1, log=True), "hidden": Int(384, 640)})
_SLOTS = 2


def _real(options: BenchOptions) -> Iterator[Bar]:
    """Run halving of nine real trials on two slots of Ray, and compare with the prediction.

    The time of an epoch is measured first, without our code; the time to load torch, by two trials
    of one epoch.
    """
    selected = {
        f"simulated makespan off the real one, {title}": name
        for name, title in (("fifo", "first come first served"), ("level", "the level rule"))
    }
    rows = {bar: name for bar, name in selected.items() if options.wants(bar, 90.0)}
    if not rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        options.progress("time of an epoch and of loading")
        epoch_s = _epochs_s(Path(folder))

        def cost(config: Mapping[str, Any]) -> Cost:
            return Cost(float(np.interp(config["hidden"], list(epoch_s), list(epoch_s.values()))))

        def training(name: str, rungs: Halving) -> Study:
            declared, store = Estimator(train, {"loss": ""}, cost=cost), Path(folder) / f"{name}.db"
            return study(
                "s", NETS, "loss", estimator=declared, strategy="random", rungs=rungs, store=store
            )

        try:
            # Twice, because the first time reads torch from the disk.
            brief = [
                _takes_s(training(name, Halving(1, 1, n=_SLOTS)), "fifo")
                for name in ("first", "second")
            ][-1]
        except MissingExtraError as error:
            for bar in rows:
                yield not_judged(bar, "%", "<= 10", error.what)
            return
        loading_s = max(brief - max(epoch_s.values()), 0.0)
        for bar, name in rows.items():
            options.progress(bar)
            halving = training(name, Halving(24, 216))
            predicted_s = predict(halving, [_SLOTS], scheduler=name, max_width=1)[0].makespan_s
            real_s = _takes_s(halving, name)
            off = 100 * abs((predicted_s + loading_s) / real_s - 1)
            detail = (
                f"{predicted_s:.1f} s and {loading_s:.1f} s of loading predicted, {real_s:.1f} s "
                f"measured; {len(halving.trials)} trials"
            )
            yield at_most(bar, off, 10.0, "%", n=len(halving.trials), detail=detail)


def _epochs_s(folder: Path) -> dict[int, float]:
    """Return seconds per epoch by hidden width."""
    seconds = {}
    for hidden in (384, 512, 640):
        arguments = {"path": str(folder / f"{hidden}"), "hidden": hidden, "lr": 0.01, "seed": 0}
        with one_thread():
            times = times_s(functools.partial(train_epoch, **arguments), 20, clock="wall")  # type: ignore[arg-type]
        seconds[hidden] = float(np.median(times))
    return seconds


def _takes_s(halving: Study, scheduler: str) -> float:
    """Return seconds on Ray, from the first start to the last end."""
    executor = RayExecutor(_SLOTS, scheduler=scheduler, max_width=1, ahead=9)
    halving.run(executor)
    assert all(trial.state is State.COMPLETE for trial in halving.trials), halving.trials
    return max(end for *_, end in executor.intervals) - min(
        start for _, _, start, _ in executor.intervals
    )
