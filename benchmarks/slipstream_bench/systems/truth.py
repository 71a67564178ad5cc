"""``slipstream bench truth``: predictions for models of no other bench, idle and disturbed.

Each is from one profile, with the default heap, as for a user. A third of the families is held out:
improvements of these rows look at the others alone. No cell is left out for too wide a measurement:
it counts as not predicted within 12 %.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, median

from slipstream import technique
from slipstream.workload import Workload
from slipstream_bench import truth_models
from slipstream_bench.advice import time_advice
from slipstream_bench.harness import busy_cores
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import Cell, measure_cells

# Techniques without settings; one that does not apply to a family reports that.
_TECHNIQUES = (
    "amp:bf16", "channels_last", "fused_optimizer:fused", "fused_optimizer:foreach",
    "accumulation:4", "checkpointing", "batch_size:x2", "allocator:keep",
    "amp:bf16+allocator:keep", "sdpa", "scan",
)  # fmt: skip
_QUICK = ("dlrm", "autoencoder")
_QUICK_TECHNIQUES = ("amp:bf16", "fused_optimizer:fused", "batch_size:x2", "allocator:keep")
_CONDITIONS = ("idle", "busy")
_WORST = 12.0
_NORMAL = NormalDist()
# Half of a 90 % interval, in standard deviations.
_REACH = _NORMAL.inv_cdf(0.95)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per cell, then the summary rows of each condition."""
    families = [make.__name__ for make in truth_models.FAMILIES] if options.full else _QUICK
    texts = _TECHNIQUES if options.full else _QUICK_TECHNIQUES
    names = [technique.combination_name(technique.parse(text)) for text in texts]
    for condition in _CONDITIONS if options.full else _CONDITIONS[:1]:
        cells: list[Cell] = []
        for family in families:
            for cell in _cells(options, family, condition, names):
                cells.append(cell)
                if cell.name not in options.done:
                    yield cell.to_row()
        cells = [cell for cell in cells if cell.applies]
        if not options.only:
            yield from _judged(condition, cells)
            held_out = {make.__name__ for make in truth_models.HELD_OUT}
            rest = [cell for cell in cells if cell.model.partition(" ")[0] in held_out]
            if rest:
                yield from _judged(f"{condition}, held out", rest)
    yield from _advice(options, families)


def _advice(options: BenchOptions, families: Sequence[str]) -> Iterator[Bar]:
    """Yield a row per family on the time of advise on one core."""
    path = Path(truth_models.__file__)
    for family in families:
        name = f"advise {family}"
        if options.wants(name, 60):
            options.progress(name)
            times = time_advice(f"{path.name}:{family}", str(path.parent), "--threads", "1")
            yield at_most(
                name, times.cpu_s, 60, "s of a core",
                detail=f"first table after {times.first_s:.1f} s, at most "
                f"{times.first_s - times.building_s:.1f} s after the first step; the whole after "
                f"{times.final_s:.1f} s; {times.step}; nothing cached",
            )  # fmt: skip


def _cells(
    options: BenchOptions, family: str, condition: str, names: Sequence[str]
) -> Iterator[Cell]:
    label = f"{family} {condition}"
    recorded = {technique: options.done.get(f"{label} {technique}") for technique in names}
    yield from (Cell.from_row(row) for row in recorded.values() if row is not None and row.data)
    left = [technique for technique in names if recorded[technique] is None]
    if not left or options.only not in label:
        return
    workload = Workload.parse(f"{Path(truth_models.__file__)}:{family}")
    neighbours = len(os.sched_getaffinity(0)) if condition == "busy" else 0
    with busy_cores(neighbours) if neighbours else contextlib.nullcontext():
        begin = time.monotonic()
        yield from measure_cells(label, workload, left, "40s" if options.full else "20s",
                                 options.progress, widest=math.inf)  # fmt: skip
        options.progress(f"{label}: {time.monotonic() - begin:.0f} s")


