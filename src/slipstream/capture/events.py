"""The profiler's events of one step as arrays, in the order an execution trace has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARKER = "slipstream::step"
_NOT_OPERATORS = ("[memory]", "[OutOfMemory]")


def mark() -> None:
    """Let a profiler that is on see where a step ends and the next one begins."""
    import torch

    with torch.profiler.record_function(MARKER):
        pass


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
    # Each field is a call into the profiler, most of what this costs: none is read twice.
    rows = [
        (start, end, event.start_thread_id(), name)
        for event in events
        if (name := event.name()) not in _NOT_OPERATORS
        and (end := event.end_ns()) >= (start := event.start_ns())
    ]
    marks = sorted((row for row in rows if row[3] == MARKER), key=lambda row: row[0])
    if len(marks) < 2:
        return []
    thread = marks[0][2]
    own = [row for row in rows if row[2] == thread and row[3] != MARKER]
    start, end = (np.array([row[side] for row in own], np.int64) for side in (0, 1))
    # Parents first among events that begin in the same nanosecond.
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    names = [own[i][3] for i in order.tolist()]
    found = []
    for before, after in itertools.pairwise(marks):
        # The next step begins when the marker itself has been written.
        low, high = before[1], after[0]
        inside = slice(*np.searchsorted(start, [low, high]))
        found.append(
            _step(tuple(names[inside]), start[inside] - low, end[inside] - low, high - low)
        )
    return found


def _step(
    names: tuple[str, ...], start: NDArray[np.int64], end: NDArray[np.int64], length_ns: int
) -> Step:
    # Rounding may end a child after its parent by a nanosecond; clamp it, or it would seem
    # to lie beside the parent rather than inside. The outermost events' parent is the step: one
    # still open at the marker (a script's Optimizer.step, whose hook sets it) is cut there.
    clamped: list[int] = []
    open_until = [length_ns]
    for begins, ends in zip(start.tolist(), end.tolist(), strict=True):
        while open_until[-1] <= begins:
            open_until.pop()
        if ends > open_until[-1]:
            ends = open_until[-1]
        open_until.append(ends)
        clamped.append(ends)
    return Step(names, start, np.array(clamped, np.int64), length_ns)
