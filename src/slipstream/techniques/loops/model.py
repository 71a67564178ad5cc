"""The cost model: predicted speed-ups of schedules, with an interval.

The time of a program is the sum of the times of its statements, each ``iterations * exp(forest)``
of the statement's features; a speed-up is the ratio of two such sums. A second forest predicts the
size of the error of a speed-up.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.codegen.legality import check
from slipstream.codegen.program import Program
from slipstream.codegen.schedule import Parallel, Schedule, Tree, extents_of
from slipstream.errors import SlipstreamError
from slipstream.files import read_arrays, replacing
from slipstream.techniques.loops.boosting import Forest, fit
from slipstream.techniques.loops.dataset import MAX_DISAGREEMENT, Measured
from slipstream.techniques.loops.features import NAMES, features

Array = np.ndarray[Any, Any]
COVERAGE = 0.8
MAX_SPEEDUP = 50.0
_SHIPPED = Path(__file__).with_name("model.npz")
_ITERATIONS = NAMES.index("iterations")
# Larger errors have no larger gradient: the times of some schedules cannot be predicted.
_MAX_LOG_ERROR = 1.0
_MIN_PROGRAMS = 20
_SPREAD_TREES = 60


@dataclass(frozen=True)
class Estimate:
    """A predicted speed-up over the unscheduled program, on one thread.

    Attributes:
        low, high: ends of an interval that contains 80 % of measured speed-ups.
    """

    speedup: float
    low: float
    high: float

    def __str__(self) -> str:
        within = max(self.high / self.speedup, self.speedup / self.low) - 1
        return f"{self.speedup:.2f}x, within {100 * within:.0f} %"


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted speed-ups, clipped to 1/50 to 50, of programs not trained on.

    Attributes:
        mape, median: mean and median of absolute errors relative to the measured speed-up.
        spearman, spearman_per_program: rank correlation over all schedules, and its mean over
            programs.
        coverage: fraction of measured speed-ups in their interval.
    """

    programs: int
    schedules: int
    mape: float
    median: float
    pearson: float
    spearman: float
    spearman_per_program: float
    coverage: float


class CostModel:
    """Predicts the CPU time of scheduled programs on one thread.

    Attributes:
        about: compiler, and numbers of programs and schedules, that it was trained on.
    """

    def __init__(self, time: Forest, spread: Forest, about: dict[str, Any]) -> None:
        self._time, self._spread, self.about = time, spread, about

    @classmethod
    def load(cls, path: Path | None = None) -> CostModel:
        """Read a model; the one that is part of the package if `path` is None.

        Raises:
            SlipstreamError: the file is not a model for these features.
        """
        return _load(path or _SHIPPED)

    def save(self, path: Path) -> None:
        """Write the model as a compressed ``.npz`` file."""
        arrays = {
            f"{name}_{part}": getattr(forest, part)
            for name, forest in (("time", self._time), ("spread", self._spread))
            for part in ("features", "thresholds", "leaves")
        }
        text = json.dumps(self.about | {"names": NAMES})
        about = np.frombuffer(text.encode(), np.uint8)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, about=about, **arrays)

    def log_times(self, trees: Sequence[Tree]) -> Array:
        """Return the logarithm of each tree's time, up to a constant."""
        rows, owner = features(trees)
        return _log_times(rows, owner, self._time(rows))

    def _times_and_errors(self, rows: Array, owner: Array) -> tuple[Array, Array]:
        """Return the logarithms of the time and of the size of its error, by owner of the rows."""
        logs = self._time(rows)
        spread = self._spread(_main_rows(rows, owner, logs)) + self.about["spread_offset"]
        return _log_times(rows, owner, logs), spread

    def predict(self, program: Program, schedules: Sequence[Schedule]) -> list[Estimate]:
        """Return the speed-up of each schedule over the unscheduled program.

        Raises:
            IllegalScheduleError: a schedule reverses a dependence, which is named.
            ScheduleError: a step does not fit the program, or an extent is a symbol.
            SlipstreamError: an access is indirect, or loops are parallel.
        """
        extents_of(program)
        trees = [Tree(program)]
        for schedule in schedules:
            if parallel := [step for step in schedule if isinstance(step, Parallel)]:
                raise SlipstreamError(
                    "the cost model predicts one thread", where=str(parallel[0]),
                    remedy="leave out the step",
                )  # fmt: skip
            check(Tree(program, schedule))
            trees.append(Tree(program, schedule.canonical(program)))
        times, spread = self._times_and_errors(*features(trees))
        gains = times[0] - times[1:]
        widths = np.exp(np.maximum(spread[0], spread[1:])) * self.about["width"]
        # A tree with the loops of the program has its time.
        widths[[tree.key == trees[0].key for tree in trees[1:]]] = 0
        return [
            Estimate(float(np.exp(g)), float(np.exp(g - w)), float(np.exp(g + w)))
            for g, w in zip(gains, widths, strict=True)
        ]


