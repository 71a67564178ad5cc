"""Depths are the most that fits: one product more overflows, and the published table follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from slipstream.techniques.lowbit.depths import (
    centred_depth,
    deferred_depth,
    longest_sum,
    low_half_depth,
    published,
    table_depth,
    widened_depth,
)

PAIRS = list(itertools.product(range(1, 8), range(1, 9)))


def low_half(w: int, a: int, count: int) -> int:
    """The sum of pairs that comes out of `count` all-max products in a 16-bit lane."""
    weight, value = 2**w - 1, 2**a - 1
    lane = np.uint16(0)
    with np.errstate(over="ignore"):
        for _ in range(count):
            lane += np.uint16(weight | weight << 8) * np.uint16(value | value << 8)
    return int(lane) >> 8


def widened(w: int, a: int, count: int) -> int:
    weight, value, stride = 2**w - 1, 2**a - 1, 16 - max(w, a)
    lane = np.uint32(0)
    with np.errstate(over="ignore"):
        for _ in range(count):
            lane += np.uint32(weight | weight << stride) * np.uint32(value | value << stride)
    return int(lane) >> stride & (2**stride - 1)


@pytest.mark.parametrize(("depth", "lane"), [(low_half_depth, low_half), (widened_depth, widened)])
def test_packed_sums_are_right_up_to_the_depth_and_wrong_beyond(
    depth: Callable[[int, int], int], lane: Callable[[int, int, int], int]
) -> None:
    for w, a in PAIRS:
        most = depth(w, a)
        if most > 3000:
            continue
        each = 2 * (2**w - 1) * (2**a - 1)
        assert lane(w, a, most) == most * each
        assert lane(w, a, most + 1) != (most + 1) * each


def test_the_published_table_follows_from_the_bound() -> None:
    # Rows W1..W7, columns A1..A7, of the authors' kernels.
    expected = (
        "8 8 8 8 8 8 2", "8 8 8 8 8 2 0", "8 8 8 8 4 1 0", "8 8 8 8 2 0 0",
        "8 8 4 2 1 0 0", "8 2 1 0 0 0 0", "2 0 0 0 0 0 0",
    )  # fmt: skip
    for w, row in enumerate(expected, 1):
        found = [published(widened_depth(w, a)) for a in range(1, 8)]
        assert found == [int(cell) for cell in row.split()]
    first = {(1, 1): 8, (2, 2): 8, (3, 2): 4, (3, 3): 2, (4, 2): 2, (4, 3): 1, (4, 4): 0}
    for (w, a), depth in first.items():
        assert published(low_half_depth(w, a)) == depth


def test_sums_of_bytes_fit_up_to_the_depth_and_not_beyond() -> None:
    for w, a in PAIRS:
        pair = 2 * (2**w - 1) * (2**a - 1)
        assert deferred_depth(w, a) * pair <= 32767 < (deferred_depth(w, a) + 1) * pair
        lowest = -(2 ** (w - 1)) * (2**a - 1) * 2
        assert centred_depth(w, a) * lowest >= -32767
        assert (centred_depth(w, a) + 1) * lowest < -32767
        total = (2**w - 1) * (2**a - 1)
        assert longest_sum(w, a) * total < 2**31 <= (longest_sum(w, a) + 1) * total
    assert [deferred_depth(b, b) for b in (3, 4, 5, 6, 7)] == [334, 72, 17, 4, 1]
    assert [table_depth(a) for a in range(1, 9)] == [63, 21, 9, 4, 2, 1, 0, 0]
