"""Distances on a CUDA device, in Triton; imported only when needed.

A program handles one row of B and a tile of queries. The tile is dense, [columns, queries], so that
an entry of the row meets its column of all queries in one cache line: no look-up, no atomic
addition, one order of summation. As in `slipstream.sparse.metrics`, only shared columns are summed.

Kernels have no annotations, which Triton would compile. Numbers of operations are those of `Op`,
`Finish`, `Root` and `Exact`; `constants` holds c0, c1, c2, c3, power, columns and near_zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power(x, p):
    return tl.where(x > 0, tl.exp(p * tl.log(tl.where(x > 0, x, 1.0))), 0.0)


@triton.jit
def _entropy(x):
    return tl.where(x > 0, x * tl.log(tl.where(x > 0, x, 1.0)), 0.0)


@triton.jit
def _relative(x, y):
    positive = (x > 0) & (y > 0)
    ratio = tl.where(positive, x, 1.0) / tl.where(positive, y, 1.0)
    return tl.where(positive, x * tl.log(ratio), tl.where(x > 0, float("inf"), 0.0))


@triton.jit
def _common(x, y):
    same_sign = ((x > 0) & (y > 0)) | ((x < 0) & (y < 0))
    return tl.where(same_sign, tl.minimum(tl.abs(x), tl.abs(y)), 0.0)


@triton.jit
def _term(x, b, p, op: tl.constexpr):
    """Return the contribution of a shared column; 0 if the query lacks it and x is 0."""
    if op == 0:
        return x * b
    if op == 1:
        return tl.minimum(x, b)
    if op == 2:
        return _common(x, b)
    if op == 4:
        term = -1.0 - (x == b).to(x.dtype)
    elif op == 5:
        term = _power(tl.abs(x - b), p) - (_power(tl.abs(x), p) + _power(tl.abs(b), p))
    elif op == 6:
        term = _entropy(x) + _entropy(b) - _entropy(x + b)
    else:
        size = tl.abs(x) + tl.abs(b)
        term = -1.0 - 2.0 * _common(x, b) / tl.where(size > 0, size, 1.0)
    return tl.where(x != 0, term, 0.0)


@triton.jit
def _root(x, p, root: tl.constexpr):
    if root == 1:
        x = tl.sqrt(x)
    elif root == 2:
        x = _power(x, 1.0 / p)
    return x


@triton.jit
def distances(
    out, cancelled, starts, columns, values, values2, dense, dense2, u, u1, u2, v, constants,
    queries, rows, width, stride, channels: tl.constexpr, op: tl.constexpr, op2: tl.constexpr,
    finish: tl.constexpr, root: tl.constexpr, tile: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Write distances of a query tile to one row, out[query, row], and flags of cancelled sums."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64)
    query, entry = tl.arange(0, tile), tl.arange(0, chunk)
    c0, c1, c2 = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    p, near = tl.load(constants + 4), tl.load(constants + 6)
    s = tl.zeros([chunk, tile], p.dtype)
    t = tl.zeros([chunk, tile], p.dtype)
    end = tl.load(starts + row + 1)
    for at in range(tl.load(starts + row), end, chunk):
        present = at + entry < end
        column = tl.load(columns + at + entry, mask=present, other=0).to(tl.int64)
        place = (first * width + column)[:, None] * tile + query[None, :]
        b = tl.load(values + at + entry, mask=present, other=0.0)[:, None]
        x = tl.load(dense + place, mask=present[:, None], other=0.0)
        s += _term(x, b, p, op)
        if channels == 2:
            b = tl.load(values2 + at + entry, mask=present, other=0.0)[:, None]
            x = tl.load(dense2 + place, mask=present[:, None], other=0.0)
            t += _term(x, b, p, op2)
    s, t = tl.sum(s, axis=0), tl.sum(t, axis=0)
    if channels == 1:
        t = s
    number = first * tile + query
    valid = number < queries
    a = tl.load(u + number, mask=valid, other=0.0)
    b = tl.zeros_like(a) + tl.load(v + row)
    again = valid & (number < 0)
    if finish == 0:
        x = c0 + c1 * s + c2 * t
    elif finish == 1:
        x = a + b + c1 * s
        again = x < near * (a + b)
        x = _root(tl.maximum(x, 0.0) * c0, p, root)
    elif finish == 2:
        larger = tl.maximum(a, b)
        again = larger - s < near * larger
        x = tl.maximum(larger - s, 0.0)
    elif finish == 3:
        above, below = a + b + c1 * s, a + b + c2 * t
        again = (above < near * (a + b)) | (below < near * (a + b))
        x = tl.where(below != 0, tl.maximum(above, 0.0) / tl.where(below != 0, below, 1.0), 0.0)
    elif finish == 4:
        x = 1.0 + a * b - s
        again = x < near * (1.0 + tl.abs(a * b))
        # A row without variance has no distance: NaN is kept.
        x = tl.where(x < 0, 0.0, x)
    else:
        x = a + b - s
        outside = t < tl.load(u2 + number, mask=valid, other=0.0)
        again = (outside == 0) & (tl.abs(x) < near * tl.load(u1 + number, mask=valid, other=0.0))
        x = tl.where(outside, float("inf"), x)
    tl.store(out + number * stride + row, x, mask=valid)
    tl.store(cancelled + number * rows + row, again.to(tl.int8), mask=valid)


@triton.jit
def _difference(x, y, c3, p, shift, exact: tl.constexpr):
    """Return the contribution of a column of either row to a distance that is recomputed."""
    if exact == 2:
        return (x - y) * (x - y)
    if exact == 3:
        return _power(tl.abs(x - y), p)
    if exact == 4:
        size = tl.abs(x) + tl.abs(y)
        return tl.abs(x - y) / tl.where(size > 0, size, 1.0)
    if exact == 5:
        return _relative(x, (x + y) / 2) + _relative(y, (x + y) / 2)
    if exact == 6:
        return _relative(x + c3, y + c3)
    if exact == 7:
        return (x - y - shift) * (x - y - shift)
    return tl.abs(x - y)


@triton.jit
def _find(columns, begin, end, targets, steps):
    """Return the first places in ``begin <= place < end`` with columns not below `targets`."""
    low = tl.zeros_like(targets).to(tl.int64) + begin
    high = tl.zeros_like(low) + end
    for _ in range(steps):
        open_ = low < high
        middle = (low + high) // 2
        below = tl.load(columns + middle, mask=open_, other=0) < targets
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


@triton.jit
def again(
    out, pairs, stride, a_starts, a_columns, a_values, b_starts, b_columns, b_values, u1, v,
    constants, steps, exact: tl.constexpr, finish: tl.constexpr, root: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """Recompute the distance of a pair whose sums cancelled, from both rows and in float64."""
    i = tl.load(pairs + tl.program_id(0) * 2)
    j = tl.load(pairs + tl.program_id(0) * 2 + 1)
    c0, c3 = tl.load(constants), tl.load(constants + 3)
    p, width = tl.load(constants + 4), tl.load(constants + 5)
    shift = tl.load(u1 + i).to(tl.float64) - tl.load(v + j).to(tl.float64)
    a_begin, a_end = tl.load(a_starts + i), tl.load(a_starts + i + 1)
    b_begin, b_end = tl.load(b_starts + j), tl.load(b_starts + j + 1)
    entry = tl.arange(0, chunk)
    total = tl.zeros([chunk], tl.float64)
    below = tl.zeros([chunk], tl.float64)
    shared = tl.zeros([chunk], tl.float64)
    for at in range(a_begin, a_end, chunk):
        present = at + entry < a_end
        column = tl.load(a_columns + at + entry, mask=present, other=0)
        x = tl.load(a_values + at + entry, mask=present, other=0.0).to(tl.float64)
        place = _find(b_columns, b_begin, b_end, column, steps)
        both = present & (place < b_end)
        both = both & (tl.load(b_columns + place, mask=both, other=-1) == column)
        y = tl.load(b_values + place, mask=both, other=0.0).to(tl.float64)
        total += tl.where(present, _difference(x, y, c3, p, shift, exact), 0.0)
        shared += both.to(tl.float64)
        if exact == 8:
            below += tl.where(present, tl.maximum(x, y), 0.0)
        if exact == 9:
            below += tl.where(present, tl.abs(x + y), 0.0)
    for at in range(b_begin, b_end, chunk):
        present = at + entry < b_end
        column = tl.load(b_columns + at + entry, mask=present, other=0)
        y = tl.load(b_values + at + entry, mask=present, other=0.0).to(tl.float64)
        place = _find(a_columns, a_begin, a_end, column, steps)
        both = present & (place < a_end)
        both = both & (tl.load(a_columns + place, mask=both, other=-1) == column)
        alone = present & (both == 0)
        x = tl.zeros_like(y)
        total += tl.where(alone, _difference(x, y, c3, p, shift, exact), 0.0)
        if exact >= 8:
            below += tl.where(alone, tl.abs(y), 0.0)
    x = tl.sum(total, axis=0)
    if exact == 2:
        x = c3 * x
    if exact == 7:
        union = (a_end - a_begin + b_end - b_begin).to(tl.float64) - tl.sum(shared, axis=0)
        x = 0.5 * (x + (width - union) * shift * shift)
    if exact >= 8:
        under = tl.sum(below, axis=0)
        far = tl.where(x > 0, float("inf"), 0.0)
        x = tl.where(under > 0, x / tl.where(under > 0, under, 1.0), far)
    if finish == 1:
        x = _root(x * c0, p, root)
    tl.store(out + i * stride + j, x)
