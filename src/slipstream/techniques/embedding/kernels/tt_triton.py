"""Rows of tensor trains on a CUDA device; imported only where Triton is installed.

As in ``native/src/tt/``, ids with the same slice of the middle core share one matrix product. Ids
are sorted by that slice and cut into chunks; a program has one chunk, makes the products of the
first two cores for all its ids at once and multiplies them with each id's last slice. Backwards it
makes them again; what is added to the cores is atomic: last bits depend on the order.

Kernels have no annotations: Triton compiles those, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.techniques.embedding.kernels.tt_reference import of_three

_LEAST = 16  # rows and columns of a product that tensor cores take
_CHUNK_ROWS = 32
# With four, a program's three products backwards take more registers than a thread can have.
_WARPS = 8
_MOST_NUMBERS = 1 << 14  # of a middle slice that a program holds


@triton.jit
def _chunk(chunks, order, ids, program, p2, p3, span: tl.constexpr):
    """Of a program: its middle slice, the digits of its ids, their places, and which are there."""
    middle = tl.load(chunks + 3 * program)
    begin, end = tl.load(chunks + 3 * program + 1), tl.load(chunks + 3 * program + 2)
    at = begin + tl.arange(0, span)
    there = at < end
    place = tl.load(order + at, mask=there, other=0)
    number = tl.load(ids + place, mask=there, other=0)
    return middle, number // (p2 * p3), number % p3, place, there


@triton.jit
def _left(
    one, two, first, middle, row_there, q1, q2, r1, r2,
    q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr, r2_wide: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """Slices of the first core [rows, r1] and of the middle one [r1, q2 * r2]; zeros beyond."""
    a = tl.arange(0, rows) % q1_wide
    k = tl.arange(0, r1_wide)
    inside = (row_there & (a < q1))[:, None] & (k < r1)[None]
    left = tl.load(one + (first * q1 + a)[:, None] * r1 + k[None], mask=inside, other=0.0)
    b, s = tl.arange(0, q2_wide * r2_wide) // r2_wide, tl.arange(0, q2_wide * r2_wide) % r2_wide
    column = b * r2 + s
    inside = (k < r1)[:, None] & ((b < q2) & (s < r2))[None]
    base = two + middle * r1 * q2 * r2
    right = tl.load(base + k[:, None] * (q2 * r2) + column[None], mask=inside, other=0.0)
    return left, right


@triton.jit
def _forward(
    one, two, three, made, chunks, order, ids, p2, p3, q1, q2, q3, r1, r2,
    q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr, r2_wide: tl.constexpr,
    span: tl.constexpr,
):  # fmt: skip
    rows: tl.constexpr = q1_wide * span
    middle, first, last, place, there = _chunk(chunks, order, ids, tl.program_id(0), p2, p3, span)
    first = tl.reshape(tl.broadcast_to(first[:, None], (span, q1_wide)), (rows,))
    last = tl.reshape(tl.broadcast_to(last[:, None], (span, q1_wide)), (rows,))
    place = tl.reshape(tl.broadcast_to(place[:, None], (span, q1_wide)), (rows,))
    there = tl.reshape(tl.broadcast_to(there[:, None], (span, q1_wide)), (rows,))
    left, right = _left(
        one, two, first, middle, there, q1, q2, r1, r2, q1_wide, q2_wide, r1_wide, r2_wide, rows
    )
    product = tl.reshape(tl.dot(left, right, input_precision="ieee"), (rows, q2_wide, r2_wide))
    a, b, s = tl.arange(0, rows) % q1_wide, tl.arange(0, q2_wide), tl.arange(0, r2_wide)
    inside = (there & (a < q1))[:, None] & (b < q2)[None]
    to = place[:, None] * (q1 * q2 * q3) + (a[:, None] * q2 + b[None]) * q3
    for c in range(q3):
        offset = last[:, None] * (r2 * q3) + s[None] * q3 + c
        slice_ = tl.load(three + offset, mask=there[:, None] & (s < r2)[None], other=0.0)
        tl.store(made + to + c, tl.sum(product * slice_[:, None, :], axis=2), mask=inside)


@triton.jit
def _backward(
    one, two, three, grad, one_grad, two_grad, three_grad, chunks, order, ids,
    p2, p3, q1, q2, q3, r1, r2,
    q1_wide: tl.constexpr, q2_wide: tl.constexpr, r1_wide: tl.constexpr, r2_wide: tl.constexpr,
    span: tl.constexpr,
):  # fmt: skip
    rows: tl.constexpr = q1_wide * span
    middle, first, last, place, there = _chunk(chunks, order, ids, tl.program_id(0), p2, p3, span)
    s = tl.arange(0, r2_wide)
    # Of ids, before they are spread over rows: what the last slices get is a sum over an id's rows.
    last_to = last[:, None] * (r2 * q3) + s[None] * q3
    last_inside = there[:, None] & (s < r2)[None]
    first = tl.reshape(tl.broadcast_to(first[:, None], (span, q1_wide)), (rows,))
    last = tl.reshape(tl.broadcast_to(last[:, None], (span, q1_wide)), (rows,))
    place = tl.reshape(tl.broadcast_to(place[:, None], (span, q1_wide)), (rows,))
    there = tl.reshape(tl.broadcast_to(there[:, None], (span, q1_wide)), (rows,))
    left, right = _left(
        one, two, first, middle, there, q1, q2, r1, r2, q1_wide, q2_wide, r1_wide, r2_wide, rows
    )
    product = tl.reshape(tl.dot(left, right, input_precision="ieee"), (rows, q2_wide, r2_wide))
    a, b = tl.arange(0, rows) % q1_wide, tl.arange(0, q2_wide)
    inside = (there & (a < q1))[:, None] & (b < q2)[None]
    at = place[:, None] * (q1 * q2 * q3) + (a[:, None] * q2 + b[None]) * q3
    given = tl.zeros([rows, q2_wide, r2_wide], tl.float32)
    for c in range(q3):
        column = tl.load(grad + at + c, mask=inside, other=0.0)
        offset = last[:, None] * (r2 * q3) + s[None] * q3 + c
        slice_ = tl.load(three + offset, mask=there[:, None] & (s < r2)[None], other=0.0)
        given += column[:, :, None] * slice_[:, None, :]
        to_last = tl.sum(
            tl.reshape(tl.sum(product * column[:, :, None], axis=1), (span, q1_wide, r2_wide)), 1
        )
        tl.atomic_add(three_grad + last_to + c, to_last, mask=last_inside)
    flat = tl.reshape(given, (rows, q2_wide * r2_wide))
    k = tl.arange(0, r1_wide)
    column_b, column_s = (
        tl.arange(0, q2_wide * r2_wide) // r2_wide,
        tl.arange(0, q2_wide * r2_wide) % r2_wide,
    )
    to_middle = tl.dot(tl.trans(left), flat, input_precision="ieee")
    middle_inside = (k < r1)[:, None] & ((column_b < q2) & (column_s < r2))[None]
    column = k[:, None] * (q2 * r2) + (column_b * r2 + column_s)[None]
    tl.atomic_add(two_grad + middle * r1 * q2 * r2 + column, to_middle, mask=middle_inside)
    to_first = tl.dot(flat, tl.trans(right), input_precision="ieee")
    first_inside = (there & (a < q1))[:, None] & (k < r1)[None]
    tl.atomic_add(one_grad + (first * q1 + a)[:, None] * r1 + k[None], to_first, mask=first_inside)


def runs(cores: Sequence[torch.Tensor]) -> bool:
    """Whether a program can hold what these cores need; two cores are three of them."""
    if len(cores) not in (2, 3) or cores[0].dtype is not torch.float32:
        return False
    launch = _launch(of_three(cores))
    return launch["r1_wide"] * launch["q2_wide"] * launch["r2_wide"] <= _MOST_NUMBERS


def rows_of(cores: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """As `tt_reference.rows_of`, of cores that `runs`: [n, q_1 ... q_d], differentiable."""
    rows: torch.Tensor = _Rows.apply(ids, *of_three(cores))
    return rows


def _launch(cores: Sequence[torch.Tensor]) -> dict[str, int]:
    """Sizes of a program's products, each a power of two."""
    one, two, three = (core.shape for core in cores)
    a, b = (triton.next_power_of_2(core[2]) for core in (one, two))
    r, s = (max(triton.next_power_of_2(core[1]), _LEAST) for core in (two, three))
    return {
        "q1_wide": a,
        "q2_wide": b,
        "r1_wide": r,
        "r2_wide": s,
        "span": max(_CHUNK_ROWS // a, 1),
    }


def _chunks(
    ids: torch.Tensor, p2: int, p3: int, span: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Places of ids by middle slice, and of each program its slice and where it begins and ends.

    There are as many programs as there may be at most: the number that is needed is known on the
    device alone, and nothing here waits for it. Programs that are not needed are empty.
    """
    slice_of = (torch.div(ids, p3, rounding_mode="floor") % p2).to(torch.int32)
    middle, order = torch.sort(slice_of, stable=True)
    numbers = torch.arange(p2 + 1, dtype=torch.int32, device=ids.device)
    edges = torch.searchsorted(middle, numbers)
    needed = torch.div(edges.diff() + span - 1, span, rounding_mode="floor")
    until, most = torch.cumsum(needed, 0), -(-len(ids) // span) + p2
    program = torch.arange(most, device=ids.device)
    slices = torch.searchsorted(until, program, right=True).clamp(max=p2 - 1)
    begin = edges[slices] + (program - until[slices] + needed[slices]) * span
    begin = begin.clamp(max=len(ids))
    end = torch.minimum(begin + span, edges[slices + 1])
    return torch.stack([slices, begin, end], 1), order, most


def _sizes(cores: Sequence[torch.Tensor]) -> dict[str, int]:
    """What both kernels are told of the cores."""
    one, two, three = (core.shape for core in cores)
    return {
        "p2": two[0], "p3": three[0], "q1": one[2], "q2": two[2], "q3": three[2], "r1": two[1],
        "r2": three[1], **_launch(cores), "num_warps": _WARPS,
    }  # fmt: skip


class _Rows(torch.autograd.Function):
    """Products in between are made once more backwards."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, *cores: torch.Tensor) -> torch.Tensor:
        sizes = _sizes(cores)
        rows = cores[0].new_empty(len(ids), sizes["q1"] * sizes["q2"] * sizes["q3"])
        ids = ids.to(torch.int64)
        chunks, order, programs = _chunks(ids, sizes["p2"], sizes["p3"], sizes["span"])
        if rows.numel():
            _forward[(programs,)](*cores, rows, chunks, order, ids, **sizes)
        ctx.save_for_backward(chunks, order, ids, *cores)
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chunks, order, ids, *cores = ctx.saved_tensors
        grads = [torch.zeros_like(core) for core in cores]
        if grad.numel():
            told = chunks, order, ids
            _backward[(len(chunks),)](*cores, grad.contiguous(), *grads, *told, **_sizes(cores))
        return (None, *grads)
