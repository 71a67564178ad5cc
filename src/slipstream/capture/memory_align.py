"""Fit the step whose memory was seen to the one whose arguments were recorded.

They are two steps, and need not run the same operators: every fifth one may write a checkpoint.
What only the recorded one runs is put between its neighbours; what only the other one allocates
and frees again is not part of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import is_whole, positions
from slipstream.capture.trace import Node
from slipstream.capture.units import Units

if TYPE_CHECKING:
    from slipstream.capture.memory import MemoryRecord

# Steps that have less in common than this do not describe one another.
_LEAST_COMMON = 0.5
REMEDY = "record it again, or leave what differs out of the step"
"""What to do about steps that do not fit, after further ones were tried."""


def fit(record: MemoryRecord, units: Units) -> tuple[MemoryRecord, NDArray[np.bool_]] | str:
    """`record` with exactly the events of `units`, and which of them it had; or why not.

    An event that it lacks begins and ends where the next one begins.
    """
    places = positions(units.events, record.names)
    there = places >= 0
    events = (len(units.events) + len(record.names)) / 2
    if there.sum() < _LEAST_COMMON * events:
        share = 100 * int(there.sum()) / events
        return (
            f"the step that was watched for it has only {share:.0f} % of its operators in common "
            f"with the recorded one; {REMEDY}"
        )
    changes = record.changes
    if not is_whole(places, len(record.names)):
        changes = _without_passing(record, places, units)
    last = max(int(record.end_ns.max(initial=0)), record.changes[-1][0])
    start, end = np.append(record.start_ns, last), np.append(record.end_ns, last)
    following = np.minimum.accumulate(np.where(there, places, len(record.names))[::-1])[::-1]
    fitted = replace(
        record,
        names=units.events,
        start_ns=start[following],
        end_ns=np.where(there, end[following], start[following]),
        inputs=tuple(record.inputs[i] if i >= 0 else () for i in places.tolist()),
        changes=changes,
    )
    return fitted, there


def unseen_bytes(trace: Sequence[Node], units: Units, there: NDArray[np.bool_]) -> int:
    """Bytes of the storages made by operators of the recorded step that the other one lacks."""
    sizes: dict[int, int] = {}
    for i, first in zip(units.nodes.tolist(), units.first.tolist(), strict=True):
        call, storages = trace[i].call, trace[i].storages
        if there[first] or call is None:
            continue
        given = len(call.inputs)
        for spec, storage in zip(call.outputs, storages[given:], strict=False):
            if storage not in storages[:given]:
                sizes[storage] = max(sizes.get(storage, 0), spec.nbytes)
    return sum(sizes.values())


def _without_passing(
    record: MemoryRecord, found: NDArray[np.int64], units: Units
) -> tuple[tuple[int, int, int], ...]:
    """The changes without those that foreign operators undo before the next one of the step.

    What is foreign inside of a unit is another way of doing the unit's work, and stays.
    """
    common = np.zeros(len(record.names), bool)
    common[found[found >= 0]] = True
    unit_end = np.zeros(len(record.names), np.int64)
    heads = found[units.first]
    unit_end[heads[heads >= 0]] = record.end_ns[heads[heads >= 0]]
    covered = np.maximum.accumulate(unit_end)
    foreign = ~common & (record.start_ns >= covered)
    # Stretches of foreign events, by the time of their begin and of what comes after them.
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
