"""Convert real factors to integers, with exactly the rounding of TensorFlow Lite."""

from __future__ import annotations

import math

from slipstream.ship.errors import UnsupportedModelError

# Integer bits of differences in an int8 softmax, of 31 bits.
_SOFTMAX_BITS = 5


def fixed_multiplier(real: float) -> tuple[int, int]:
    """Return (multiplier, shift): real is multiplier * 2^(shift - 31), multiplier in [2^30, 2^31).

    Values below 2^-31 become 0; negative and infinite ones raise UnsupportedModelError.
    """
    if not 0.0 <= real < math.inf:
        raise UnsupportedModelError(f"scales with quotient {real:g}")
    if real == 0.0:
        return 0, 0
    mantissa, shift = math.frexp(real)
    # Round half away from zero, as C does; Python rounds half to even.
    multiplier = math.floor(mantissa * 2**31 + 0.5)
    if multiplier == 2**31:
        multiplier, shift = multiplier // 2, shift + 1
    if shift < -31:
        return 0, 0
    if shift > 30:
        return 2**31 - 1, 30
    return multiplier, shift


def softmax_scaling(beta: float, scale: float) -> tuple[int, int, int]:
    """Return (multiplier, left shift, least difference) of an int8 softmax.

    Inputs further below the largest than the least difference do not contribute.
    """
    real = min(beta * scale * 2 ** (31 - _SOFTMAX_BITS), 2.0**31 - 1)
    multiplier, shift = fixed_multiplier(real)
    radius = (2**_SOFTMAX_BITS - 1) * 2 ** (31 - _SOFTMAX_BITS) / 2**shift
    return multiplier, shift, -math.floor(radius)
