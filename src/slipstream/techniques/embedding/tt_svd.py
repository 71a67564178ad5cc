"""Tensor trains of tables that exist: successive singular value decompositions, and refits.

Source: Oseledets, "Tensor-Train Decomposition", SIAM Journal on Scientific Computing, 2011 (its
theorem 2.2 bounds the error by the discarded singular values); alternating least squares for the
core that can be refitted in closed form.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.weighting import row_weights_of

_RIDGE = 1e-7
_TOGETHER = 1 << 14


class Decomposed(NamedTuple):
    """Cores, and the singular values that were left out at each cut, float64."""

    cores: list[torch.Tensor]
    discarded: list[torch.Tensor]


def tt_svd(
    weight: torch.Tensor, shape: TTShape, row_weights: torch.Tensor | None = None
) -> Decomposed:
    """The tensor train of a table: [rows, dim] to cores of `shape`, computed in float64.

    A core's rank is padded with zeros where the table has less.

    Args:
        row_weights: how much each row's error counts, [rows]; what is minimised is the error
            weighted by their products' nearest, digit by digit, and then, exactly, by refitting the
            last core.

    Raises:
        InvalidArgumentError: a table or weights that are not finite, of another shape, or weights
            that are negative or all zero.
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
    """Change the last core in place so that rows `ids` come nearer to `targets`: least squares.

    Slices of the last core that no id has stay as they are.

    Args:
        cores: of the train.
        ids: int64 [n].
        targets: [n, dim].
        weights: of the rows' squared errors, [n].
        ridge: of what a slice's entries have in common with their present values, over the mean
            of the diagonal they are solved with.
    """
    last = cores[-1]
    count, rank, columns, _ = last.shape
    normal = last.new_zeros(count, rank, rank)
    right = last.new_zeros(count, rank, columns)
    ones = torch.eye(rank, dtype=last.dtype, device=last.device).expand(1, rank, rank)
    for begin in range(0, len(ids), _TOGETHER):
        part = slice(begin, begin + _TOGETHER)
        batch, weight = ids[part], weights[part, None, None]
        digit = batch % count
        before = torch.div(batch, count, rounding_mode="floor")
        # Rows of the train without its last core: R columns for each of q_1 ... q_(d-1).
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
    """[p_1 q_1, ..., p_d q_d] of [p_1, ..., p_d, dim]."""
    cores = len(shape.rows)
    apart = tensor.reshape(*shape.rows, *shape.columns)
    order = [axis for t in range(cores) for axis in (t, cores + t)]
    return apart.permute(order).reshape(
        [p * q for p, q in zip(shape.rows, shape.columns, strict=True)]
    )


def _cut(tensor: torch.Tensor, shape: TTShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    cores, discarded = [], []
    rest, rank = tensor, 1
    for rows, columns, wanted in zip(shape.rows, shape.columns, shape.ranks[1:-1], strict=False):
        matrix = rest.reshape(rank * rows * columns, -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        rank_kept = min(wanted, len(s))
        discarded.append(s[rank_kept:])
        core = matrix.new_zeros(rank * rows * columns, wanted)
        core[:, :rank_kept] = u[:, :rank_kept]
        rest = matrix.new_zeros(wanted, matrix.shape[1])
        rest[:rank_kept] = s[:rank_kept, None] * v[:rank_kept]
        cores.append(core.view(rank, rows, columns, wanted).transpose(0, 1).contiguous())
        rank = wanted
    last = rest.view(rank, shape.rows[-1], shape.columns[-1], 1).transpose(0, 1)
    return [*cores, last.contiguous()], discarded


def _digit_scales(row_weights: torch.Tensor, shape: TTShape) -> list[torch.Tensor]:
    """Square roots of factors, one to a digit, whose products are near the weights."""
    table = torch.zeros(math.prod(shape.rows), dtype=torch.float64)
    table[: len(row_weights)] = row_weights / row_weights.sum()
    grid = table.view(shape.rows)
    scales = []
    for axis in range(len(shape.rows)):
        marginal = grid.sum([a for a in range(len(shape.rows)) if a != axis])
        # A digit that no weighted row has still needs a scale that can be divided by.
        scales.append(marginal.clamp(min=float(marginal.max()) * 1e-6).sqrt())
    return scales
