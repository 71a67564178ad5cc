"""Statistics of a tensor in a log: range, moments, histogram, hash, projections.

A projection is a sum of some elements with random signs. Projections are linear, so the sum of
squares of the difference of two tensors' projections estimates their squared distance, without
both tensors in memory (tug-of-war sketch: Alon, Matias and Szegedy 1996, "The space complexity of
approximating the frequency moments").

One C header computes them, here and on devices; without a compiler, NumPy does, slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codegen import CompileError, load

Array = NDArray[Any]

LANES, GROUPS, BINS, SAMPLES = 32, 16, 64, 4096
STATISTICS = np.dtype(
    [
        ("elements", "<u4"), ("nonfinite", "<u4"), ("hash", "<u4", 2),
        ("low", "<f4"), ("high", "<f4"), ("mean", "<f4"), ("std", "<f4"),
        ("groups", "<u4"), ("group_means", "<f4", GROUPS),
        ("projections", "<f4", LANES), ("histogram", "<u4", BINS),
    ]
)  # fmt: skip
"""Statistics of one tensor, 484 bytes; `slip_xray_stats` of the C header."""

_SOURCE = """
#define SLIP_XRAY_ONLY_STATISTICS
{header}
extern "C" void measure(uint32_t count, const float* const* x, const uint32_t* n,
                        const uint32_t* channels, slip_xray_stats* out) {{
  for (uint32_t i = 0; i < count; ++i) {{
    slip_xray_tensor tensor = {{x[i], 'f', n[i], channels[i], 1, 1.0f, 0}};
    slip_xray_measure(&tensor, out + i);
  }}
}}
"""


def header() -> str:
    """Return the C99 header that writes logs on devices."""
    return (files("slipstream.ship.xray") / "slipstream_xray.h").read_text("utf-8")


@functools.cache
def _native() -> Any:
    try:
        measure = load(_SOURCE.format(header=header())).measure
    except CompileError:
        return None
    pointer = ctypes.c_void_p
    measure.argtypes = (ctypes.c_uint32, pointer, pointer, pointer, pointer)
    measure.restype = None
    return measure


def canonical(tensor: Array, channels_last: bool = False) -> Array:
    """Return [N, C, ...] or [N, ..., C] as contiguous float32 [C, ...], with samples inside."""
    if tensor.ndim > 2 and channels_last:
        tensor = np.moveaxis(tensor, -1, 1)
    if tensor.ndim > 1:
        tensor = tensor[0] if len(tensor) == 1 else np.moveaxis(tensor, 1, 0)
    return np.ascontiguousarray(tensor, dtype=np.float32)


def measured(tensors: Sequence[Array]) -> Array:
    """Return statistics of `canonical` tensors, `STATISTICS` [tensors]."""
    out = np.zeros(len(tensors), STATISTICS)
    native = _native()
    if native is None:
        for number, tensor in enumerate(tensors):
            measure_plain(tensor, out[number : number + 1])
        return out
    facts = [(t.ctypes.data, t.size, len(t) if t.ndim > 1 else 1) for t in tensors]
    pointers, sizes, channels = zip(*facts, strict=True) if facts else ((), (), ())
    arrays = np.array(pointers, np.uintp), np.array(sizes, np.uint32), np.array(channels, np.uint32)
    native(len(facts), *(array.ctypes.data for array in arrays), out.ctypes.data)
    return out


@functools.lru_cache(maxsize=8)
def signs(rows: int) -> Array:
    """Return the signs of rows of elements, float32 [rows, LANES]."""
    word: Array = np.arange(rows, dtype=np.uint32) * np.uint32(0x9E3779B1)
    word = (word ^ (word >> 15)) * np.uint32(0x85EBCA77)
    word ^= word >> 13
    bits: Array = (word[:, None] >> np.arange(LANES, dtype=np.uint32)) & 1
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def groups_of(channels: int) -> int:
    """Return the number of groups of channels: the largest divisor up to GROUPS."""
    return max(g for g in range(1, GROUPS + 1) if channels % g == 0)


def projections_of(tensor: Array) -> Array:
    """Return the projections of a `canonical` tensor, float64 [LANES]; linear in it."""
    groups = groups_of(len(tensor)) if tensor.ndim > 1 else 1
    rows = _rows(tensor.reshape(groups, -1))
    return np.asarray((rows * signs(len(rows))).sum(0, dtype=np.float64))


def _rows(grouped: Array) -> Array:
    """Return [groups, n] as rows of LANES elements, every group padded with zeros."""
    lacking = -grouped.shape[1] % LANES
    padded = np.pad(grouped, ((0, 0), (0, lacking))) if lacking else grouped
    return padded.reshape(-1, LANES)


def measure_plain(tensor: Array, out: Array) -> None:
    """Write `measured` of one tensor to `out` [1], computed by NumPy up to rounding."""
    out[...] = np.zeros(1, STATISTICS)
    flat = tensor.reshape(-1)
    out["elements"] = flat.size
    if not flat.size:
        return
    groups = groups_of(len(tensor)) if tensor.ndim > 1 else 1
    finite = np.isfinite(flat)
    clean = np.where(finite, flat, np.float32(0))
    grouped = clean.reshape(groups, -1)
    count = max(int(finite.sum()), 1)
    out["nonfinite"] = flat.size - int(finite.sum())
    out["groups"] = groups
    out["group_means"][0, :groups] = grouped.mean(1, dtype=np.float64)
    mean = clean.sum(dtype=np.float64) / count
    out["mean"] = mean
    variance = np.square(clean, dtype=np.float64).sum() / count - mean**2
    out["std"] = np.sqrt(max(variance, 0.0))
    values = flat[finite]
    out["low"], out["high"] = (values.min(), values.max()) if values.size else (0, 0)
    out["projections"] = projections_of(grouped)
    out["hash"] = _hash(flat.view(np.uint32).reshape(groups, -1))
    sampled = flat[:: max(flat.size // SAMPLES, 1) if flat.size > SAMPLES else 1]
    sampled = sampled[np.isfinite(sampled)]
    low, high = np.float32(out["low"][0]), np.float32(out["high"][0])
    scale = np.float32(BINS) / (high - low) if high > low else np.float32(0)
    bins = np.minimum(((sampled - low) * scale).astype(np.int64), BINS - 1)
    out["histogram"] = np.bincount(bins, minlength=BINS)


def _hash(grouped: Array) -> tuple[int, int]:
    first = second = 2166136261
    mask = 0xFFFFFFFF
    for lane in range(LANES):
        words = grouped[:, lane::LANES].reshape(-1).astype(np.uint64)
        powers = np.ones(len(words), np.uint64)
        if len(words) > 1:
            powers[1:] = 31
            # Modulo 2**32 as in the header: an overflow of 64 bits keeps the low bits.
            powers = np.cumprod(powers, dtype=np.uint64)[::-1]
        value = int((words * powers).sum(dtype=np.uint64)) & mask
        first = ((first ^ value) * 16777619) & mask
        second = ((second ^ (value >> 7)) * 0x85EBCA77) & mask
    return first, second
