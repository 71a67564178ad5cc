"""Checks of the ids and offsets of embedding bags, in one pass each.

Bag ``g = t * bags + b`` is bag b of table t. It holds ``ids[offsets[g]]`` up to the next offset, or
the last id; without offsets all bags have the same number of ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.native.family import INT32, INT64, POINTER, Family, tensor_pointer

_ID, _OFFSET = 1, 2


class IdRangeError(InvalidArgumentError, IndexError):
    """An id that is out of range for its table."""


_FAMILY = Family("bags", {
    "bags_check": [
        POINTER, INT32, INT64, POINTER, INT64, POINTER, INT64, INT64, INT64, POINTER,
    ],
})  # fmt: skip


def check(ids: torch.Tensor, offsets: torch.Tensor | None, rows: torch.Tensor, bags: int) -> None:
    """Check that ids are in the range of their tables, and that offsets ascend from 0.

    Args:
        ids: int32 or int64 [count], contiguous.
        offsets: int64 [tables * bags] or one more, contiguous; None for bags of equal size.
        rows: int64 [tables], any stride, on the CPU.
        bags: number of bags per table.

    Raises:
        IdRangeError: an id of ``input`` is negative or too large; the error has its position.
        InvalidArgumentError: ``offsets`` decrease or exceed the number of ids.
    """
    fault = _fault(ids, offsets, rows, bags)
    if fault is None:
        return
    kind, where = fault
    if kind == _OFFSET:
        assert offsets is not None
        raise InvalidArgumentError("offsets", _about_offset(offsets, where, ids.numel()))
    value = int(ids[where])
    what = "is negative" if value < 0 else "is too large"
    table = _table_of(where, ids.numel(), offsets, len(rows), bags)
    of = f" (table {table})" if len(rows) > 1 else ""
    raise IdRangeError(
        "input",
        f"the id {value} at place {where} {what}; the table has {int(rows[table])} rows{of}",
        remedy="pass ids in [0, num_embeddings)",
    )


def check_form(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    parameter: torch.Tensor,
    total: int,
) -> None:
    """Check dtypes and shapes of ids, offsets and weights of `total` bags.

    Args:
        parameter: has the device of the ids and the dtype of the weights.

    Raises:
        InvalidArgumentError: an argument is invalid; the error names it.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
        raise InvalidArgumentError("input", "ids must be contiguous int32 or int64 [count]")
    if ids.device != parameter.device:
        raise InvalidArgumentError(
            "input", f"is on {ids.device}, but the parameters are on {parameter.device}"
        )
    if offsets is not None:
        if offsets.dtype is not torch.int64 or not offsets.is_contiguous():
            raise InvalidArgumentError("offsets", "must be contiguous int64")
        if offsets.dim() != 1 or offsets.numel() not in (total, total + 1):
            raise InvalidArgumentError("offsets", f"must have {total} or {total + 1} elements")
    elif total and ids.numel() % total:
        raise InvalidArgumentError("input", f"{ids.numel()} ids do not fill {total} equal bags")
    if weights is None:
        return
    if (
        weights.shape != ids.shape
        or weights.dtype != parameter.dtype
        or not weights.is_contiguous()
    ):
        raise InvalidArgumentError(
            "per_sample_weights", f"must be {parameter.dtype} [{ids.numel()}]"
        )
    check_weights(weights)


def check_weights(weights: torch.Tensor) -> None:
    """Raise InvalidArgumentError, with the position, if a weight is NaN or infinite."""
    finite = torch.isfinite(weights)
    if not bool(finite.all()):
        place = int(finite.to(torch.int8).argmin())
        raise InvalidArgumentError(
            "per_sample_weights", f"the number at place {place} is {float(weights[place])}"
        )


def reduced(
    rows: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding: int,
    has_end: bool = False,
) -> torch.Tensor:
    """Reduce materialized rows, one per id, to bags: [bags, width].

    Args:
        padding: an id to ignore.
        has_end: whether the last offset ends the last bag.
    """
    if rows.is_cuda and mode != "max":
        return summed(rows, ids, offsets, weights, padding, mean=mode == "mean", has_end=has_end)
    count = len(ids)
    places = torch.arange(count, device=ids.device).masked_fill(ids == padding, count)
    # One additional row represents ignored ids.
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return functional.embedding_bag(
        places, rows, offsets, mode=mode, per_sample_weights=weights, padding_idx=count,
        include_last_offset=has_end,
    )  # fmt: skip


