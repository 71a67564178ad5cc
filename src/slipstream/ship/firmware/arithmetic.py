"""Real factors as integers, rounded as TensorFlow Lite rounds them: a bit more or less is another
answer."""

from __future__ import annotations

import math

from slipstream.ship.errors import UnsupportedModelError

# What an int8 softmax works with: bits before the point of differences, in 31 bits.
_SOFTMAX_BITS = 5


def fixed_multiplier(real: float) -> tuple[int, int]:
    """(multiplier, shift): real is multiplier * 2^(shift - 31), the multiplier in [2^30, 2^31).

    Args:
        real: at least 0; what is below 2^-31 becomes 0.

    Raises:
        UnsupportedModelError: it is negative, infinite or not a number.
    """
    if not 0.0 <= real < math.inf:
        raise UnsupportedModelError(f"scales with the quotient {real:g}")
    if real == 0.0:
        return 0, 0
    mantissa, shift = math.frexp(real)
    # Half away from zero, as C's round; Python's goes to the even number.
    multiplier = math.floor(mantissa * 2**31 + 0.5)
    if multiplier == 2**31:
        multiplier, shift = multiplier // 2, shift + 1
    if shift < -31:
        return 0, 0
    if shift > 30:
        return 2**31 - 1, 30
    return multiplier, shift


def softmax_scaling(beta: float, scale: float) -> tuple[int, int, int]:
    """(multiplier, left shift, least difference) of an int8 softmax.

    What is further below the largest than the least difference counts for nothing.
    """
    real = min(beta * scale * 2 ** (31 - _SOFTMAX_BITS), 2.0**31 - 1)
    multiplier, shift = fixed_multiplier(real)
    radius = (2**_SOFTMAX_BITS - 1) * 2 ** (31 - _SOFTMAX_BITS) / 2**shift
    return multiplier, shift, -math.floor(radius)
