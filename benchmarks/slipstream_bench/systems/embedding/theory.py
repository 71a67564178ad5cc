"""Theory of inner products under block hashing, and uniformity of the hashes.

With signs, the inner product of two rows rebuilt from sums in the shared array is an unbiased
estimate of the true one. Elements of one block never collide, which removes their part of the
variance.

Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE)", MLSys 2022, theorem 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from slipstream.techniques.embedding.kernels import robe_reference as reference

Vector = NDArray[np.float64]


def variance(x: Vector, y: Vector, size: int, block: int) -> float:
    """Return the variance of the estimate of <x, y>, float64 [dim] each, in an array of `size`."""
    blocks = range(0, len(x), block)
    within = sum(_variance(x[b : b + block], y[b : b + block], size) for b in blocks)
    return _variance(x, y, size) - within


def _variance(x: Vector, y: Vector, size: int) -> float:
    """Return the variance for blocks of one."""
    products = x * y
    total = (x @ x) * (y @ y) - (x * x) @ (y * y) + products.sum() ** 2 - (products**2).sum()
    return float(total / size)


def estimates(x: Vector, y: Vector, size: int, block: int, draws: int) -> Vector:
    """Return `draws` estimates of <x, y> from an array into which both are summed.

    Both are hashed as the same row; every draw is another row.
    """
    key, dim = reference.table_key(0, 0), len(x)
    made = np.empty(draws)
    for begin in range(0, draws, 1000):
        rows = torch.arange(begin, min(begin + 1000, draws))
        at = reference.places(key, rows, dim, block, size)
        at = at + torch.arange(len(rows))[:, None] * size
        sign = reference.signs(key, rows, dim, torch.float64)
        sums = [
            torch.zeros(len(rows) * size, dtype=torch.float64).index_add_(
                0, at.flatten(), (sign * torch.from_numpy(vector)).flatten()
            )
            for vector in (x, y)
        ]
        made[begin : begin + len(rows)] = (sums[0] * sums[1]).view(len(rows), size).sum(1).numpy()
    return made


def uniformity(starts: torch.Tensor, size: int, buckets: int = 1024) -> float:
    """Return the p-value of a chi-square test that `starts`, int64, are uniform in [0, size)."""
    seen = torch.bincount((starts.double() / size * buckets).long(), minlength=buckets).numpy()
    expected = len(starts) / buckets
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), buckets - 1))


def overlaps(starts: torch.Tensor, size: int, block: int) -> float:
    """Return the share of pairs of blocks that overlap, times ``size / (2 Z - 1)``.

    It is 1 if starts are independent and uniform.
    """
    seen = torch.bincount(starts, minlength=size).double()
    near = seen.clone()
    for distance in range(1, block):
        near += seen.roll(distance) + seen.roll(-distance)
    count = len(starts)
    pairs = float((seen * near).sum()) - count
    return pairs / (count * (count - 1)) * size / (2 * block - 1)
