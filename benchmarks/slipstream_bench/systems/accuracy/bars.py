"""``slipstream bench accuracy``: predictions from one eager profile against real measurements.

A row per cell (see `cells`), then the summary rows: errors, slow-downs, intervals, ranking and
combinations. Cells whose measurement is wider than the errors in question are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median

from slipstream import technique
from slipstream_bench import models
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import AS_IT_IS, Cell, measure_cells, workload_of

_TRAINING = (
    "amp:bf16", "channels_last", "fused_optimizer:fused", "fused_optimizer:foreach",
    "accumulation:4", "checkpointing", "batch_size:x2", "batch_size:x4", "compile",
)  # fmt: skip
_INFERENCE = ("amp:bf16", "channels_last", "conv_bn_fold", "batch_size:x2", "compile")
_PAIRS = (
    "fused_optimizer:fused+amp:bf16", "batch_size:x2+fused_optimizer:fused",
    "checkpointing+batch_size:x2", "accumulation:4+fused_optimizer:foreach",
)  # fmt: skip
# Families whose heap is also measured with the C library's own settings, including page faults.
_LEFT_ALONE = ("conv_net", "recommender", "perceptron")
_OWN_HEAP = (
    "allocator", "amp:bf16", "fused_optimizer:fused", "batch_size:x2",
    "amp:bf16+allocator",
)  # fmt: skip
_QUICK = {
    "perceptron": ("fused_optimizer:fused", "batch_size:x2"),
    "tiny_language_model": ("amp:bf16", "fused_optimizer:fused", "fused_optimizer:foreach"),
}
_PAIRED = ("perceptron", "tiny_language_model", "recommender")
_INFERRING = "conv_net_inference"
# Slow-downs and differences between two techniques count from this size on.
_MATTERS = 0.03
# Fewer cells do not determine a distribution of errors.
_MIN_JUDGED = 5
_MAX_REGRET = 0.03


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per cell, then the summary rows."""
    cells: list[Cell] = []
    for family, techniques in _grid(options.full).items():
        # Families that `only` excludes keep their recorded rows.
        measured = options.done if options.only in family else options.recorded
        recorded = {
            spec: Cell.from_row(measured[name])
            for spec in techniques
            if (name := f"{family} {spec}") in measured and measured[name].data
        }
        cells += recorded.values()
        missing = [spec for spec in techniques if spec not in recorded and options.only in family]
        if not missing:
            continue
        budget = "60s" if options.full else "25s"
        for cell in measure_cells(family, workload_of(family), missing, budget, options.progress):
            cells.append(cell)
            yield cell.to_row()
    if options.full or not options.only:
        cells = [cell for cell in cells if cell.applies]
        pinned = [cell for cell in cells if not cell.model.endswith(AS_IT_IS)]
        yield from _judged([cell for cell in pinned if "+" not in cell.technique])
        yield from _pairs([cell for cell in pinned if "+" in cell.technique])
        yield from _with_own_heap([cell for cell in cells if cell.model.endswith(AS_IT_IS)])


def _grid(full: bool) -> dict[str, tuple[str, ...]]:
    """Return techniques by family, named as in predictions, since recorded rows have these keys."""
    if full:
        families = [make.__name__ for make in models.FAMILIES]
        grid = {family: _TRAINING + (_PAIRS if family in _PAIRED else ()) for family in families}
        grid[_INFERRING] = _INFERENCE
        grid |= {family + AS_IT_IS: _OWN_HEAP for family in _LEFT_ALONE}
    else:
        grid = dict(_QUICK)
    return {
        family: tuple(technique.combination_name(technique.parse(text)) for text in names)
        for family, names in grid.items()
    }


