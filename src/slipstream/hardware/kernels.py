"""Cycles of lanes that skip zeros, exactly: compiled, or the same in NumPy.

Source: Mahmoud et al., "TensorDash: Exploiting Sparsity to Accelerate Deep Neural Network Training
and Inference", MICRO 2020, arXiv 2009.00748; ``native/src/accelerator/kernel.h`` states the model.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.hardware.accelerator import MAX_OPTIONS, FrontEnd
from slipstream.native.family import INT32, INT64, POINTER, Family, array_pointer, structure

_FRONTEND = structure(
    f"int32_t lanes, depth, options, levels; int32_t row[{MAX_OPTIONS}], shift[{MAX_OPTIONS}]; "
    "uint64_t level[64];"
)
FAMILY = Family("accelerator", {
    "accelerator_schedule": [POINTER, POINTER, INT64, POINTER, POINTER],
    "accelerator_cycles": [
        INT32, POINTER, POINTER, POINTER, INT64, INT32, POINTER, INT64, POINTER, INT32
    ],
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Streams:
    """Sequences of rows of lanes that processing elements read.

    Row t of stream s is ``words[base[s] + offset[t]]``; its bit i is set if the value in lane i is
    not zero.

    Attributes:
        words: uint16 for up to 16 lanes, else uint64.
        base: int64 [groups, together]; streams of a group advance together; -1 for none.
        offset: int64 [length].
        columns: number of results that each stream contributes to.
    """

    words: NDArray[Any]
    base: NDArray[np.int64]
    offset: NDArray[np.int64]
    columns: int


@functools.cache
def _compiled(frontend: FrontEnd, lanes: int) -> Any:
    levels, options = frontend.levels(lanes), frontend.options
    made = _FRONTEND(lanes, frontend.lookahead + 1, len(options), len(levels))
    for number, (row, distance) in enumerate(options):
        made.row[number], made.shift[number] = row, distance
    made.level[: len(levels)] = levels
    return made


def schedule(
    frontend: FrontEnd, lanes: int, windows: NDArray[np.uint64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Schedule one cycle of each window.

    Args:
        windows: uint64 [n, lookahead + 1]; bit i of a row is set for an effectual pair in lane i.

    Returns:
        The option that each lane takes, uint8 [n, lanes] (the number of options for none), and the
        rows by which each window advances, uint8 [n].
    """
    windows = np.array(windows, np.uint64, order="C")
    if FAMILY.library is None:
        return _schedule_in_numpy(frontend, lanes, windows)
    selects = np.empty((len(windows), lanes), np.uint8)
    advance = np.empty(len(windows), np.uint8)
    FAMILY.call(
        "accelerator_schedule", ctypes.byref(_compiled(frontend, lanes)),
        array_pointer(windows), len(windows), array_pointer(selects), array_pointer(advance),
    )  # fmt: skip
    return selects, advance


def _schedule_in_numpy(
    frontend: FrontEnd, lanes: int, windows: NDArray[np.uint64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Like `schedule`; removes the pairs that are taken from `windows`."""
    selects = np.full((len(windows), lanes), len(frontend.options), np.uint8)
    for level in frontend.levels(lanes):
        for lane in (lane for lane in range(lanes) if level >> lane & 1):
            free = np.ones(len(windows), bool)
            for option, (row, distance) in enumerate(frontend.options):
                bit = np.uint64(1 << (lane + distance) % lanes)
                taken = free & (windows[:, row] & bit != 0)
                windows[taken, row] &= ~bit
                selects[taken, lane] = option
                free &= ~taken
    drained = np.logical_and.accumulate(windows[:, 1:] == 0, axis=1)
    return selects, 1 + drained.sum(1, dtype=np.uint8)


def stream_cycles(
    frontend: FrontEnd, lanes: int, streams: Streams, *, kernel: int | None = None
) -> NDArray[np.int64]:
    """Return int64 [groups, 3]: cycles, nonzeros, and the most nonzeros of one stream, per group.

    Args:
        kernel: one of ``FAMILY.kernels``; the fastest by default.
    """
    groups, together = streams.base.shape
    if kernel is None and (kernel := FAMILY.kernel()) is None:
        return _cycles_in_numpy(frontend, lanes, streams)
    out = np.zeros((groups, 3), np.int64)
    base = np.ascontiguousarray(streams.base, np.int64)
    offset = np.ascontiguousarray(streams.offset, np.int64)
    FAMILY.call(
        "accelerator_cycles", kernel, ctypes.byref(_compiled(frontend, lanes)),
        array_pointer(streams.words), array_pointer(base), groups, together,
        array_pointer(offset), len(offset), array_pointer(out), 1,
    )  # fmt: skip
    return out


def _cycles_in_numpy(frontend: FrontEnd, lanes: int, streams: Streams) -> NDArray[np.int64]:
    depth, length = frontend.lookahead + 1, len(streams.offset)
    groups, together = streams.base.shape
    base = streams.base.reshape(-1, 1)
    rows = np.zeros((len(base), length + 2 * depth), np.uint64)
    rows[:, :length] = np.where(base >= 0, streams.words[base + streams.offset], 0)
    bits = np.unpackbits(rows.view(np.uint8), axis=1)
    nonzeros = bits.sum(1, dtype=np.int64).reshape(groups, together)
    cycles, at = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    every = np.arange(len(base))[:, None]
    while (running := at < length).any():
        cycles += running
        place = np.repeat(np.minimum(at, length), together)[:, None] + np.arange(depth)
        windows = rows[every, place]
        _, advance = _schedule_in_numpy(frontend, lanes, windows)
        rows[every, place] = windows
        at += advance.reshape(groups, together).min(1)
    return np.stack([cycles, nonzeros.sum(1), nonzeros.max(1)], axis=1)
