"""The compiled kernels (native/src/adasum), and bit-identical fallbacks in NumPy.

Dot products are 16 sequential partial sums, added pairwise.

Rows are contiguous float32 or float64 CPU tensors of equal length, one per worker. `starts`,
int64 [layers + 1], contains the offset of each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.native import InstructionSet
from slipstream.native.family import INT32, INT64, POINTER, Family

LANES = 16
_DTYPES = {torch.float32: 0, torch.float64: 1}
_ROWS = [INT32, INT32, POINTER, INT64, POINTER, INT64]
_FAMILY = Family("adasum", {
    "adasum_products": [*_ROWS, POINTER],
    "adasum_combine": [*_ROWS, POINTER, POINTER],
})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that this machine supports, see `Family.kernels`."""
    return _FAMILY.kernels


def products(rows: Sequence[torch.Tensor], starts: Any, level: InstructionSet | None = None) -> Any:
    """Return dot products of the rows per layer, float64 [layers, workers, workers]."""
    matrices = np.zeros((len(starts) - 1, len(rows), len(rows)))
    kernel = _FAMILY.kernel(level)
    if kernel is None:
        for layer, (begin, end) in enumerate(itertools.pairwise(starts)):
            padding = (0, -(end - begin) % LANES)
            pieces = [np.pad(row[begin:end].double().numpy(), padding) for row in rows]
            for i, j in itertools.combinations_with_replacement(range(len(pieces)), 2):
                sums = np.zeros(LANES)
                for line in (pieces[i] * pieces[j]).reshape(-1, LANES):
                    sums += line
                while len(sums) > 1:
                    sums = sums[0::2] + sums[1::2]
                matrices[layer, i, j] = matrices[layer, j, i] = sums[0]
        return matrices
    starts = np.ascontiguousarray(starts, np.int64)
    _FAMILY.call(
        "adasum_products", kernel, _DTYPES[rows[0].dtype], _pointers(rows), len(rows),
        starts.ctypes.data, len(starts) - 1, matrices.ctypes.data,
    )  # fmt: skip
    return matrices


def combine(
    rows: Sequence[torch.Tensor], starts: Any, weights: Any, out: torch.Tensor,
    level: InstructionSet | None = None,
) -> None:  # fmt: skip
    """Write the sum of rows weighted by `weights` [layers, workers] to `out`, possibly a row."""
    kernel = _FAMILY.kernel(level)
    if kernel is None:
        for layer, (begin, end) in enumerate(itertools.pairwise(starts)):
            factors = np.asarray(weights[layer]).astype(out.numpy().dtype)
            total = factors[0] * rows[0][begin:end].numpy()
            for factor, row in zip(factors[1:], rows[1:], strict=True):
                total = total + factor * row[begin:end].numpy()
            out.numpy()[begin:end] = total
        return
    starts = np.ascontiguousarray(starts, np.int64)
    weights = np.ascontiguousarray(weights, np.float64)
    _FAMILY.call(
        "adasum_combine", kernel, _DTYPES[rows[0].dtype], _pointers(rows), len(rows),
        starts.ctypes.data, len(starts) - 1, weights.ctypes.data, out.data_ptr(),
    )  # fmt: skip


def _pointers(rows: Sequence[torch.Tensor]) -> Any:
    return (POINTER * len(rows))(*(row.data_ptr() for row in rows))
