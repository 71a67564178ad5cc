"""Masks pass tests of independence, which reject masks that are not independent."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.codegen.prelude import threshold_and_scale
from slipstream.techniques.dropout import reference
from slipstream_bench.systems.dropout.bars import mask
from slipstream_bench.systems.dropout.independence import (
    TESTS,
    correlation_test,
    keep_rate_deviation,
)

ELEMENTS = 1 << 19
EACH = pytest.mark.parametrize("name", list(TESTS))


@EACH
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_masks_pass(name: str, p: float) -> None:
    values = [TESTS[name](mask(seed, p, ELEMENTS), p) for seed in range(4)]
    assert min(values) * len(values) > 0.001
    assert max(values) - min(values) > 0.01, "p-values are spread over [0, 1]"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p: float) -> None:
    joined = np.concatenate([mask(seed, p, ELEMENTS) for seed in range(8)])
    assert abs(keep_rate_deviation(joined, p)) < 3


@EACH
def test_dependence_is_detected(name: str) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random(ELEMENTS) >= 0.3
    assert TESTS[name](mask, 0.3) > 0.001, "numpy's masks are independent"
    # One element in thirty equals its neighbour.
    copied = rng.random(ELEMENTS) < 1 / 30
    copied[0] = False
    mask[copied] = mask[np.flatnonzero(copied) - 1]
    assert TESTS[name](mask, 0.3) < 1e-6


def test_too_few_rounds_are_detected() -> None:
    threshold, _ = threshold_and_scale(0.5)
    for rounds, passes in ((2, False), (reference.ROUNDS, True)):
        retained = reference.retained_mask(1 << 18, (1, 2), threshold, rounds)
        least = min(test(retained, 0.5) for test in TESTS.values())
        assert (least > 1e-4) is passes


def test_masks_of_different_seeds_differ() -> None:
    masks = [mask(seed, 0.2, ELEMENTS) for seed in range(4)]
    pairs = [correlation_test(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    assert min(pairs) * len(pairs) > 0.001
    assert correlation_test(masks[0], masks[0]) == 0.0
