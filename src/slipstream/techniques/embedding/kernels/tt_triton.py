"""Triton kernels of tensor trains for CUDA devices; imported only if Triton is installed.

As in ``native/src/tt/``, ids with the same slice of the middle core share one matmul. Ids are
counted and sorted by that slice and split into chunks. A program has one chunk: it multiplies the
first two cores for all its ids in one matmul, then by the last slice of each id. It adds rows to
their bags directly, and reads gradients from the bags, so that rows are never materialized. The
backward pass recomputes the products. Sums are atomic: last bits depend on the order.

Kernels have no annotations, since Triton would compile them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.techniques.embedding.kernels.tt_reference import of_three

_MIN_TILE = 16  # minimum rows and columns of a matmul on tensor cores
_CHUNK_ROWS = 32
_MAX_NUMBERS = 1 << 14  # of a middle slice in one program
_MAX_SLICES = 1 << 14  # whose counts every program sums
_BLOCK = 256  # ids per program of the counting kernels
# With four, the three matmuls of a backward program exceed the registers of a thread.
_WARPS = 8


@triton.jit
def _count(
    ids, offsets, counts, rank, bag, n, offset_count, bags, rows, p2, p3,
    pooled: tl.constexpr, halvings: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count the ids of each slice, and store the rank of each id in its slice, and its bag.

    The last of the counts is 1 if an id or an offset is invalid.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < n
    number = tl.load(ids + at, mask=mask, other=0).to(tl.int64)
    sound = (number >= 0) & (number < rows)
    middle = tl.where(sound, number // p3 % p2, 0)
    tl.store(rank + at, tl.atomic_add(counts + middle, 1, mask=mask), mask=mask)
    if pooled:
        # Binary search for the last bag that begins at or before the id.
        low = tl.zeros([block], tl.int64)
        high = low + bags
        for _ in tl.static_range(halvings):
            half = (low + high) // 2
            before = tl.load(offsets + half, mask=mask, other=0) <= at
            low = tl.where(before, half, low)
            high = tl.where(before, high, half)
        tl.store(bag + at, low, mask=mask)
        of_bags = at < offset_count
        begin = tl.load(offsets + at, mask=of_bags, other=0)
        earlier = tl.load(offsets + at - 1, mask=of_bags & (at > 0), other=0)
        rises = (begin >= earlier) & (begin <= n) & ((begin == 0) | (at > 0))
        sound = sound & (rises | (at >= offset_count))
    tl.atomic_max(counts + p2, tl.max(tl.where(sound, 0, 1), 0))


@triton.jit
def _place(ids, counts, until, rank, order, n, p2, p3, block: tl.constexpr):
    """Store the order of ids by their slices."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < n
    middle = tl.load(ids + at, mask=mask, other=0).to(tl.int64) // p3 % p2
    begin = tl.load(until + middle, mask=mask, other=0) - tl.load(counts + middle)
    tl.store(order + begin + tl.load(rank + at, mask=mask, other=0), at, mask=mask)


@triton.jit
def _chunk(
    counts, order, ids, bag, program, p2, p3, padding,
    p2_wide: tl.constexpr, span: tl.constexpr, pooled: tl.constexpr,
):  # fmt: skip
    """Return a program's middle slice, the digits of its ids, their rows, and their mask.

    The grid has the maximum number of programs; superfluous ones have no ids.
    """
    slices = tl.arange(0, p2_wide)
    count = tl.load(counts + slices, mask=slices < p2, other=0)
    needed = (count + span - 1) // span
    middle = tl.sum((tl.cumsum(needed, 0) <= program).to(tl.int32), 0)
    earlier = slices < middle
    begin = tl.sum(tl.where(earlier, count, 0), 0)
    end = begin + tl.sum(tl.where(slices == middle, count, 0), 0)
    begin += (program - tl.sum(tl.where(earlier, needed, 0), 0)) * span
    at = begin + tl.arange(0, span)
    place = tl.load(order + at, mask=at < end, other=0)
    number = tl.load(ids + place, mask=at < end, other=0).to(tl.int64)
    mask = (at < end) & (number != padding)
    to = tl.load(bag + place, mask=mask, other=0) if pooled else place
    return tl.minimum(middle, p2 - 1), number // (p2 * p3), number % p3, to.to(tl.int64), mask


