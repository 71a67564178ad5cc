"""Functions for generated Triton kernels; import this module only if Triton is installed.

The names match those of the C++ prelude, so that generated statements work with both. Values are
float32, or float64 if any tensor is. Random numbers are identical to those of the operator
``slipstream::dropout``.

Kernels have no type annotations, because Triton would compile them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
_ROUNDS = tl.constexpr(7)


@triton.jit
def f_where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def f_exp(x):
    return tl.exp(x)


@triton.jit
def f_log(x):
    return tl.log(x)


@triton.jit
def f_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def f_erf(x):
    return tl.erf(x)


@triton.jit
def f_tanh(x):
    """Compute tanh from exp(-2 |x|); near 0 with a polynomial, or Kahan's method in float64."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        less = tl.where(e == 1.0, -2.0 * a, (e - 1.0) * (-2.0 * a) / tl.log(e))
        near = -less / (less + 2.0)
        near = tl.where(x < 0, -near, near)
        # If e is 1, the division by its logarithm is by 0.
        near = tl.where(e == 1.0, x, near)
    else:
        u = x * x
        p = u * 2.102294936776161e-3 - 8.130431175231934e-3
        p = p * u + 2.1680133417248726e-2
        p = p * u - 5.3942520171403885e-2
        p = p * u + 1.3333164155483246e-1
        p = p * u - 3.33333283662796e-1
        near = x * (p * u + 1.0)
    return tl.where(a < 0.63, near, far)


@triton.jit
def f_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def f_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def keep(x, factor):
    """Return the product; 0 if the factor is 0, even for an infinite x."""
    return tl.where(factor != 0, x * factor, 0.0)


@triton.jit
def _words(seed, block, top: tl.constexpr):
    """Return the four 32-bit words of Philox blocks; `top` is bit 63 of the block numbers."""
    key, upper = tl.load(seed), tl.load(seed + 1)
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32) | (top << 31)
    c2, c3 = (upper & 0xFFFFFFFF).to(tl.uint32), ((upper >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox_impl(low, high, zero + c2, zero + c3, k0, k1, _ROUNDS)


@triton.jit
def _sixteen(seed, element, top: tl.constexpr):
    """Return 16 random bits per element; a batch of 64 elements uses eight blocks."""
    place = element % 64
    half, place = place // 32, place % 32
    w0, w1, w2, w3 = _words(seed, element // 64 * 8 + place // 4, top)
    upper = place % 4 >= 2
    word = tl.where(half == 0, tl.where(upper, w1, w0), tl.where(upper, w3, w2))
    return (word >> ((place % 2) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def draw(seed, element, threshold: tl.constexpr):
    """Return 1 for retained elements, else 0, by their index in memory."""
    element = element.to(tl.int64)
    number = _sixteen(seed, element, 0)
    retained = number >= threshold // 65536
    if threshold % 65536 != 0:
        equal = number == threshold // 65536
        # One element in 65,536 needs 16 more bits; most tiles have none.
        if tl.max(equal.to(tl.int32)) != 0:
            more = _sixteen(seed, element, 1)
            retained = tl.where(equal, more >= threshold % 65536, retained)
    return tl.where(retained, 1.0, 0.0)
