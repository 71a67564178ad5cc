"""Tabulate functions of an int8 number with the integer arithmetic of TensorFlow Lite Micro.

Sources: gemmlowp's fixed-point functions; TensorFlow Lite's reference kernels LOGISTIC, HARD_SWISH
and LEAKY_RELU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.ship.firmware.arithmetic import fixed_multiplier
from slipstream.ship.firmware.network import Array, Quantization

_MAX32, _MAX16 = 2**31 - 1, 2**15 - 1
# Integer bits of the input of LOGISTIC.
_BITS = 4
# exp(-1/4), exp(-1/2), exp(-1), ... exp(-8), with 31 fractional bits.
_POWERS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401)


def table(function: Callable[[int], int]) -> Array:
    """Return a function's values at all codes, int8 [256], indexed by the code as unsigned byte."""
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    return np.array([np.clip(function(int(code)), -128, 127) for code in codes], np.int8)


def logistic(source: Quantization) -> Array:
    """Return LOGISTIC, whose output has scale 1/256 and zero point -128."""
    multiplier, shift = fixed_multiplier(float(source.scale) * 2 ** (31 - _BITS))
    radius = int((2**_BITS - 1) * 2 ** (31 - _BITS) / 2**shift)

    def value(code: int) -> int:
        centered = code - source.zero_point
        if abs(centered) >= radius:
            return 127 if centered > 0 else -128
        return _round_shift(_logistic(rescale(centered, multiplier, shift)), 23) - 128

    return table(value)


def hard_swish(source: Quantization, target: Quantization) -> Array:
    """Return HARD_SWISH, x * relu6(x + 3) / 6, in 16 bits."""
    fine = np.float32(1 / 128) * source.scale
    factor, shift = fixed_multiplier(float(fine / target.scale))
    ramp, ramp_shift = fixed_multiplier(float(fine / np.float32(3 / 32768)))

    def value(code: int) -> int:
        x = (code - source.zero_point) * 128
        scaled = _high_product16(x, _short(factor))
        if ramp_shift > 0:
            gate = _high_product16(_saturate16(x << (ramp_shift - 1)), _short(ramp))
            gate = _saturate16(gate << 1)
        else:
            gate = _round_shift(_high_product16(x, _short(ramp)), -ramp_shift)
        gate = (gate + 2**15) >> 1
        # Truncate towards zero, as in C.
        product = gate * scaled
        product = abs(product) // 2**15 * (1 if product >= 0 else -1)
        return _round_shift(product, -shift) + target.zero_point

    return table(value)


def leaky_relu(source: Quantization, target: Quantization, alpha: float) -> Array:
    """Return LEAKY_RELU: x, and `alpha` times x if x is negative."""
    identity = fixed_multiplier(float(source.scale / target.scale))
    slope = fixed_multiplier(float(source.scale * np.float32(alpha) / target.scale))

    def value(code: int) -> int:
        centered = code - source.zero_point
        return rescale(centered, *(identity if centered >= 0 else slope)) + target.zero_point

    return table(value)


def rescale(value: int, multiplier: int, shift: int) -> int:
    """Return value * multiplier * 2^shift / 2^31, rounded twice, as `slip_rescale` does."""
    shifted = value << max(shift, 0)
    return _round_shift(_high_product(shifted, multiplier), max(-shift, 0))


def _high_product(a: int, b: int) -> int:
    return min((a * b + (1 << 30)) >> 31, _MAX32)


def _round_shift(value: int, bits: int) -> int:
    """Return value / 2^bits, rounded half away from zero."""
    mask = (1 << bits) - 1
    return (value >> bits) + int((value & mask) > (mask >> 1) + (value < 0))


def _saturate32(value: int) -> int:
    return max(-(2**31), min(_MAX32, value))


def _saturate16(value: int) -> int:
    return max(-(2**15), min(_MAX16, value))


def _high_product16(a: int, b: int) -> int:
    product = a * b
    nudged = product + (1 << 14 if product >= 0 else 1 - (1 << 14))
    return _saturate16(abs(nudged) // 2**15 * (1 if nudged >= 0 else -1))


def _short(multiplier: int) -> int:
    """Return a 32-bit multiplier as a 16-bit one."""
    return _MAX16 if multiplier >= _MAX32 - 2**15 else (multiplier + 2**15) >> 16


def _logistic(x: int) -> int:
    """Return 1 / (1 + exp(-x)), for 4 integer bits of x, with none in the result."""
    if x == 0:
        return 1 << 30
    positive = _reciprocal(_exp_negative(-abs(x)))
    return positive if x > 0 else _MAX32 - positive


def _exp_negative(x: int) -> int:
    if x == 0:
        return _MAX32
    fraction = 31 - _BITS
    quarter = 1 << (fraction - 2)
    small = (x & (quarter - 1)) - quarter
    result = _exp_small(_saturate32(small << _BITS))
    for bit, power in enumerate(_POWERS):
        if (small - x) & (1 << (fraction - 2 + bit)):
            result = _high_product(result, power)
    return result


def _exp_small(x: int) -> int:
    """Return exp(x) for x in [-1/4, 0), by a Taylor series around -1/8."""
    x += 1 << 28
    x2 = _high_product(x, x)
    x3, x4 = _high_product(x2, x), _round_shift(_high_product(x2, x2), 2)
    tail = _round_shift(_high_product(x4 + x3, 715827883) + x2, 1)
    return 1895147668 + _high_product(1895147668, x + tail)


def _reciprocal(x: int) -> int:
    """Return 1 / (1 + x), by Newton's method."""
    half = (x + _MAX32 + 1) // 2
    estimate = 1515870810 + _high_product(half, -1010580540)
    for _ in range(3):
        error = (1 << 29) - _high_product(half, estimate)
        estimate += _saturate32(_high_product(estimate, error) << 2)
    return _saturate32(estimate << 1)