def summed(
    rows: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    padding: int,
    mean: bool,
    has_end: bool,
) -> torch.Tensor:
    """Reduce rows by ``index_add``, whose backward pass copies where ``embedding_bag`` would sort.

    On a CUDA device the order of a sum, and so its last bits, vary.
    """
    bags = len(offsets) - has_end
    bag = torch.searchsorted(offsets, torch.arange(len(ids), device=ids.device), right=True) - 1
    if weights is not None:
        rows = rows * weights[:, None]
    absent = (ids == padding)[:, None] if padding >= 0 else None
    if absent is not None:
        rows = rows.masked_fill(absent, 0)
    # Rows after the end are in an additional bag, which is dropped.
    total = rows.new_zeros(len(offsets), rows.shape[1]).index_add(0, bag, rows)[:bags]
    if not mean:
        return total
    ones = rows.new_ones(len(ids), 1)
    counted = ones if absent is None else ones.masked_fill(absent, 0)
    counts = rows.new_zeros(len(offsets), 1).index_add(0, bag, counted)[:bags]
    return total / counts.clamp(min=1)


def gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of `inputs` by autograd, from the gradient of ``function(*inputs)``."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        grads = torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
        for leaf, gradient in zip(leaves, grads, strict=True)
    ]


def _about_offset(offsets: torch.Tensor, where: int, count: int) -> str:
    value = int(offsets[where])
    if where == 0:
        return f"the first is {value}, not 0"
    if value > count:
        return f"offset {value} at place {where} exceeds the {count} ids"
    return f"offset {value} at place {where} is less than the one before, {int(offsets[where - 1])}"


def _fault(
    ids: torch.Tensor, offsets: torch.Tensor | None, rows: torch.Tensor, bags: int
) -> tuple[int, int] | None:
    compiled = _FAMILY.library
    if compiled is None or not ids.is_cpu:
        return _fault_by_torch(ids, offsets, rows, bags)
    where = ctypes.c_int64()
    kind = compiled.slipstream_bags_check(
        ids.data_ptr(), ids.element_size(), ids.numel(),
        tensor_pointer(offsets), 0 if offsets is None else offsets.numel(),
        rows.data_ptr(), rows.stride(0), rows.shape[0], bags, ctypes.byref(where),
    )  # fmt: skip
    return (kind, where.value) if kind else None


def _fault_by_torch(
    ids: torch.Tensor, offsets: torch.Tensor | None, rows: torch.Tensor, bags: int
) -> tuple[int, int] | None:
    if not ids.is_cpu and _is_sound(ids, offsets, rows):
        return None
    if offsets is not None and offsets.numel():
        before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
        wrong = (offsets < before) | (offsets > ids.numel())
        wrong[0] = offsets[0] != 0
        if bool(wrong.any()):
            return _OFFSET, int(wrong.to(torch.int8).argmax())
    for table, limit in enumerate(rows.tolist()):
        begin, end = (
            _begin(table + side, ids.numel(), offsets, len(rows), bags) for side in (0, 1)
        )
        outside = (ids[begin:end] < 0) | (ids[begin:end] >= limit)
        if bool(outside.any()):
            return _ID, begin + int(outside.to(torch.int8).argmax())
    return None


def _is_sound(ids: torch.Tensor, offsets: torch.Tensor | None, rows: torch.Tensor) -> bool:
    """Whether ids and offsets of one table are valid; synchronizes with the device once."""
    if len(rows) != 1 or not ids.numel():
        return False
    facts = [*torch.aminmax(ids)]
    if offsets is not None and offsets.numel():
        rising = (offsets.diff() >= 0).all() if offsets.numel() > 1 else offsets[0] == 0
        facts += [offsets[0], offsets[-1], rising]
    low, high, *of_offsets = torch.stack([fact.to(torch.int64) for fact in facts]).tolist()
    first, last, rises = of_offsets or (0, 0, 1)
    return low >= 0 and high < int(rows[0]) and first == 0 and last <= ids.numel() and bool(rises)


def _begin(table: int, count: int, offsets: torch.Tensor | None, tables: int, bags: int) -> int:
    """Return the position of the first id of `table`."""
    if offsets is None:
        return count // tables * table
    return int(offsets[table * bags]) if table * bags < offsets.numel() else count


def _table_of(where: int, count: int, offsets: torch.Tensor | None, tables: int, bags: int) -> int:
    return next(t for t in range(tables) if where < _begin(t + 1, count, offsets, tables, bags))
