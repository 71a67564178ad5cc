"""Align the step recorded for memory with the one whose arguments were recorded.

The two steps may run different operators: every fifth one may write a checkpoint. Operators that
only the recorded step runs are placed between their neighbours; memory that only the other step
allocates and frees again is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import is_complete, positions
from slipstream.capture.trace import Node
from slipstream.capture.units import Units

if TYPE_CHECKING:
    from slipstream.capture.memory import MemoryRecord

# Minimum share of common events of steps.
_MIN_COMMON = 0.5
REMEDY = "record it again, or make the step do the same work every time"
"""Remedy for steps that do not fit, after retries."""


def fit(record: MemoryRecord, units: Units) -> tuple[MemoryRecord, NDArray[np.bool_]] | str:
    """Return `record` with exactly the events of `units`, and which it had; or why not.

    A missing event starts and ends where the next one starts.
    """
    places = positions(units.events, record.names)
    present = places >= 0
    events = (len(units.events) + len(record.names)) / 2
    if present.sum() < _MIN_COMMON * events:
        share = 100 * int(present.sum()) / events
        return (
            f"the step recorded for memory has only {share:.0f} % of its operators in common "
            f"with the recorded step; {REMEDY}"
        )
    changes = record.changes
    if not is_complete(places, len(record.names)):
        changes = _without_passing(record, places, units)
    last = max(int(record.end_ns.max(initial=0)), record.changes[-1][0])
    start, end = np.append(record.start_ns, last), np.append(record.end_ns, last)
    following = np.minimum.accumulate(np.where(present, places, len(record.names))[::-1])[::-1]
    fitted = replace(
        record,
        names=units.events,
        start_ns=start[following],
        end_ns=np.where(present, end[following], start[following]),
        inputs=tuple(record.inputs[i] if i >= 0 else () for i in places.tolist()),
        changes=changes,
    )
    return fitted, present


def unseen_bytes(trace: Sequence[Node], units: Units, present: NDArray[np.bool_]) -> int:
    """Return the bytes that operators of the recorded step allocate that the other lacks."""
    sizes: dict[int, int] = {}
    for i, first in zip(units.nodes.tolist(), units.first.tolist(), strict=True):
        call, storages = trace[i].call, trace[i].storages
        if present[first] or call is None:
            continue
        inputs = len(call.inputs)
        for spec, storage in zip(call.outputs, storages[inputs:], strict=False):
            if storage not in storages[:inputs]:
                sizes[storage] = max(sizes.get(storage, 0), spec.nbytes)
    return sum(sizes.values())


def _without_passing(
    record: MemoryRecord, found: NDArray[np.int64], units: Units
) -> tuple[tuple[int, int, int], ...]:
    """Drop changes that foreign operators undo before the next operator of the step.

    Foreign operators inside a unit do the unit's work in another way; their changes remain.
    """
    common = np.zeros(len(record.names), bool)
    common[found[found >= 0]] = True
    unit_end = np.zeros(len(record.names), np.int64)
    heads = found[units.first]
    unit_end[heads[heads >= 0]] = record.end_ns[heads[heads >= 0]]
    covered = np.maximum.accumulate(unit_end)
    foreign = ~common & (record.start_ns >= covered)
    # Stretches of foreign events, by their start and the start of the next event.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], foreign, [False]])))
    begins = record.start_ns[edges[::2]]
    stops = np.append(record.start_ns, np.iinfo(np.int64).max)[edges[1::2]]
    opened: dict[int, tuple[int, int]] = {}
    dropped: set[int] = set()
    for i, (time, ptr, size) in enumerate(record.changes):
        stretch = int(np.searchsorted(begins, time, "right")) - 1
        if stretch < 0 or time >= stops[stretch]:
            opened.pop(ptr, None)
        elif size > 0:
            opened[ptr] = (i, stretch)
        elif ptr in opened:
            allocated, where = opened.pop(ptr)
            if where == stretch:
                dropped.update((allocated, i))
    return tuple(change for i, change in enumerate(record.changes) if i not in dropped)