@lru_cache(maxsize=4)
def _load(path: Path) -> CostModel:
    arrays = read_arrays(path)
    try:
        about = json.loads(arrays["about"].astype(np.uint8).tobytes())
        if tuple(about.pop("names")) != NAMES:
            raise SlipstreamError(
                "the cost model is for other features", where=str(path),
                remedy="train it again: slipstream loops train",
            )  # fmt: skip
        time, spread = (
            Forest(*(arrays[f"{name}_{part}"] for part in ("features", "thresholds", "leaves")))
            for name in ("time", "spread")
        )
    except (KeyError, ValueError) as error:
        raise SlipstreamError(
            f"this is not a cost model of loops ({type(error).__name__}: {error})",
            where=str(path), remedy="write one with: slipstream loops train",
        ) from error  # fmt: skip
    return CostModel(time, spread, about)


def _log_times(rows: Array, owner: Array, logs: Array) -> Array:
    """Return log sum exp of the statements of each tree."""
    values = logs + np.log(2) * rows[:, _ITERATIONS]
    most = np.full(owner[-1] + 1, -np.inf)
    np.maximum.at(most, owner, values)
    sums: Array = most + np.log(np.bincount(owner, np.exp(values - most[owner])))
    return sums


def _main_rows(rows: Array, owner: Array, logs: Array) -> Array:
    """Return the row of the slowest statement of each tree."""
    order = np.lexsort((-(logs + np.log(2) * rows[:, _ITERATIONS]), owner))
    first = np.searchsorted(owner[order], np.arange(owner[-1] + 1))
    return rows[order[first]]


def part_of(program: Program) -> str:
    """Return what a program is used for: "train", "calibrate" or "evaluate", always the same."""
    number = zlib.crc32(program.key.encode()) % 20
    return "evaluate" if number < 3 else "calibrate" if number < 5 else "train"


@dataclass(frozen=True)
class _Samples:
    """Arrays of measured schedules.

    Attributes:
        rows, owner: features of statements and the schedule of each.
        logs: logarithm of the time in ns.
        base: the unscheduled sample of the same program, by sample.
        part: as `part_of` returns it, by sample.
    """

    rows: Array
    owner: Array
    logs: Array
    base: Array
    part: Array

    def gains(self, logs: Array) -> Array:
        """Return the logarithms of speed-ups, clipped, given those of times."""
        limit = np.log(MAX_SPEEDUP)
        gains: Array = np.clip(logs[self.base] - logs, -limit, limit)
        return gains

    def widths(self, spread: Array) -> Array:
        """Return the larger error of each schedule and its base, given logarithms of errors."""
        widths: Array = np.exp(np.maximum(spread, spread[self.base]))
        return widths

    def scheduled(self, part: str | None) -> Array:
        """Return the samples of a part, or all, that are not a base."""
        some = (self.part == part) | (part is None)
        return np.flatnonzero(some & (self.base != np.arange(len(self.base))))


def _samples(
    measured: Iterable[Measured], report: Callable[[str], None], parts: set[str], least: int = 1
) -> _Samples:
    """Return samples of at least `least` programs, some of them of each of `parts`."""
    rows, owner, logs, base, part = [], [], [], [], []
    count = 0
    for number, item in enumerate(measured):
        usable = [d <= MAX_DISAGREEMENT for d in item.disagreement]
        pairs = list(compress(zip(item.schedules, item.ns, strict=True), usable))
        if not usable[0] or len(pairs) < 2:
            continue
        some, owners = features([Tree(item.program, schedule) for schedule, _ in pairs])
        rows.append(some)
        owner.append(owners + count)
        logs += [np.log(ns) for _, ns in pairs]
        base += [count] * len(pairs)
        part += [part_of(item.program)] * len(pairs)
        count += len(pairs)
        if number % 100 == 0:
            report(f"features of {number} programs")
    if len(rows) < least or not parts <= set(part):
        raise SlipstreamError(
            f"{len(rows)} measured programs are too few",
            remedy="generate 100 or more: slipstream loops gen",
        )
    return _Samples(
        np.concatenate(rows), np.concatenate(owner), np.array(logs), np.array(base), np.array(part)
    )


