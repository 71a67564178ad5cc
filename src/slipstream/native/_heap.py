"""Allocations and frees of a step in order, and the growth of the heap in each step."""

from __future__ import annotations

import numpy as np

from slipstream.native.family import DOUBLE, INT32, INT64, POINTER, Family
from slipstream.native.inputs import Int32s, Int64s

_CYCLES = 3
"""Number of steps until the growth of the first one is over."""
_FAMILY = Family("heap", {
    "heap_growth": [POINTER, INT64, INT64, DOUBLE, INT32],
    "changes_in_turn": [POINTER, POINTER, POINTER, INT64, INT64, POINTER],
}, {"heap_growth": INT64})  # fmt: skip


def changes_in_turn(nbytes: Int64s, producer: Int32s, release: Int32s, tasks: int) -> Int64s | None:
    """Return the changes of allocated bytes if tasks run sequentially by their numbers.

    A task's allocations are at its start, its frees at its end; smaller changes come first.

    Args:
        nbytes: int64 [allocations].
        producer, release: int32 [allocations], tasks; negative outside the step.
        tasks: number of tasks.

    Returns:
        int64 [changes]; None without the compiled library.
    """
    compiled = _FAMILY.library
    if compiled is None:
        return None
    nbytes = np.ascontiguousarray(nbytes, np.int64)
    producer, release = (np.ascontiguousarray(column, np.int32) for column in (producer, release))
    inside = np.count_nonzero(producer >= 0) + np.count_nonzero(release >= 0)
    change = np.empty(inside, np.int64)
    status = compiled.slipstream_changes_in_turn(
        nbytes.ctypes.data, producer.ctypes.data, release.ctypes.data, nbytes.size, tasks,
        change.ctypes.data,
    )  # fmt: skip
    return change if status == 0 else None


def heap_growth(change: Int64s, begin: int, trim_bytes: float) -> int:
    """Return the bytes by which the heap grows in a step, once the first one's growth is over.

    Args:
        change: int64 [changes]; growth of the allocated bytes (negative: frees), in order.
        begin: bytes allocated before each step.
        trim_bytes: the heap returns the free bytes at its top to the system if they exceed this.
    """
    compiled = _FAMILY.library
    if compiled is None:
        return _reference(change.tolist(), begin, trim_bytes)
    change = np.ascontiguousarray(change, np.int64)
    pointer, count = change.ctypes.data, change.size
    return int(compiled.slipstream_heap_growth(pointer, count, begin, trim_bytes, _CYCLES))


def _reference(change: list[int], begin: int, trim_bytes: float) -> int:
    top, grown = begin, 0
    for _ in range(_CYCLES):
        alive, grown, before = begin, 0, top
        for by in change:
            alive += by
            if alive > top:
                grown += alive - top
                top = alive
            elif top - alive > trim_bytes:
                top = alive
        if top == before:  # the next step would be the same
            break
    return grown
