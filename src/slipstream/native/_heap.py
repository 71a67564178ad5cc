"""What a step allocates and frees, in order, and how far the heap grows with it in each step."""

from __future__ import annotations

import numpy as np

from slipstream.native.family import DOUBLE, INT32, INT64, POINTER, Family
from slipstream.native.inputs import Int32s, Int64s

_CYCLES = 3
"""Steps until what the first one had to grow is over."""
_FAMILY = Family("heap", {
    "heap_growth": [POINTER, INT64, INT64, DOUBLE, INT32],
    "changes_in_turn": [POINTER, POINTER, POINTER, INT64, INT64, POINTER],
}, {"heap_growth": INT64})  # fmt: skip


def changes_in_turn(nbytes: Int64s, producer: Int32s, release: Int32s, tasks: int) -> Int64s | None:
    """By how much what is allocated changes, where tasks run one after the other by their numbers.

    At the start of each task stands what it produces, at its end what it releases; what is less
    comes first.

    Args:
        nbytes: int64 [allocations].
        producer, release: int32 [allocations], tasks; negative outside the step.
        tasks: how many there are.

    Returns:
        int64 [changes]; None without the compiled library.
    """
    compiled = _FAMILY.library
    if compiled is None:
        return None
    nbytes = np.ascontiguousarray(nbytes, np.int64)
    producer, release = (np.ascontiguousarray(one, np.int32) for one in (producer, release))
    inside = np.count_nonzero(producer >= 0) + np.count_nonzero(release >= 0)
    change = np.empty(inside, np.int64)
    status = compiled.slipstream_changes_in_turn(
        nbytes.ctypes.data, producer.ctypes.data, release.ctypes.data, nbytes.size, tasks,
        change.ctypes.data,
    )  # fmt: skip
    return change if status == 0 else None


def heap_growth(change: Int64s, begin: int, kept: float) -> int:
    """Bytes by which the heap grows in a step, when the first one's growth is over.

    Args:
        change: int64 [changes], by how much what is allocated grows (or shrinks), in order.
        begin: bytes that are allocated before each step.
        kept: the heap gives all that lies free at its top back once that is more bytes.
    """
    compiled = _FAMILY.library
    if compiled is None:
        return _reference(change.tolist(), begin, kept)
    change = np.ascontiguousarray(change, np.int64)
    pointer, count = change.ctypes.data, change.size
    return int(compiled.slipstream_heap_growth(pointer, count, begin, kept, _CYCLES))


def _reference(change: list[int], begin: int, kept: float) -> int:
    top, grown = begin, 0
    for _ in range(_CYCLES):
        alive, grown, before = begin, 0, top
        for by in change:
            alive += by
            if alive > top:
                grown += alive - top
                top = alive
            elif top - alive > kept:
                top = alive
        if top == before:  # the next one would be the same
            break
    return grown
