"""Normalized arguments of ``nn.EmbeddingBag``: flat ids, and the offsets of bags.

This module checks shapes and dtypes, but does not read ids, so that it can be traced; the operators
of `kernels.bags` check ids and offsets when they run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.kernels import bags as bags_kernels
from slipstream.techniques.embedding.kernels.robe import MODES


class Bags(NamedTuple):
    """Ids and their bags.

    Attributes:
        ids: int32 or int64 [count], contiguous.
        offsets: int64 [bags], plus the end of the last bag if `has_end`; None for bags of equal
            size.
        weights: [count] of the parameters' dtype, or None.
        total: number of bags per table.
        has_end: whether the last offset ends the last bag. Stored, since a comparison of symbolic
            sizes is not a plain bool, which `embedding_bag` requires.
    """

    ids: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    total: int
    has_end: bool = False


def normalise(
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
    mode: str,
    parameter: torch.Tensor,
    include_last_offset: bool = False,
    tables: int = 1,
) -> Bags:
    """Check and normalize the arguments of ``nn.EmbeddingBag.forward``.

    Args:
        input: ids, int32 or int64: [tables * bags, n] for bags of n ids, or [count] with offsets.
        offsets: int32 or int64 [tables * bags], or one more with `include_last_offset`.
        per_sample_weights: of the shape of `input`, in mode sum.
        parameter: determines the device of all tensors, and the dtype of the weights.

    Raises:
        InvalidArgumentError: an argument has another dtype, shape or device.
    """
    _expect("input", input, parameter.device)
    if input.dim() == 2:
        if offsets is not None:
            raise InvalidArgumentError(
                "offsets", "requires ids of one dimension; rows of a two-dimensional input are bags"
            )
        total = input.shape[0]
    elif input.dim() == 1:
        if offsets is None:
            raise InvalidArgumentError("offsets", "is required with one-dimensional ids")
        _expect("offsets", offsets, parameter.device)
        if offsets.dim() != 1 or (include_last_offset and offsets.shape[0] == 0):
            raise InvalidArgumentError("offsets", f"has shape {list(offsets.shape)}, not [n]")
        total = offsets.shape[0] - (1 if include_last_offset else 0)
        offsets = offsets.to(torch.int64).contiguous()
    else:
        raise InvalidArgumentError("input", f"has {input.dim()} dimensions, not 1 or 2")
    if total % tables:
        raise InvalidArgumentError(
            "input" if offsets is None else "offsets",
            f"{total} bags cannot be split evenly among {tables} tables",
        )
    if per_sample_weights is not None:
        _check_weights(per_sample_weights, input, mode, parameter.dtype)
        per_sample_weights = per_sample_weights.reshape(-1).contiguous()
    has_end = offsets is not None and include_last_offset
    ids = input.reshape(-1).contiguous()
    return Bags(ids, offsets, per_sample_weights, total // tables, has_end)


def each(input: torch.Tensor, device: torch.device) -> Bags:
    """Return ids of any shape as bags of one id each, for ``nn.Embedding.forward``.

    Raises:
        InvalidArgumentError: ids have another dtype or device.
    """
    _expect("input", input, device)
    return Bags(input.reshape(-1).contiguous(), None, None, input.numel())


def reduced(rows: torch.Tensor, bags: Bags, mode: str, padding_idx: int | None) -> torch.Tensor:
    """Return sums, means or maxima of materialized rows; zeros for empty bags.

    Args:
        rows: one row per id, [count, width].
        padding_idx: an id to ignore.

    Returns:
        [bags, width].
    """
    begins = bags.offsets
    if begins is None:
        begins = torch.arange(bags.total, device=rows.device) * (len(rows) // max(bags.total, 1))
    padding = -1 if padding_idx is None else padding_idx
    return bags_kernels.reduced(rows, bags.ids, begins, mode, bags.weights, padding, bags.has_end)


def check_mode(mode: str) -> None:
    """Raise InvalidArgumentError unless `mode` is a known reduction."""
    if mode not in MODES:
        raise InvalidArgumentError(
            "mode", f"'{mode}' is not a reduction", remedy=f"use one of {', '.join(MODES)}"
        )


def padding_row(padding_idx: int | None, rows: int) -> int | None:
    """Return `padding_idx` as a non-negative row; raise InvalidArgumentError if out of range."""
    if padding_idx is None:
        return None
    padding_idx = as_integer("padding_idx", padding_idx, None)
    if not -rows <= padding_idx < rows:
        raise InvalidArgumentError("padding_idx", f"{padding_idx} is out of range for {rows} rows")
    return padding_idx % rows


def expect_tensor(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(
            name,
            f"is a {type(value).__name__}, not a tensor",
            remedy=f"pass torch.as_tensor({name})",
        )


def _expect(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    expect_tensor(name, tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(name, f"is {tensor.dtype}, not int32 or int64")
    if tensor.device != device:
        raise InvalidArgumentError(
            name,
            f"is on {tensor.device}, but the parameters are on {device}",
            remedy="move one of them",
        )


def _check_weights(
    weights: torch.Tensor, input: torch.Tensor, mode: str, dtype: torch.dtype
) -> None:
    expect_tensor("per_sample_weights", weights)
    if mode != "sum":
        raise InvalidArgumentError("per_sample_weights", f"requires mode sum, not {mode}")
    if weights.shape != input.shape:
        raise InvalidArgumentError(
            "per_sample_weights",
            f"has shape {list(weights.shape)}, but input has {list(input.shape)}",
        )
    if weights.dtype != dtype or weights.device != input.device:
        raise InvalidArgumentError(
            "per_sample_weights", f"is {weights.dtype} on {weights.device}, not {dtype}"
        )
