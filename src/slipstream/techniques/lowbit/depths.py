"""How many products may be added before a lane overflows: the bounds every scheme rests on.

Values are unsigned, below ``2**bits``. Source of the two packing schemes and of their table: Won et
al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD Hardware", MLSys 2022.
"""

from __future__ import annotations


def low_half_depth(weight_bits: int, activation_bits: int) -> int:
    """Products of packed pairs that ULPPACK's first scheme may add in a 16-bit lane; 0: none.

    Two values a side, eight bits apart; the lane's low half must hold twice a product for each.
    """
    return 255 // (2 * _largest_product(weight_bits, activation_bits))


def widened_depth(weight_bits: int, activation_bits: int) -> int:
    """The same for its second scheme: 16-bit operands, 32-bit lanes; 0: none.

    The second value of an operand begins at bit ``16 - max(weight_bits, activation_bits)``, and so
    does the sum of interest.
    """
    stride = 16 - max(weight_bits, activation_bits)
    return int((2**stride - 1) // (2 * _largest_product(weight_bits, activation_bits)))


def published(depth: int) -> int:
    """The kernel variant the paper's code takes for `depth`: 8, 4, 2, 1 or 0."""
    return next((variant for variant in (8, 4, 2, 1) if variant <= depth), 0)


def deferred_depth(weight_bits: int, activation_bits: int) -> int:
    """Sums of two products of bytes that a signed 16-bit lane holds, weights 0 .. 2**bits-1."""
    return 32767 // (2 * _largest_product(weight_bits, activation_bits))


def centred_depth(weight_bits: int, activation_bits: int) -> int:
    """`deferred_depth` with ``2**(bits-1)`` taken off the weights, which nearly doubles it."""
    return int(32767 // (2 * 2 ** (weight_bits - 1) * (2**activation_bits - 1)))


def table_depth(activation_bits: int) -> int:
    """Look-ups in a table of sums of four activations that an unsigned byte holds; 0: none."""
    return int(255 // (4 * (2**activation_bits - 1)))


def longest_sum(weight_bits: int, activation_bits: int) -> int:
    """Products that a signed 32-bit sum holds."""
    return (2**31 - 1) // _largest_product(weight_bits, activation_bits)


def _largest_product(weight_bits: int, activation_bits: int) -> int:
    return int((2**weight_bits - 1) * (2**activation_bits - 1))