def _judged(cells: Sequence[Cell]) -> Iterator[Bar]:
    judged = [cell for cell in cells if cell.judged]
    if len(judged) < max(_MIN_JUDGED, len(cells) / 2):
        reason = f"only {len(judged)} of {len(cells)} cells were measured narrowly enough"
        yield not_judged("error of predicted speed-up", "%", "median <= 4, max <= 12", reason)
        return
    errors = sorted(abs(cell.error) * 100 for cell in judged)
    n = len(errors)
    detail = f"{n} of {len(cells)} cells were measured narrowly enough"
    yield at_most("error of predicted speed-up, median", median(errors), 4, "%", n=n, detail=detail)
    yield at_most(
        "error of predicted speed-up, 90th percentile", errors[math.ceil(0.9 * n) - 1], 8, "%", n=n
    )
    worst = max(judged, key=lambda cell: abs(cell.error))
    yield at_most("error of predicted speed-up, maximum", errors[-1], 12, "%", n=n,
                  detail=worst.name)  # fmt: skip
    slow = [cell for cell in judged if cell.measured_high < 1 - _MATTERS]
    missed = [cell.name for cell in slow if cell.predicted >= 1]
    yield at_most(
        "slow-downs beyond 3 % not predicted as one", len(missed), 0, f"of {len(slow)}",
        n=len(slow), detail=", ".join(missed),
    )  # fmt: skip
    covered = 100 * sum(cell.inside for cell in judged) / n
    outside = ", ".join(cell.name for cell in judged if not cell.inside)
    yield at_least("printed 90 % intervals that hold", covered, 85, "%", n=n,
                   detail=f"outside: {outside}" if outside else "")  # fmt: skip
    yield from _ranked(judged)


def _ranked(judged: Sequence[Cell]) -> Iterator[Bar]:
    """Judge the order within a family: by pairs that differ, and by regret of the first choice."""
    taus, regrets = {}, {}
    for family in dict.fromkeys(cell.model for cell in judged):
        own = [cell for cell in judged if cell.model == family]
        signs = [_agreement(a, b) for a, b in combinations(own, 2) if _differ(a, b)]
        if signs:
            taus[family] = sum(signs) / len(signs)
        if len(own) > 1:
            first = max(own, key=lambda cell: cell.predicted)
            regrets[family] = max(cell.measured for cell in own) / first.measured - 1
    if not taus:
        yield not_judged("rank correlation, worst family", "tau", ">= 0.9", "too few cells differ")
        return
    detail = ", ".join(f"{family} {tau:.2f}" for family, tau in taus.items())
    yield at_least("rank correlation, worst family", min(taus.values()), 0.9, "tau",
                   n=len(taus), detail=detail)  # fmt: skip
    followed = sum(regret <= _MAX_REGRET for regret in regrets.values())
    detail = ", ".join(f"{family} {100 * regret:.1f} %" for family, regret in regrets.items())
    # Five sixths of the families.
    yield at_least("families where the first choice is within 3 % of the best", followed,
                   math.ceil(len(regrets) * 5 / 6), f"of {len(regrets)}", n=len(regrets),
                   detail=detail)  # fmt: skip


def _differ(a: Cell, b: Cell) -> bool:
    apart = max(a.measured, b.measured) / min(a.measured, b.measured) > 1 + _MATTERS
    return apart and (a.measured_low > b.measured_high or b.measured_low > a.measured_high)


def _agreement(a: Cell, b: Cell) -> int:
    return 1 if (a.measured > b.measured) == (a.predicted > b.predicted) else -1


def _pairs(cells: Sequence[Cell]) -> Iterator[Bar]:
    judged = [cell for cell in cells if cell.judged]
    name = "error of predicted pairs, maximum"
    if len(judged) < _MIN_JUDGED:
        reason = f"only {len(judged)} of {len(cells)} pairs were measured narrowly enough"
        yield not_judged(name, "%", "<= 18", reason)
        return
    errors = [100 * abs(cell.error) for cell in judged]
    worst = max(judged, key=lambda cell: abs(cell.error))
    yield at_most("error of predicted pairs, median", median(errors), 6, "%", n=len(errors))
    yield at_most(name, max(errors), 18, "%", n=len(errors), detail=worst.name)


def _with_own_heap(cells: Sequence[Cell]) -> Iterator[Bar]:
    """Judge families with unchanged heaps: intervals must hold; errors are only reported."""
    judged = [cell for cell in cells if cell.judged]
    name = "heap as it is: printed 90 % intervals that hold"
    if len(judged) < _MIN_JUDGED:
        if cells:
            reason = f"only {len(judged)} of {len(cells)} cells were measured narrowly enough"
            yield not_judged(name, "%", ">= 85", reason)
        return
    covered = 100 * sum(cell.inside for cell in judged) / len(judged)
    errors = sorted(100 * abs(cell.error) for cell in judged)
    outside = ", ".join(cell.name for cell in judged if not cell.inside)
    yield at_least(
        name, covered, 85, "%", n=len(judged),
        detail=f"errors: median {median(errors):.1f} %, maximum {errors[-1]:.1f} %"
        + (f"; outside: {outside}" if outside else ""),
    )  # fmt: skip