def train(
    measured: Iterable[Measured], trees: int = 1000, seed: int = 0,
    report: Callable[[str], None] = lambda text: None, about: dict[str, Any] | None = None,
) -> tuple[CostModel, Accuracy]:  # fmt: skip
    """Train a model; a fixed fifth of the programs is used only to calibrate and evaluate it.

    Raises:
        SlipstreamError: there are too few programs.
    """
    samples = _samples(measured, report, {"train", "calibrate", "evaluate"}, _MIN_PROGRAMS)
    rng = np.random.default_rng(seed)
    used = np.flatnonzero((samples.part == "train")[samples.owner])
    rows, numbers = samples.rows[used], np.unique(samples.owner[used], return_inverse=True)
    targets, owner = samples.logs[numbers[0]], numbers[1]
    work = np.log(2) * rows[:, _ITERATIONS]
    offset = float(np.median(targets[owner] - work))

    def gradient(sums: Array) -> tuple[Array, Array]:
        times = _log_times(rows, owner, sums + offset)
        share = np.exp(sums + offset + work - times[owner])
        error = np.clip(times - targets, -_MAX_LOG_ERROR, _MAX_LOG_ERROR)[owner]
        return error * share, share**2

    time = fit(
        rows, gradient, trees, rng, report=lambda tree, _: report(f"tree {tree + 1} of {trees}")
    )
    logs = time(samples.rows)
    times = _log_times(samples.rows, samples.owner, logs)
    errors = np.abs(np.clip(times[samples.base] - times, -4, 4) - samples.gains(samples.logs))
    main = _main_rows(samples.rows, samples.owner, logs)
    held = samples.scheduled("calibrate")
    sizes = np.log(np.maximum(errors[held], 1e-2))
    start = float(np.median(sizes))
    spread = fit(
        main[held], lambda sums: (sums + start - sizes, np.ones(len(sums))), _SPREAD_TREES, rng,
        levels=3,
    )  # fmt: skip
    widths = samples.widths(spread(main) + start)
    width = float(np.quantile(errors[held] / widths[held], COVERAGE))
    model = CostModel(time, spread, {
        **(about or {}), "programs": len(np.unique(samples.base)), "schedules": len(samples.base),
        "spread_offset": start, "width": width,
    })  # fmt: skip
    return model, _accuracy(model, samples, "evaluate")


def evaluate(
    model: CostModel, measured: Iterable[Measured],
    report: Callable[[str], None] = lambda text: None, part: str | None = "evaluate",
) -> Accuracy:  # fmt: skip
    """Compare predictions with measurements.

    Args:
        part: the programs to compare, see `part_of`; None for all of them, if the model was trained
            on other ones.

    Raises:
        SlipstreamError: there are too few programs.
    """
    samples = _samples(measured, report, set() if part is None else {part})
    return _accuracy(model, samples, part)


def _accuracy(model: CostModel, samples: _Samples, part: str | None) -> Accuracy:
    times, spread = model._times_and_errors(samples.rows, samples.owner)
    predicted = samples.gains(times)
    widths = samples.widths(spread) * model.about["width"]
    held = samples.scheduled(part)
    measured = samples.gains(samples.logs)
    a, b = predicted[held], measured[held]
    relative = np.abs(np.exp(a - b) - 1)
    programs = np.unique(samples.base[held])
    own = [held[samples.base[held] == p] for p in programs]
    ranks = [_spearman(predicted[o], measured[o]) for o in own if len(o) > 4]
    return Accuracy(
        len(programs), len(held), float(relative.mean()), float(np.median(relative)),
        float(np.corrcoef(a, b)[0, 1]), _spearman(a, b), float(np.mean(ranks)) if ranks else 0.0,
        float((np.abs(a - b) <= widths[held]).mean()),
    )  # fmt: skip


def _spearman(a: Array, b: Array) -> float:
    from scipy.stats import rankdata

    ranks = np.corrcoef(rankdata(a), rankdata(b))
    return float(np.nan_to_num(ranks[0, 1]))
