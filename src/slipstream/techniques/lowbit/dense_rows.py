"""Integers of a few bits stored contiguously: the storage format of low-bit weights.

Value k of a row occupies bits from ``k * bits``, counted from the lowest bit of the row's first
byte; each row begins at a byte. The layouts of kernels are private and never stored.
"""

from __future__ import annotations

import numpy as np
import torch

# Number of values processed together, because each bit temporarily takes a byte.
_CHUNK = 1 << 20


def bit_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack `values` (uint8 [n, k], each below ``2**bits``) into uint8 [n, ceil(k*bits/8)]."""
    n, k = values.shape
    source = values.contiguous().numpy()
    out = np.empty((n, -(-k * bits // 8)), np.uint8)
    step = max(1, _CHUNK // max(k, 1))
    for first in range(0, n, step):
        part = source[first : first + step, :, None]
        spread = np.unpackbits(part, axis=2, count=bits, bitorder="little")
        rows = spread.reshape(part.shape[0], k * bits)
        out[first : first + step] = np.packbits(rows, axis=1, bitorder="little")
    return torch.from_numpy(out)


def from_bit_rows(rows: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Unpack the result of `bit_rows` into values, uint8 [n, k]."""
    n = rows.shape[0]
    source = rows.contiguous().numpy()
    out = np.empty((n, k), np.uint8)
    step = max(1, _CHUNK // max(k, 1))
    for first in range(0, n, step):
        part = source[first : first + step]
        spread = np.unpackbits(part, axis=1, count=k * bits, bitorder="little")
        each = spread.reshape(part.shape[0], k, bits)
        out[first : first + step] = np.packbits(each, axis=2, bitorder="little")[:, :, 0]
    return torch.from_numpy(out)
