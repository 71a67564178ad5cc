"""Tensor trains of given tables, by successive singular value decompositions and refits.

Source: Oseledets, "Tensor-Train Decomposition", SIAM Journal on Scientific Computing, 2011 (its
theorem 2.2 bounds the error by the discarded singular values). The last core is refitted in closed
form, by least squares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.weighting import row_weights_of

_RIDGE = 1e-7
_ROWS_PER_CHUNK = 1 << 14


class Decomposed(NamedTuple):
    """Cores, and the discarded singular values of each cut, float64."""

    cores: list[torch.Tensor]
    discarded: list[torch.Tensor]


def tt_svd(
    weight: torch.Tensor, shape: TTShape, row_weights: torch.Tensor | None = None
) -> Decomposed:
    """Decompose a table [rows, dim] into a tensor train of `shape`, in float64.

    Cores are padded with zeros if the table has a lower rank.

    Args:
        row_weights: weights of the rows' errors, [rows]. The decomposition approximates them by a
            product of weights per digit; the refit of the last core uses them exactly.

    Raises:
        InvalidArgumentError: the table or the weights are not finite or have another shape, or the
            weights are negative or all zero.
    """
    row_weights_of(weight, row_weights)  # for its checks
    # Padded with rows of zeros: [p_1, ..., p_d, dim].
    padded = torch.zeros(math.prod(shape.rows), weight.shape[1], dtype=torch.float64)
    padded[: len(weight)] = weight.detach()
    tensor = padded.view(*shape.rows, -1)
    scales = None
    if row_weights is not None:
        scales = _digit_scales(row_weights, shape)
        for axis, scale in enumerate(scales):
            tensor = tensor * scale.view(*[-1 if a == axis else 1 for a in range(len(scales))], 1)
    cores, discarded = _cut(_paired(tensor, shape), shape)
    if scales is not None and row_weights is not None:
        cores = [core / s[:, None, None, None] for core, s in zip(cores, scales, strict=True)]
        rows = torch.arange(len(weight))
        refit(cores, rows, weight.detach().double().cpu(), row_weights.double().cpu(), _RIDGE)
    in_dtype = [core.to(weight.device, weight.dtype).contiguous() for core in cores]
    return Decomposed(in_dtype, discarded)


def refit(
    cores: list[torch.Tensor],
    ids: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    ridge: float,
) -> None:
    """Refit the last core in place, by least squares of rows `ids` to `targets`.

    Slices of the last core without ids stay unchanged.

    Args:
        cores: cores of the train.
        ids: int64 [n].
        targets: [n, dim].
        weights: weights of the rows' squared errors, [n].
        ridge: penalty on changes of a slice, relative to the mean diagonal of its normal matrix.
    """
    last = cores[-1]
    count, rank, columns, _ = last.shape
    normal = last.new_zeros(count, rank, rank)
    right = last.new_zeros(count, rank, columns)
    ones = torch.eye(rank, dtype=last.dtype, device=last.device).expand(1, rank, rank)
    for begin in range(0, len(ids), _ROWS_PER_CHUNK):
        part = slice(begin, begin + _ROWS_PER_CHUNK)
        batch, weight = ids[part], weights[part, None, None]
        digit = batch % count
        before = torch.div(batch, count, rounding_mode="floor")
        # Rows of the train without its last core: R columns per column of q_1 ... q_(d-1).
        left = reference.rows_of([*cores[:-2], cores[-2].flatten(2)[..., None]], before)
        left = left.view(len(batch), -1, rank)
        error = targets[part].view(len(batch), -1, columns) - left @ last[digit, :, :, 0]
        normal.index_add_(0, digit, left.mT @ (left * weight))
        right.index_add_(0, digit, left.mT @ (error * weight))
    size = normal.diagonal(dim1=1, dim2=2).mean(1)
    used = size > 0
    damped = normal[used] + ones * (ridge * size[used])[:, None, None]
    last[used] += torch.linalg.solve(damped, right[used])[..., None]


def _paired(tensor: torch.Tensor, shape: TTShape) -> torch.Tensor:
    """Reshape [p_1, ..., p_d, dim] to [p_1 q_1, ..., p_d q_d]."""
    cores = len(shape.rows)
    apart = tensor.reshape(*shape.rows, *shape.columns)
    order = [axis for t in range(cores) for axis in (t, cores + t)]
    return apart.permute(order).reshape(
        [p * q for p, q in zip(shape.rows, shape.columns, strict=True)]
    )


def _cut(tensor: torch.Tensor, shape: TTShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    cores, discarded = [], []
    remainder, rank = tensor, 1
    for rows, columns, new_rank in zip(shape.rows, shape.columns, shape.ranks[1:-1], strict=False):
        matrix = remainder.reshape(rank * rows * columns, -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        used = min(new_rank, len(s))
        discarded.append(s[used:])
        core = matrix.new_zeros(rank * rows * columns, new_rank)
        core[:, :used] = u[:, :used]
        remainder = matrix.new_zeros(new_rank, matrix.shape[1])
        remainder[:used] = s[:used, None] * v[:used]
        cores.append(core.view(rank, rows, columns, new_rank).transpose(0, 1).contiguous())
        rank = new_rank
    last = remainder.view(rank, shape.rows[-1], shape.columns[-1], 1).transpose(0, 1)
    return [*cores, last.contiguous()], discarded


def _digit_scales(row_weights: torch.Tensor, shape: TTShape) -> list[torch.Tensor]:
    """Return square roots of weights per digit, whose products approximate the row weights."""
    table = torch.zeros(math.prod(shape.rows), dtype=torch.float64)
    table[: len(row_weights)] = row_weights / row_weights.sum()
    grid = table.view(shape.rows)
    scales = []
    for axis in range(len(shape.rows)):
        marginal = grid.sum([a for a in range(len(shape.rows)) if a != axis])
        # Digits without weighted rows need a positive scale, since cores are divided by it.
        scales.append(marginal.clamp(min=float(marginal.max()) * 1e-6).sqrt())
    return scales
