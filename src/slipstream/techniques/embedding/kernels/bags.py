"""Whether the ids and offsets of embedding bags are what they must be, in one pass each.

Bag number ``t * bags + b`` is bag b of table t. It holds ``ids[offsets[g]]`` up to the next offset,
or up to the last id where there is none; without offsets all bags have the same number of ids.
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
    """An id that is no row of its table."""


_FAMILY = Family("bags", {
    "bags_check": [
        POINTER, INT32, INT64, POINTER, INT64, POINTER, INT64, INT64, INT64, POINTER,
    ],
})  # fmt: skip


def check(ids: torch.Tensor, offsets: torch.Tensor | None, rows: torch.Tensor, bags: int) -> None:
    """See that every id is a row of its table and that offsets rise from 0.

    Args:
        ids: int32 or int64 [count], contiguous.
        offsets: int64 [tables * bags] or one more, contiguous; None for bags of one size.
        rows: int64 [tables], any stride, on the CPU.
        bags: of each table.

    Raises:
        IdRangeError: ``input`` has an id that is negative or too large; says which and where.
        InvalidArgumentError: ``offsets`` are out of order or beyond the ids.
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
        remedy="ids lie in [0, num_embeddings)",
    )


def check_form(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    parameter: torch.Tensor,
    total: int,
) -> None:
    """See that ids, offsets and weights of `total` bags have the dtypes and shapes kernels take.

    Args:
        parameter: tells the device of the ids and the dtype of the weights.

    Raises:
        InvalidArgumentError: names the argument and what is wrong with it.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
        raise InvalidArgumentError("input", "ids must be contiguous int32 or int64 [count]")
    if ids.device != parameter.device:
        raise InvalidArgumentError(
            "input", f"is on {ids.device}, the parameters on {parameter.device}"
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
    """Raise InvalidArgumentError for a weight that is NaN or infinite; says which."""
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
    """Bags of rows that are written down, one for each of `ids`: [bags, width].

    Args:
        padding: an id whose rows do not count.
        has_end: whether the last offset ends the last bag.
    """
    if rows.is_cuda and mode != "max":
        return summed(rows, ids, offsets, weights, padding, mean=mode == "mean", has_end=has_end)
    count = len(ids)
    places = torch.arange(count, device=ids.device).masked_fill(ids == padding, count)
    # One row more stands for what is absent.
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
    """As `reduced`, each row added to its bag: on a device backwards a copy, where
    ``embedding_bag`` would sort. The order of a sum there, and its last bits, are not fixed."""
    bags = len(offsets) - has_end
    bag = torch.searchsorted(offsets, torch.arange(len(ids), device=ids.device), right=True) - 1
    if weights is not None:
        rows = rows * weights[:, None]
    absent = (ids == padding)[:, None] if padding >= 0 else None
    if absent is not None:
        rows = rows.masked_fill(absent, 0)
    # Rows behind the end are in a bag that nobody asked for.
    total = rows.new_zeros(len(offsets), rows.shape[1]).index_add(0, bag, rows)[:bags]
    if not mean:
        return total
    one = rows.new_ones(len(ids), 1)
    counted = one if absent is None else one.masked_fill(absent, 0)
    counts = rows.new_zeros(len(offsets), 1).index_add(0, bag, counted)[:bags]
    return total / counts.clamp(min=1)


def gradients(
    made_by: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """What torch says of each of `inputs`, from the gradient of ``made_by(*inputs)``."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        grads = torch.autograd.grad(made_by(*leaves), leaves, grad, allow_unused=True)
    return [
        torch.zeros_like(leaf) if one is None else one.contiguous()
        for leaf, one in zip(leaves, grads, strict=True)
    ]


def _about_offset(offsets: torch.Tensor, where: int, count: int) -> str:
    value = int(offsets[where])
    if where == 0:
        return f"the first is {value}, not 0"
    if value > count:
        return f"offset {value} at place {where} is beyond the {count} ids"
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
    """Whether all is as it must be, of one table; waits for a device once."""
    if len(rows) != 1 or not ids.numel():
        return False
    facts = [*torch.aminmax(ids)]
    if offsets is not None and offsets.numel():
        rising = (offsets.diff() >= 0).all() if offsets.numel() > 1 else offsets[0] == 0
        facts += [offsets[0], offsets[-1], rising]
    low, high, *of_offsets = torch.stack([one.to(torch.int64) for one in facts]).tolist()
    first, last, rises = of_offsets or (0, 0, 1)
    return low >= 0 and high < int(rows[0]) and first == 0 and last <= ids.numel() and bool(rises)


def _begin(table: int, count: int, offsets: torch.Tensor | None, tables: int, bags: int) -> int:
    """Where the ids of `table` begin."""
    if offsets is None:
        return count // tables * table
    return int(offsets[table * bags]) if table * bags < offsets.numel() else count


def _table_of(where: int, count: int, offsets: torch.Tensor | None, tables: int, bags: int) -> int:
    return next(t for t in range(tables) if where < _begin(t + 1, count, offsets, tables, bags))
