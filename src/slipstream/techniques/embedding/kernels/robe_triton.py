"""Triton kernels of ``slipstream::robe`` for CUDA devices; imported only if Triton is installed.

Implements ``native/src/robe/hash.h`` element by element: a program has one bag and some columns,
and hashes the positions of its numbers in both passes, so that no index is stored. The array's
gradient is summed atomically: the last bits of numbers shared by bags depend on the order.

Kernels have no annotations, since Triton would compile them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_SUM, _MEAN, _MAX = range(3)
_WIDEST = 1024


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _bag(tables, edges, columns, bags, width):
    """Return table, ids and columns of this program's bag, and the position of its result."""
    bag = tl.program_id(0).to(tl.int64)
    table = bag // bags
    key = tl.load(tables + table * 4)
    dim = tl.load(tables + table * 4 + 2)
    padding = tl.load(tables + table * 4 + 3)
    to = (bag % bags) * width + tl.load(columns + table)
    return key, dim, padding, tl.load(edges + bag), tl.load(edges + bag + 1), to


@triton.jit
def _places(key, row, element, dim, size, block, signed):
    """Return the positions of a row's elements in the array, and their signs."""
    shared = block > dim
    position = tl.where(shared, row * dim + element, element)
    number = position // block
    salt = tl.where(shared, 0, row).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    key = key.to(tl.uint64, bitcast=True)
    hashed = _mix(key + salt + number.to(tl.uint64, bitcast=True) * 0xC2B2AE3D27D4EB4F)
    wide = tl.zeros_like(hashed) + size.to(tl.uint64)
    place = tl.umulhi(hashed, wide).to(tl.int64, bitcast=True) + (position - number * block)
    place = tl.where(place >= size, place - size, place)
    sign = tl.full(element.shape, 1.0, tl.float32)
    if signed:
        word = (element // 64).to(tl.uint64, bitcast=True) * 0xC2B2AE3D27D4EB4F
        word += row.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
        bits = _mix((key ^ 0xD6E8FEB86659FD93) + word)
        odd = (bits >> (element % 64).to(tl.uint64, bitcast=True)) & 1
        sign = tl.where(odd == 1, -1.0, 1.0)
    return place, sign


@triton.jit
def _forward(
    array, made, ids, weights, tables, edges, columns,
    size, bags, width, block,
    signed: tl.constexpr, mode: tl.constexpr, weighted: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    key, dim, padding, begin, end, to = _bag(tables, edges, columns, bags, width)
    element = tl.program_id(1) * span + tl.arange(0, span).to(tl.int64)
    inside = element < dim
    total = tl.full([span], float("-inf") if mode == 2 else 0.0, tl.float32)
    count = 0
    for at in range(begin, end):
        row = tl.load(ids + at).to(tl.int64)
        if row != padding:
            place, sign = _places(key, row, element, dim, size, block, signed)
            number = tl.load(array + place, mask=inside, other=0.0) * sign
            if weighted:
                number *= tl.load(weights + at)
            total = tl.maximum(total, number) if mode == 2 else total + number
            count += 1
    if mode == 1:
        total = total / tl.maximum(count, 1).to(tl.float32)
    if mode == 2:
        total = tl.where(count > 0, total, 0.0)
    tl.store(made + to + element, total, mask=inside)


@triton.jit
def _backward(
    grad, array, made, gradient,
    ids, weights, tables, edges, columns,
    size, bags, width, block, scale,
    signed: tl.constexpr, mode: tl.constexpr, weighted: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    key, dim, padding, begin, end, to = _bag(tables, edges, columns, bags, width)
    element = tl.program_id(1) * span + tl.arange(0, span).to(tl.int64)
    inside = element < dim
    upstream = tl.load(grad + to + element, mask=inside, other=0.0) * scale
    if mode == 1:
        count = 0
        for at in range(begin, end):
            count += (tl.load(ids + at).to(tl.int64) != padding).to(tl.int32)
        upstream = upstream / tl.maximum(count, 1).to(tl.float32)
    if mode == 2:
        largest = tl.load(made + to + element, mask=inside, other=0.0)
    waiting = inside
    for at in range(begin, end):
        row = tl.load(ids + at).to(tl.int64)
        if row != padding:
            place, sign = _places(key, row, element, dim, size, block, signed)
            part = upstream * sign
            if weighted:
                part *= tl.load(weights + at)
            if mode == 2:
                # The first id of the bag with the maximum, as on the CPU.
                number = tl.load(array + place, mask=inside, other=0.0) * sign
                first = waiting & (number == largest)
                tl.atomic_add(gradient + place, part, mask=first)
                waiting = waiting & (number != largest)
            else:
                tl.atomic_add(gradient + place, part, mask=inside)


@triton.jit
def _weights(
    grad, array, gradient, ids, tables, edges, columns,
    size, bags, width, block, signed: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    key, dim, padding, begin, end, to = _bag(tables, edges, columns, bags, width)
    for at in range(begin, end):
        row = tl.load(ids + at).to(tl.int64)
        total = tl.zeros([span], tl.float32)
        if row != padding:
            for first in range(0, dim, span):
                element = first + tl.arange(0, span).to(tl.int64)
                inside = element < dim
                place, sign = _places(key, row, element, dim, size, block, signed)
                number = tl.load(array + place, mask=inside, other=0.0) * sign
                total += number * tl.load(grad + to + element, mask=inside, other=0.0)
        tl.store(gradient + at, tl.sum(total, axis=0))


def _edges(
    ids: torch.Tensor, offsets: torch.Tensor | None, tables: torch.Tensor, bags: int
) -> torch.Tensor:
    """Return the first id of every bag of all tables, and the end: int64 [tables * bags + 1]."""
    total = len(tables) * bags
    if offsets is None:
        each = ids.numel() // max(total, 1)
        return torch.arange(total + 1, device=ids.device) * each
    if offsets.numel() == total + 1:
        return offsets
    return torch.cat([offsets, offsets.new_full((1,), ids.numel())])


def _described(array: torch.Tensor, how: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
    """Return the common arguments of the kernels, and the width of the widest table."""
    ids, offsets, _, tables, bags, width, block, sign, _ = how
    dims = tables[:, 2]
    columns = torch.cumsum(dims, 0) - dims
    arguments = {
        "ids": ids, "tables": tables.to(array.device), "edges": _edges(ids, offsets, tables, bags),
        "columns": columns.to(array.device), "size": array.numel(), "bags": bags, "width": width,
        "block": block, "signed": bool(sign),
    }  # fmt: skip
    return arguments, int(dims.max())


def _launch(widest: int) -> dict[str, int]:
    span = min(triton.next_power_of_2(widest), _WIDEST)
    return {"span": span, "num_warps": max(1, min(4, span // 64))}


def forward(array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Compute ``slipstream::robe`` of checked float32 arguments, on the array's device."""
    weights, tables, bags, width, mode = how[2], how[3], how[4], how[5], how[8]
    pooled = array.new_empty(bags, width)
    if pooled.numel():
        arguments, widest = _described(array, how)
        launch = _launch(widest)
        with torch.cuda.device_of(array):
            _forward[len(tables) * bags, triton.cdiv(widest, launch["span"])](
                array, pooled, weights=array if weights is None else weights, **arguments,
                mode=mode, weighted=weights is not None, **launch,
            )  # fmt: skip
    return pooled


def backward(
    grad: torch.Tensor, array: torch.Tensor, made: torch.Tensor | None, *how: Any, scale: float
) -> torch.Tensor:
    """Compute ``slipstream::robe.gradient``: [array.numel()]."""
    weights, tables, bags, mode = how[2], how[3], how[4], how[8]
    gradient = torch.zeros_like(array)
    if grad.numel():
        arguments, widest = _described(array, how)
        launch = _launch(widest)
        with torch.cuda.device_of(array):
            _backward[len(tables) * bags, triton.cdiv(widest, launch["span"])](
                grad, array, grad if made is None else made, gradient,
                weights=array if weights is None else weights, **arguments, scale=scale, mode=mode,
                weighted=weights is not None, **launch,
            )  # fmt: skip
    return gradient


def weight_gradient(grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Compute ``slipstream::robe.weights``: [ids]."""
    ids, tables, bags = how[0], how[3], how[4]
    gradient = array.new_zeros(ids.numel())
    if grad.numel() and ids.numel():
        arguments, widest = _described(array, how)
        with torch.cuda.device_of(array):
            _weights[(len(tables) * bags,)](grad, array, gradient, **arguments, **_launch(widest))
    return gradient
