"""Quality rows: Wilson and McNemar against scipy, and refused claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from slipstream.errors import InvalidArgumentError
from slipstream.measure import quality


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipys(counts):
    successes, trials = counts
    found = quality.wilson(successes, trials)
    expected = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_symmetric_and_a_probability(lost, gained):
    assert 0 < quality.mcnemar(lost, gained) <= 1
    assert quality.mcnemar(lost, gained) == quality.mcnemar(gained, lost)


def test_a_row_counts_losses_and_gains_on_the_same_items():
    base = np.array([1, 1, 1, 1, 0, 0, 1, 1], bool)
    head = np.array([1, 1, 0, 0, 1, 0, 1, 1], bool)
    row = quality.compare_quality("fast", base, head)
    assert (row.lost, row.gained, row.items) == (2, 1, 8)
    assert row.difference == pytest.approx(-1 / 8)
    assert row.p_value == pytest.approx(1.0)


def test_outcomes_of_different_items_are_refused():
    with pytest.raises(InvalidArgumentError, match="shape") as refusal:
        quality.compare_quality("fast", [True] * 5, [True] * 6)
    assert "same items" in str(refusal.value)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (5, 4), (-1, 4)])
def test_an_invalid_proportion_is_refused(successes, trials):
    with pytest.raises(InvalidArgumentError, match="not a proportion"):
        quality.wilson(successes, trials)


def test_a_speed_claim_needs_the_quality_of_both_arms():
    with pytest.raises(InvalidArgumentError, match="changes numerics"):
        quality.require_quality(["fast"], {}, "base")
    with pytest.raises(InvalidArgumentError, match="'base'"):
        quality.require_quality(["fast"], {"fast": [True]}, "base")
    quality.require_quality(["fast"], {"fast": [True], "base": [True]}, "base")
    quality.require_quality([], {}, "base")
