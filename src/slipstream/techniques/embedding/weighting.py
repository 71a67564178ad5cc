"""Weights of a table's rows in approximation errors: their shares of look-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.bags import expect_tensor


def row_weights_of(weight: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    """Return `row_weights` as shares that sum to 1, float64 [rows]; uniform for None.

    Raises:
        InvalidArgumentError: `weight` is not a matrix of finite numbers, or `row_weights` have
            another shape, are negative, not finite or all zero.
    """
    expect_tensor("weight", weight)
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise InvalidArgumentError(
            "weight",
            f"of shape {list(weight.shape)} and {weight.dtype} is not a floating-point matrix",
        )
    if not bool(torch.isfinite(weight.detach().sum())) and not bool(weight.isfinite().all()):
        raise InvalidArgumentError("weight", "holds NaN or infinity")
    rows = weight.shape[0]
    if row_weights is None:
        return torch.full((rows,), 1 / rows, dtype=torch.float64, device=weight.device)
    expect_tensor("row_weights", row_weights)
    if row_weights.shape != (rows,):
        raise InvalidArgumentError(
            "row_weights", f"has shape {list(row_weights.shape)}, but the table has {rows} rows"
        )
    weights = row_weights.to(weight.device, torch.float64)
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()) or not weights.sum() > 0:
        raise InvalidArgumentError("row_weights", "must be finite, non-negative, and not all zero")
    return weights / weights.sum()


def relative_error(
    weight: torch.Tensor,
    other: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    row_weights: torch.Tensor | None = None,
) -> float:
    """Return the weighted squared distance of two tables over the weighted square of the first.

    Args:
        other: a table, or a function from rows of `weight` to rows of the table.
    """
    weights = row_weights_of(weight, row_weights)
    lost = whole = 0.0
    for rows in chunks(len(weight)):
        part, share = weight.detach()[rows], weights[rows]
        exact = part.double()
        near = other[rows] if isinstance(other, torch.Tensor) else other(part)
        lost += float(((exact - near.detach().double()).square().sum(1) * share).sum())
        whole += float((exact.square().sum(1) * share).sum())
    return lost / whole if whole else 0.0


def chunks(rows: int, most: int = 1 << 16) -> Iterator[slice]:
    """Yield slices of at most `most` rows that cover all rows."""
    for begin in range(0, rows, most):
        yield slice(begin, min(begin + most, rows))
