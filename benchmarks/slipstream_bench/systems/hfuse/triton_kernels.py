"""Twelve Triton kernels to be fused in pairs; read as source, never imported by the package."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
EPSILON = tl.constexpr(1e-5)


@triton.jit
def _block(size: tl.constexpr):
    """Return the elements of this program's block, along the first axis."""
    return tl.program_id(0) * size + tl.arange(0, size)


@triton.jit
def _tile(rows: tl.constexpr, columns: tl.constexpr):
    """Return the rows and columns of a program with two axes."""
    row = tl.program_id(axis=0) * rows + tl.arange(0, rows)
    return row[:, None], (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]


@triton.jit
def _affine(left, right_scale, scale, right):
    return left * right_scale, scale * right_scale + right


@triton.jit
def softmax(x, y, rows, columns, block: tl.constexpr):
    """Softmax of rows, which the programs share in a strided loop."""
    column = tl.arange(0, block)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * columns + column
        value = tl.load(x + at, mask=column < columns, other=LOWEST)
        power = tl.exp(value - tl.max(value, 0))
        tl.store(y + at, power / tl.sum(power, 0), mask=column < columns)


@triton.jit
def layer_norm(x, weight, bias, y, columns, block: tl.constexpr):
    column = tl.arange(0, block)
    inside = column < columns
    at = tl.program_id(0) * columns + column
    value = tl.load(x + at, mask=inside, other=0.0)
    mean = tl.sum(value, 0) / columns
    centered = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / columns + EPSILON)
    w, b = tl.load(weight + column, mask=inside), tl.load(bias + column, mask=inside)
    tl.store(y + at, centered * scale * w + b, mask=inside)


@triton.jit
def product(a, b, c, m, n, k, tile: tl.constexpr, deep: tl.constexpr):
    """A tile of a matmul."""
    row, column = _tile(tile, tile)
    step = tl.arange(0, deep)
    total = tl.zeros((tile, tile), tl.float32)
    for start in range(0, k, deep):
        left = tl.load(a + row * k + start + step[None, :], mask=row < m, other=0.0)
        right = tl.load(b + (start + step[:, None]) * n + column, mask=column < n, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(c + row * n + column, total, mask=(row < m) & (column < n))


@triton.jit
def gather(table, index, out, width, block: tl.constexpr):
    """Rows of a table, one per program; none for the first."""
    row = tl.load(index + tl.program_id(0)).to(tl.int64)
    if row < 1:
        return
    column = tl.arange(0, block)
    value = tl.load(table + row * width + column, mask=column < width)
    tl.store(out + tl.program_id(0) * width + column, value, mask=column < width)


@triton.jit
def dropout(x, y, n, p, seed, block: tl.constexpr):
    at = _block(block)
    keep = tl.rand(seed, at) > p
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.where(keep, value / (1 - p), 0.0), mask=at < n)


@triton.jit
def row_sums(x, out, columns, block: tl.constexpr):
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        at = tl.program_id(0) * columns + column
        total += tl.load(x + at, mask=column < columns, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def histogram(x, counts, n, bins: tl.constexpr, block: tl.constexpr):
    at = _block(block)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(counts + value % bins, 1, mask=at < n)


@triton.jit
def transpose(x, y, height, width, tile: tl.constexpr):
    row, column = _tile(tile, tile)
    inside = (row < height) & (column < width)
    tl.store(y + column * height + row, tl.load(x + row * width + column, mask=inside), mask=inside)


@triton.jit
def adam(weight, gradient, first, second, n, rate, beta1, beta2, block: tl.constexpr):
    at = _block(block)
    inside = at < n
    g = tl.load(gradient + at, mask=inside)
    m = beta1 * tl.load(first + at, mask=inside) + (1 - beta1) * g
    v = beta2 * tl.load(second + at, mask=inside) + (1 - beta2) * g * g
    w = tl.load(weight + at, mask=inside)
    tl.store(weight + at, w - rate * m / (tl.sqrt(v) + 1e-8), mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)


@triton.jit
def recurrence(gate, x, y, length, block: tl.constexpr):
    """y[t] = gate[t] y[t - 1] + x[t], one sequence per program."""
    step = tl.arange(0, block)
    at = tl.program_id(0) * length + step
    a = tl.load(gate + at, mask=step < length, other=1.0)
    b = tl.load(x + at, mask=step < length, other=0.0)
    _, y_t = tl.associative_scan((a, b), 0, _affine)
    tl.store(y + at, y_t, mask=step < length)


@triton.jit
def dot(x, y, total, n, block: tl.constexpr):
    at = _block(block)
    left, right = tl.load(x + at, mask=at < n, other=0.0), tl.load(y + at, mask=at < n, other=0.0)
    tl.atomic_add(total, tl.sum(left * right, 0))


@triton.jit
def mean_pool(x, y, size, channels, block: tl.constexpr):
    """Means over the last axis; one (batch, channel, part) per program."""
    part, channel, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(axis=0)
    row = (batch * channels + channel) * parts + part
    at = tl.arange(0, block)
    total = tl.sum(tl.load(x + row * size + at, mask=at < size, other=0.0), 0)
    tl.store(y + row, total / size)
