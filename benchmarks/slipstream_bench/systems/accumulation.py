"""``slipstream bench accumulation``: steps of several batches, predicted and run on real ranks.

Replicas exchange gradients after the last batch alone. Predictions use the profile of a step of one
batch in one process; models, links and the method are those of ``slipstream bench compression``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from slipstream.ranks import why_no_netlab
from slipstream_bench.lab import first_served
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.compression.bars import LINKS, cells_of, grid_rows

METHODS = (
    "accumulation:2", "accumulation:4", "accumulation:2+cast:bf16", "accumulation:4+cast:bf16",
)  # fmt: skip
_CELLS = [(name, megabits, 2) for name in ("narrow", "wide") for megabits in LINKS[:3]]
_CELLS += [("narrow", LINKS[1], 4), ("narrow", LINKS[2], 4)]
_QUICK = [("wide", LINKS[2], 2)]
_ROW, _ALL = "steps", "predicted step of several batches, median error"
_TARGET = "<= 6 (largest <= 12)"
_ENOUGH = 20


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: one model on one link."""
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged(_ALL, "%", _TARGET, reason)
        return
    cells = _CELLS if options.full else _QUICK
    with first_served():
        yield from grid_rows(options, {}, cells, _ROW, _ALL, _summary, METHODS)


def _summary(rows: Sequence[Bar]) -> Iterator[Bar]:
    """Summarise all cells; with too few, a row can fall short but not hold."""
    cells = [cell for row in rows for cell in cells_of(row).values()]
    errors = [abs(predicted / step - 1.0) for step, predicted in cells]
    middle, largest = statistics.median(errors), max(errors)
    within = sum(error <= 0.12 for error in errors)
    holds = middle <= 0.06 and largest <= 0.12
    few = "" if len(errors) >= _ENOUGH else f", not {_ENOUGH}"
    yield Bar(
        _ALL, 100 * middle, "%", _TARGET, None if few and holds else holds, len(errors),
        f"largest {100 * largest:.1f} %, {within} of {len(errors)} cells within 12 %{few}",
    )  # fmt: skip
