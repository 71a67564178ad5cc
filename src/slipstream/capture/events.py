"""The profiler's events of one step as arrays, in the order an execution trace has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARKER = "slipstream::step"
_NOT_OPERATORS = ("[memory]", "[OutOfMemory]")


@dataclass(frozen=True)
class Step:
    """One step's events in pre-order: parents before children, by start time.

    Attributes:
        names: operator or annotation of each of the e events.
        start_ns, end_ns: int64 [e], relative to the step's begin, clipped to the step.
        length_ns: of the whole step.
    """

    names: tuple[str, ...]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    length_ns: int


def steps_of(events: Iterable[Any]) -> list[Step]:
    """Split Kineto events at the step markers; only the thread that set them is kept."""
    rows = [
        (event.start_ns(), event.end_ns(), event.name(), event.start_thread_id())
        for event in events
        if event.name() not in _NOT_OPERATORS and event.duration_ns() >= 0
    ]
    marks = sorted((row for row in rows if row[2] == MARKER), key=lambda row: row[0])
    if len(marks) < 2:
        return []
    thread = marks[0][3]
    own = [row for row in rows if row[3] == thread and row[2] != MARKER]
    # Parents first among events that begin in the same nanosecond.
    own.sort(key=lambda row: (row[0], -row[1]))
    starts = np.array([row[0] for row in own], np.int64)
    found = []
    for begin, end in itertools.pairwise(marks):
        # The next step begins when the marker itself has been written.
        low, high = begin[1], end[0]
        first, last = np.searchsorted(starts, [low, high])
        found.append(_step(own[first:last], low, high))
    return found


def _step(rows: Sequence[tuple[int, int, str, int]], low: int, high: int) -> Step:
    names = tuple(row[2] for row in rows)
    start = [row[0] - low for row in rows]
    # An event still open at the marker (a script's Optimizer.step, whose hook sets it) is cut.
    end = [min(row[1], high) - low for row in rows]
    # Rounding may end a child after its parent by a nanosecond; clamp it, or it would seem
    # to lie beside the parent rather than inside.
    open_events: list[int] = []
    for i, begin in enumerate(start):
        while open_events and end[open_events[-1]] <= begin:
            open_events.pop()
        if open_events and end[i] > end[open_events[-1]]:
            end[i] = end[open_events[-1]]
        open_events.append(i)
    return Step(names, np.array(start, np.int64), np.array(end, np.int64), high - low)