@triton.jit
def _left(
    core_1, core_2, first, middle, row_mask, q1, q2, r1, r2,
    q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr, r2_wide: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """Load slices of the first core [rows, r1] and the middle one [r1, q2 * r2], zero-padded."""
    a = tl.arange(0, rows) % q1_wide
    k = tl.arange(0, r1_wide)
    inside = (row_mask & (a < q1))[:, None] & (k < r1)[None]
    left = tl.load(core_1 + (first * q1 + a)[:, None] * r1 + k[None], mask=inside, other=0.0)
    b, s = tl.arange(0, q2_wide * r2_wide) // r2_wide, tl.arange(0, q2_wide * r2_wide) % r2_wide
    column = b * r2 + s
    inside = (k < r1)[:, None] & ((b < q2) & (s < r2))[None]
    base = core_2 + middle * r1 * q2 * r2
    right = tl.load(base + k[:, None] * (q2 * r2) + column[None], mask=inside, other=0.0)
    return left, right


@triton.jit
def _forward(
    core_1, core_2, core_3, made, counts, order, ids, bag, padding, p2, p3, q1, q2, q3, r1, r2,
    p2_wide: tl.constexpr, q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr,
    r2_wide: tl.constexpr, span: tl.constexpr, pooled: tl.constexpr,
):  # fmt: skip
    rows: tl.constexpr = q1_wide * span
    middle, first, last, place, mask = _chunk(
        counts, order, ids, bag, tl.program_id(0), p2, p3, padding, p2_wide, span, pooled
    )
    first = tl.reshape(tl.broadcast_to(first[:, None], (span, q1_wide)), (rows,))
    last = tl.reshape(tl.broadcast_to(last[:, None], (span, q1_wide)), (rows,))
    place = tl.reshape(tl.broadcast_to(place[:, None], (span, q1_wide)), (rows,))
    mask = tl.reshape(tl.broadcast_to(mask[:, None], (span, q1_wide)), (rows,))
    left, right = _left(
        core_1, core_2, first, middle, mask, q1, q2, r1, r2,
        q1_wide, q2_wide, r1_wide, r2_wide, rows,
    )  # fmt: skip
    product = tl.reshape(tl.dot(left, right, input_precision="ieee"), (rows, q2_wide, r2_wide))
    a, b, s = tl.arange(0, rows) % q1_wide, tl.arange(0, q2_wide), tl.arange(0, r2_wide)
    inside = (mask & (a < q1))[:, None] & (b < q2)[None]
    to = place[:, None] * (q1 * q2 * q3) + (a[:, None] * q2 + b[None]) * q3
    for c in range(q3):
        offset = last[:, None] * (r2 * q3) + s[None] * q3 + c
        slice_ = tl.load(core_3 + offset, mask=mask[:, None] & (s < r2)[None], other=0.0)
        values = tl.sum(product * slice_[:, None, :], axis=2)
        if pooled:
            tl.atomic_add(made + to + c, values, mask=inside)
        else:
            tl.store(made + to + c, values, mask=inside)


@triton.jit
def _backward(
    core_1, core_2, core_3, grad, grad_1, grad_2, grad_3, counts, order, ids, bag, padding,
    p2, p3, q1, q2, q3, r1, r2,
    p2_wide: tl.constexpr, q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr,
    r2_wide: tl.constexpr, span: tl.constexpr, pooled: tl.constexpr,
):  # fmt: skip
    rows: tl.constexpr = q1_wide * span
    middle, first, last, place, mask = _chunk(
        counts, order, ids, bag, tl.program_id(0), p2, p3, padding, p2_wide, span, pooled
    )
    s = tl.arange(0, r2_wide)
    # Per id, since the gradient of a last slice is a sum over an id's rows.
    last_to = last[:, None] * (r2 * q3) + s[None] * q3
    last_inside = mask[:, None] & (s < r2)[None]
    first = tl.reshape(tl.broadcast_to(first[:, None], (span, q1_wide)), (rows,))
    last = tl.reshape(tl.broadcast_to(last[:, None], (span, q1_wide)), (rows,))
    place = tl.reshape(tl.broadcast_to(place[:, None], (span, q1_wide)), (rows,))
    mask = tl.reshape(tl.broadcast_to(mask[:, None], (span, q1_wide)), (rows,))
    left, right = _left(
        core_1, core_2, first, middle, mask, q1, q2, r1, r2,
        q1_wide, q2_wide, r1_wide, r2_wide, rows,
    )  # fmt: skip
    product = tl.reshape(tl.dot(left, right, input_precision="ieee"), (rows, q2_wide, r2_wide))
    a, b = tl.arange(0, rows) % q1_wide, tl.arange(0, q2_wide)
    inside = (mask & (a < q1))[:, None] & (b < q2)[None]
    at = place[:, None] * (q1 * q2 * q3) + (a[:, None] * q2 + b[None]) * q3
    product_grad = tl.zeros([rows, q2_wide, r2_wide], tl.float32)
    for c in range(q3):
        column = tl.load(grad + at + c, mask=inside, other=0.0)
        offset = last[:, None] * (r2 * q3) + s[None] * q3 + c
        slice_ = tl.load(core_3 + offset, mask=mask[:, None] & (s < r2)[None], other=0.0)
        product_grad += column[:, :, None] * slice_[:, None, :]
        to_last = tl.sum(
            tl.reshape(tl.sum(product * column[:, :, None], axis=1), (span, q1_wide, r2_wide)), 1
        )
        tl.atomic_add(grad_3 + last_to + c, to_last, mask=last_inside)
    flat = tl.reshape(product_grad, (rows, q2_wide * r2_wide))
    k = tl.arange(0, r1_wide)
    column_b, column_s = (
        tl.arange(0, q2_wide * r2_wide) // r2_wide,
        tl.arange(0, q2_wide * r2_wide) % r2_wide,
    )
    to_middle = tl.dot(tl.trans(left), flat, input_precision="ieee")
    middle_inside = (k < r1)[:, None] & ((column_b < q2) & (column_s < r2))[None]
    column = k[:, None] * (q2 * r2) + (column_b * r2 + column_s)[None]
    tl.atomic_add(grad_2 + middle * r1 * q2 * r2 + column, to_middle, mask=middle_inside)
    to_first = tl.dot(flat, tl.trans(right), input_precision="ieee")
    first_inside = (mask & (a < q1))[:, None] & (k < r1)[None]
    tl.atomic_add(grad_1 + (first * q1 + a)[:, None] * r1 + k[None], to_first, mask=first_inside)


def runs(cores: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels support these cores: 2 or 3, float32, of limited size."""
    if len(cores) not in (2, 3) or cores[0].dtype is not torch.float32:
        return False
    sizes = _sizes(of_three(cores))
    numbers = sizes["r1_wide"] * sizes["q2_wide"] * sizes["r2_wide"]
    return numbers <= _MAX_NUMBERS and sizes["p2_wide"] <= _MAX_SLICES


def rows_of(cores: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return rows of cores that `runs` accepts: [n, q_1 ... q_d], differentiable.

    Raises:
        IndexError: an id is out of range.
    """
    rows: torch.Tensor = _Rows.apply(ids, None, len(ids), -1, None, *of_three(cores))
    return rows


def sums_of(
    cores: Sequence[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    bags: int,
    padding: int,
    rows: int,
) -> torch.Tensor | None:
    """Return sums of bags of cores that `runs` accepts: [bags, q_1 ... q_d], differentiable.

    Args:
        offsets: int64 [bags], or one more; None for bags of equal size.
        padding: an id to ignore.
        rows: exclusive limit of ids.

    Returns:
        None if an id is out of range or offsets decrease; `bags.check` then locates the fault.
    """
    if offsets is None and bags != len(ids):
        offsets = torch.arange(bags, device=ids.device) * (len(ids) // max(bags, 1))
    try:
        pooled: torch.Tensor = _Rows.apply(ids, offsets, bags, padding, rows, *of_three(cores))
    except IndexError:
        return None
    return pooled


def _sizes(cores: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the kernels' arguments for these cores; tile sizes are powers of two."""
    first, second, third = (core.shape for core in cores)
    wide = {
        "p2_wide": triton.next_power_of_2(second[0]),
        "q1_wide": triton.next_power_of_2(first[2]),
        "q2_wide": triton.next_power_of_2(second[2]),
        "r1_wide": max(triton.next_power_of_2(second[1]), _MIN_TILE),
        "r2_wide": max(triton.next_power_of_2(third[1]), _MIN_TILE),
    }
    return {
        "p2": second[0], "p3": third[0], "q1": first[2], "q2": second[2], "q3": third[2],
        "r1": second[1], "r2": third[1], **wide, "span": max(_CHUNK_ROWS // wide["q1_wide"], 1),
        "num_warps": _WARPS,
    }  # fmt: skip


def _order(
    ids: torch.Tensor, offsets: torch.Tensor | None, bags: int, rows: int, p2: int, p3: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return counts of ids by slice [p2 + 1], ids sorted by slice [n], and their bags [n].

    Synchronizes with the device once, for the check.

    Raises:
        IndexError: an id or an offset is invalid.
    """
    n, pooled = len(ids), offsets is not None
    counts = torch.zeros(p2 + 1, dtype=torch.int32, device=ids.device)
    order, rank, bag = torch.empty(3, n, dtype=torch.int32, device=ids.device)
    offset_count = len(offsets) if offsets is not None else 0
    _count[(triton.cdiv(max(n, offset_count, 1), _BLOCK),)](
        ids, ids if offsets is None else offsets, counts, rank, bag, n, offset_count, bags, rows,
        p2, p3, pooled=pooled, halvings=max(bags - 1, 1).bit_length(), block=_BLOCK,
    )  # fmt: skip
    if int(counts[p2]):
        raise IndexError("an id or an offset is out of range")
    until = torch.cumsum(counts, 0)
    _place[(triton.cdiv(n, _BLOCK),)](ids, counts, until, rank, order, n, p2, p3, block=_BLOCK)
    return counts, order, bag


class _Rows(torch.autograd.Function):
    """Rows or sums of bags; the backward pass recomputes partial products."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, offsets: torch.Tensor | None, bags: int, padding: int,
        rows: int | None, *cores: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = _sizes(cores)
        p2, p3 = sizes["p2"], sizes["p3"]
        width = sizes["q1"] * sizes["q2"] * sizes["q3"]
        rows = len(cores[0]) * p2 * p3 if rows is None else rows
        pooled = cores[0].new_zeros(bags, width)
        counts, order, bag = ids, ids, ids
        if len(ids) and bags:
            with torch.cuda.device_of(pooled):
                counts, order, bag = _order(ids, offsets, bags, rows, p2, p3)
                _forward[(_programs(ids, sizes),)](
                    *cores, pooled, counts, order, ids, bag, padding, **sizes,
                    pooled=offsets is not None,
                )  # fmt: skip
        ctx.save_for_backward(counts, order, ids, bag, *cores)
        ctx.padding, ctx.pooled = padding, offsets is not None
        return pooled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts, order, ids, bag, *cores = ctx.saved_tensors
        sizes = _sizes(cores)
        flat = cores[0].new_zeros(sum(core.numel() for core in cores))
        parts = flat.split([core.numel() for core in cores])
        grads = [part.view_as(core) for part, core in zip(parts, cores, strict=True)]
        if len(ids) and grad.numel():
            arguments = counts, order, ids, bag, ctx.padding
            with torch.cuda.device_of(flat):
                _backward[(_programs(ids, sizes),)](
                    *cores, grad.contiguous(), *grads, *arguments, **sizes, pooled=ctx.pooled
                )
        return (*[None] * 5, *grads)


def _programs(ids: torch.Tensor, sizes: dict[str, int]) -> int:
    return -(-len(ids) // sizes["span"]) + sizes["p2"]
