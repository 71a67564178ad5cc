"""Factorization of a matrix into two thin ones: ``W [m, n] = B [m, r] A [r, n]``.

The truncated singular value decomposition ``W = U S V^T`` has the minimum error of all products of
rank r: the dropped singular values (Eckart and Young, 1936). Each factor is multiplied by the root
of S, so that both have equal norms, which balances their gradients. Applied to a random dense
matrix this is *spectral initialisation*: independently drawn factors have a product of reduced
variance, and deep models of them do not train (Khodak et al., ICLR 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import InvalidArgumentError

# Randomised decomposition: columns beyond the rank, and power iterations.
_OVERSAMPLING, _ITERATIONS = 16, 2
# Power iterations for the largest singular value: from an arbitrary vector, with others close to
# it, and from the result of an earlier call.
_COLD_ITERATIONS, _WARM_ITERATIONS = 300, 6


@dataclass(frozen=True)
class Factors:
    """Two thin matrices and the error of their product.

    Attributes:
        a, b: [r, n] and [m, r], in the dtype of the matrix.
        lost: share of the matrix's squared Frobenius norm missing from the product, 0 to 1.
    """

    a: Tensor
    b: Tensor
    lost: float


@dataclass(frozen=True)
class Start:
    """Initialisation of factors.

    Attributes:
        randomised: find the leading singular vectors by random projection (Halko, Martinsson and
            Tropp, SIAM Review 2011): faster, and slightly less accurate.
        keep_norm: scale the product to the geometric mean of its norm and the matrix's. For
            untrained random weights, whose truncation is not an error. With a smaller norm,
            signals shrink from layer to layer; with the whole norm, a few directions dominate and
            training diverges at low ranks (3 of 10 trainings at a rank of 10 of 400).
    """

    randomised: bool = False
    keep_norm: bool = False


NEAREST = Start()
"""The exact truncated decomposition."""


def truncate(weight: Tensor, rank: int, start: Start = NEAREST) -> Factors:
    """Return the nearest product of rank `rank`, with factors of equal norm.

    Args:
        weight: [m, n]; float16 and bfloat16 are decomposed in float32.

    Raises:
        InvalidArgumentError: `rank` is below 1 or above the smaller dimension, or `weight` has
            non-finite values.
    """
    full = min(weight.shape)
    if not 1 <= rank <= full:
        raise InvalidArgumentError("rank", f"{rank} is not from 1 to {full}, the full rank")
    dtype, weight = weight.dtype, weight.detach()
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise InvalidArgumentError("weight", "contains NaN or infinity")
    if start.randomised and rank + _OVERSAMPLING < full:
        left, values, right = _leading(weight, rank)
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    total = float(weight.double().square().sum())
    retained = float(values.double().square().sum())
    lost = max(0.0, 1 - retained / total) if total else 0.0
    root = values.sqrt() * ((total / retained) ** 0.125 if start.keep_norm and retained else 1.0)
    a, b = root[:, None] * right, left * root
    return Factors(a.to(dtype).contiguous(), b.to(dtype).contiguous(), lost)


def _leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular vectors and values, reproducible for a given matrix."""
    generator = torch.Generator(device=weight.device).manual_seed(rank)
    columns = rank + _OVERSAMPLING
    omega = torch.randn(
        weight.shape[1], columns, generator=generator, dtype=weight.dtype, device=weight.device
    )
    basis = torch.linalg.qr(weight @ omega).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return (basis @ left)[:, :rank], values[:rank], right[:rank]


def rank_for(rank: float, rows: int, columns: int) -> int:
    """Return the rank that `rank` requests for a matrix.

    Args:
        rank: a float is a share of the full rank in (0, 1], rounded down, at least 1; an int is
            the rank itself.

    Raises:
        InvalidArgumentError: `rank` is not positive, or exceeds the full rank.
    """
    full = min(rows, columns)
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise InvalidArgumentError(
            "rank", f"{rank!r} is neither a share of the full rank nor a rank",
            remedy="pass 0.25, 16, or ranks by layer: RankMonitor(model).ranks chooses them from "
            "trained weights, the technique lowrank:0.25,auto=yes during training",
        )  # fmt: skip
    if isinstance(rank, int):
        if not 1 <= rank <= full:
            raise InvalidArgumentError("rank", f"{rank} is not from 1 to {full}, the full rank")
        return rank
    if not (math.isfinite(rank) and 0 < rank <= 1):
        raise InvalidArgumentError("rank", f"{rank} is not a share of the full rank: 0 < r <= 1")
    return max(1, int(rank * full))


def stable_rank(weight: Tensor, start: Tensor | None = None) -> tuple[float, Tensor]:
    """Return ``sum of squared singular values / largest squared``, and its right singular vector.

    Args:
        weight: [m, n].
        start: initial vector of the power iteration, [n]: during training, the result of the
            last call.
    """
    weight = weight.detach()
    vector = torch.ones(weight.shape[1], dtype=weight.dtype) if start is None else start
    largest = torch.zeros((), dtype=weight.dtype)
    for _ in range(_WARM_ITERATIONS if start is not None else _COLD_ITERATIONS):
        image = weight @ vector
        vector = weight.T @ image
        norm = vector.norm()
        if not float(norm):
            return 0.0, torch.ones_like(vector)
        largest = norm / image.norm()
        vector = vector / norm
    return float(weight.square().sum() / largest.square()), vector