def _judged(condition: str, cells: Sequence[Cell]) -> Iterator[Bar]:
    predicted = [cell for cell in cells if math.isfinite(cell.predicted)]
    judged = [cell for cell in predicted if cell.judged]
    name, n = f"{condition}: error of predicted speed-up, median", len(judged)
    if not judged:
        yield not_judged(name, "%", "<= 4", "no cell was measured")
        return
    errors = sorted(100 * abs(cell.error) for cell in judged)
    reach = sorted(50 * (cell.measured_high / cell.measured_low - 1) for cell in judged)
    worst = max(judged, key=lambda cell: abs(cell.error))
    best = WithoutError(judged)
    yield at_most(name, median(errors), 4, "%", n=n,
                  detail=f"measured to +-{median(reach):.1f} % in the median, +-{reach[-1]:.0f} % "
                  f"at most, for which alone a prediction without error would show "
                  f"{best.median():.1f} %; largest error {errors[-1]:.0f} %, "
                  f"{worst.name}")  # fmt: skip
    beyond = [cell.name for cell in cells if not _within(cell)]
    yield at_least(
        f"{condition}: cells told to {_WORST:g} %", 100 * (1 - len(beyond) / len(cells)), 95, "%",
        n=len(cells), detail=f"{100 * best.within(_WORST):.0f} % without an error of the "
        f"prediction; beyond: {', '.join(beyond) or 'none'}",
    )  # fmt: skip
    outside = [cell.name for cell in judged
               if not cell.predicted_low <= cell.measured <= cell.predicted_high]  # fmt: skip
    covered = 100 * (1 - len(outside) / n)
    width = median(50 * (cell.predicted_high / cell.predicted_low - 1) for cell in judged)
    yield Bar(
        f"{condition}: printed 90 % intervals that hold", covered, "%", "85 to 95",
        85 <= covered <= 95, n,
        f"+-{width:.1f} % wide in the median; intervals that hold 90 % of true values would hold "
        f"{100 * best.held():.0f} % of those measured; outside: {', '.join(outside) or 'none'}",
    )  # fmt: skip
    watched = [cell for cell in judged if math.isfinite(cell.memory_error)]
    if watched:
        largest = max(watched, key=lambda cell: abs(cell.memory_error))
        middle = median(100 * abs(cell.memory_error) for cell in watched)
        yield at_most(
            f"{condition}: error of the tensors' peak, largest", 100 * abs(largest.memory_error),
            5, "%", n=len(watched), detail=f"median {middle:.2f} %; {largest.name}",
        )  # fmt: skip


class WithoutError:
    """Errors of cells if every prediction were right, from the measurement's noise alone."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._measured = [_deviation(cell.measured_low, cell.measured_high) for cell in cells]
        self._printed = [_deviation(cell.predicted_low, cell.predicted_high) for cell in cells]

    def within(self, error: float) -> float:
        """Return the share of cells with an error of at most `error` %."""
        reach = math.log1p(error / 100)
        return fmean(2 * _NORMAL.cdf(reach / each) - 1 for each in self._measured)

    def median(self) -> float:
        """Return the median error in %, to a hundredth."""
        return 0.01 * bisect.bisect_left(range(100_000), 0.5, key=lambda e: self.within(0.01 * e))

    def held(self) -> float:
        """Return the share of measured values in intervals that hold 90 % of the true ones."""
        return fmean(
            2 * _NORMAL.cdf(_REACH * printed / math.hypot(printed, measured)) - 1
            for printed, measured in zip(self._printed, self._measured, strict=True)
        )


def _deviation(low: float, high: float) -> float:
    """Return the standard deviation of a logarithm from its 90 % interval."""
    return max(math.log(high / low) / (2 * _REACH), 1e-9)


def _within(cell: Cell) -> bool:
    return cell.judged and 100 * abs(cell.error) <= _WORST
