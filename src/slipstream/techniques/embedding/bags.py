"""The arguments of ``nn.EmbeddingBag`` in one form: ids in a row, and where bags begin.

Shapes and dtypes are checked here, without a look at the ids themselves, so that it can be traced;
ids and offsets are checked when the operator runs, by `kernels.bags`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.kernels import bags as bags_door
from slipstream.techniques.embedding.kernels.robe import MODES


class Bags(NamedTuple):
    """Ids and the bags they are in.

    Attributes:
        ids: int32 or int64 [count], contiguous.
        offsets: int64 [bags], or one more whose value ends the last bag; None for bags of one size.
        weights: [count] of the parameters' dtype, or None.
        total: how many bags, of each table.
        has_end: whether the last offset ends the last bag. Told, not counted: sizes that a
            compiler does not know compare to no plain bool, which `embedding_bag` asks for.
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
    """Ids and offsets as ``nn.EmbeddingBag.forward`` takes them, in one form.

    Args:
        input: ids, int32 or int64: [tables * bags, n] for bags of n each, or [count] with offsets.
        offsets: int32 or int64 [tables * bags], or one more with `include_last_offset`.
        per_sample_weights: as `input`, in mode sum.
        parameter: tells the device of all, and the dtype of the weights.

    Raises:
        InvalidArgumentError: an argument of another dtype, shape or device.
    """
    _expect("input", input, parameter.device)
    if input.dim() == 2:
        if offsets is not None:
            raise InvalidArgumentError(
                "offsets", "is for ids in one dimension; rows of a two-dimensional input are bags"
            )
        total = input.shape[0]
    elif input.dim() == 1:
        if offsets is None:
            raise InvalidArgumentError("offsets", "must be given with ids in one dimension")
        _expect("offsets", offsets, parameter.device)
        if offsets.dim() != 1 or (include_last_offset and offsets.shape[0] == 0):
            raise InvalidArgumentError("offsets", f"has the shape {list(offsets.shape)}, not [n]")
        total = offsets.shape[0] - (1 if include_last_offset else 0)
        offsets = offsets.to(torch.int64).contiguous()
    else:
        raise InvalidArgumentError("input", f"has {input.dim()} dimensions, not 1 or 2")
    if total % tables:
        raise InvalidArgumentError(
            "input" if offsets is None else "offsets",
            f"{total} bags are not the same number for each of {tables} tables",
        )
    if per_sample_weights is not None:
        _check_weights(per_sample_weights, input, mode, parameter.dtype)
        per_sample_weights = per_sample_weights.reshape(-1).contiguous()
    has_end = offsets is not None and include_last_offset
    ids = input.reshape(-1).contiguous()
    return Bags(ids, offsets, per_sample_weights, total // tables, has_end)


def each(input: torch.Tensor, device: torch.device) -> Bags:
    """Ids of any shape, a bag of one each: as ``nn.Embedding.forward`` takes them.

    Raises:
        InvalidArgumentError: ids of another dtype or device.
    """
    _expect("input", input, device)
    return Bags(input.reshape(-1).contiguous(), None, None, input.numel())


def reduced(rows: torch.Tensor, bags: Bags, mode: str, padding_idx: int | None) -> torch.Tensor:
    """Sums, means or maxima of rows that are written down; zeros for empty bags.

    Args:
        rows: one for each of the bags' ids: [count, width].
        padding_idx: an id whose rows do not count.

    Returns:
        [bags, width].
    """
    begins = bags.offsets
    if begins is None:
        begins = torch.arange(bags.total, device=rows.device) * (len(rows) // max(bags.total, 1))
    padding = -1 if padding_idx is None else padding_idx
    return bags_door.reduced(rows, bags.ids, begins, mode, bags.weights, padding, bags.has_end)


def check_mode(mode: str) -> None:
    """Raise InvalidArgumentError unless bags can be reduced so."""
    if mode not in MODES:
        raise InvalidArgumentError("mode", f"'{mode}' is not possible", remedy=", ".join(MODES))


def padding_row(padding_idx: int | None, rows: int) -> int | None:
    """`padding_idx` counted from the front; InvalidArgumentError if it is no row of the table."""
    if padding_idx is None:
        return None
    padding_idx = as_integer("padding_idx", padding_idx, None)
    if not -rows <= padding_idx < rows:
        raise InvalidArgumentError("padding_idx", f"{padding_idx} is not a row of the {rows}")
    return padding_idx % rows


def expect_tensor(name: str, given: object) -> None:
    """Raise InvalidArgumentError for a list, an array of NumPy's, ... in place of a tensor."""
    if not isinstance(given, torch.Tensor):
        raise InvalidArgumentError(
            name, f"is a {type(given).__name__}, not a tensor", remedy=f"torch.as_tensor({name})"
        )


def _expect(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    expect_tensor(name, tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(name, f"is {tensor.dtype}, not int32 or int64")
    if tensor.device != device:
        raise InvalidArgumentError(
            name,
            f"is on {tensor.device}, the parameters are on {device}",
            remedy="move one of them",
        )


def _check_weights(
    weights: torch.Tensor, input: torch.Tensor, mode: str, dtype: torch.dtype
) -> None:
    expect_tensor("per_sample_weights", weights)
    if mode != "sum":
        raise InvalidArgumentError("per_sample_weights", f"is for mode sum, not {mode}")
    if weights.shape != input.shape:
        raise InvalidArgumentError(
            "per_sample_weights",
            f"has the shape {list(weights.shape)}, input {list(input.shape)}",
        )
    if weights.dtype != dtype or weights.device != input.device:
        raise InvalidArgumentError(
            "per_sample_weights", f"is {weights.dtype} on {weights.device}, not {dtype}"
        )
