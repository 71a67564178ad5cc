"""A matrix as a product of two thin ones: ``W [m, n] = B [m, r] A [r, n]``.

The truncated singular value decomposition ``W = U S V^T`` leaves the least error of all products of
rank r, the singular values it drops (Eckart and Young, 1936). Both factors get the root of S, so
that neither is larger than the other, as gradients want it. Of a random dense matrix this is
*spectral initialisation*: factors drawn by themselves shrink their product's variance, and deep
models of them do not train at all (Khodak et al., ICLR 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import InvalidArgumentError

# Of randomised decompositions: columns beyond the rank, and power iterations.
_OVERSAMPLED, _ITERATIONS = 16, 2
# Of power iteration: from nowhere, where neighbours of the largest singular value are close, and
# from where the last one ended.
_AT_FIRST, _LATER = 300, 6


@dataclass(frozen=True)
class Factors:
    """Two thin matrices, and what their product lacks.

    Attributes:
        a, b: [r, n] and [m, r], in the dtype of the matrix.
        lost: share of the matrix's squared Frobenius norm that the product lacks, 0 to 1.
    """

    a: Tensor
    b: Tensor
    lost: float


@dataclass(frozen=True)
class Start:
    """How factors begin.

    Attributes:
        randomised: find the leading singular vectors by random projection (Halko, Martinsson and
            Tropp, SIAM Review 2011): faster, and a little further off.
        keep_norm: for weights that were drawn a moment ago, of which what is dropped is no error:
            give the product the geometric mean of its norm and the whole matrix's. With less,
            signals shrink from layer to layer; with all of it few directions are so strong that
            training breaks down at low ranks (3 of 10 trainings at a rank of 10 of 400).
    """

    randomised: bool = False
    keep_norm: bool = False


NEAREST = Start()
"""As near to the matrix as can be, exactly."""


def truncated(weight: Tensor, rank: int, start: Start = NEAREST) -> Factors:
    """The nearest product of rank `rank`, split evenly between both factors.

    Args:
        weight: [m, n]; below float32, it is decomposed in float32.

    Raises:
        InvalidArgumentError: `rank` is below 1 or above the smaller side, or a number is not
            finite.
    """
    full = min(weight.shape)
    if not 1 <= rank <= full:
        raise InvalidArgumentError("rank", f"{rank} is not from 1 to {full}, the full rank")
    dtype, weight = weight.dtype, weight.detach()
    if weight.dtype in (torch.float16, torch.bfloat16):
        weight = weight.float()
    if not bool(weight.isfinite().all()):
        raise InvalidArgumentError("weight", "holds NaN or infinity")
    if start.randomised and rank + _OVERSAMPLED < full:
        left, values, right = _leading(weight, rank)
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    total = float(weight.double().square().sum())
    kept = float(values.double().square().sum())
    lost = max(0.0, 1 - kept / total) if total else 0.0
    root = values.sqrt() * ((total / kept) ** 0.125 if start.keep_norm and kept else 1.0)
    a, b = root[:, None] * right, left * root
    return Factors(a.to(dtype).contiguous(), b.to(dtype).contiguous(), lost)


def _leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors and values of the largest `rank`, the same for the same matrix."""
    drawn = torch.Generator(device=weight.device).manual_seed(rank)
    columns = rank + _OVERSAMPLED
    omega = torch.randn(
        weight.shape[1], columns, generator=drawn, dtype=weight.dtype, device=weight.device
    )
    basis = torch.linalg.qr(weight @ omega).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return (basis @ left)[:, :rank], values[:rank], right[:rank]


def rank_for(wanted: float, rows: int, columns: int) -> int:
    """The rank that `wanted` names for a matrix: a share of the full one, or a number of columns.

    Args:
        wanted: a float is a share in (0, 1], rounded down, at least 1; an int is the rank.

    Raises:
        InvalidArgumentError: 0 or less, or more than the full rank.
    """
    full = min(rows, columns)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        raise InvalidArgumentError(
            "rank", f"{wanted!r} is neither a share of the full rank nor a rank",
            remedy="0.25, 16, or by layer: RankMonitor(model).ranks chooses from trained weights, "
            "the technique lowrank:0.25,auto=yes while training",
        )  # fmt: skip
    if isinstance(wanted, int):
        if not 1 <= wanted <= full:
            raise InvalidArgumentError("rank", f"{wanted} is not from 1 to {full}, the full rank")
        return wanted
    if not (math.isfinite(wanted) and 0 < wanted <= 1):
        raise InvalidArgumentError("rank", f"{wanted} is no share of the full rank: 0 < r <= 1")
    return max(1, int(wanted * full))


def stable_rank(weight: Tensor, start: Tensor | None = None) -> tuple[float, Tensor]:
    """``sum of squared singular values / largest squared``, and the right vector of the largest.

    Args:
        weight: [m, n].
        start: [n], where power iteration begins: what the last call returned, while training.
    """
    weight = weight.detach()
    vector = torch.ones(weight.shape[1], dtype=weight.dtype) if start is None else start
    largest = torch.zeros((), dtype=weight.dtype)
    for _ in range(_LATER if start is not None else _AT_FIRST):
        image = weight @ vector
        vector = weight.T @ image
        norm = vector.norm()
        if not float(norm):
            return 0.0, torch.ones_like(vector)
        largest = norm / image.norm()
        vector = vector / norm
    return float(weight.square().sum() / largest.square()), vector
