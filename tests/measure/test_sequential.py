"""Repeated looks at a valid error level: against published constants and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from slipstream.measure import sequential
from slipstream.measure.records import ExperimentSettings

LOOKS = ExperimentSettings("a").looks


@pytest.mark.parametrize(
    ("looks", "critical"), [(1, 1.960), (2, 2.178), (3, 2.289), (4, 2.361), (5, 2.413), (10, 2.555)]
)
def test_equally_spaced_looks_have_pococks_constants(looks, critical):
    # Jennison and Turnbull, Group Sequential Methods, table 2.1.
    found = sequential._pocock(tuple(range(1, looks + 1)), 0.05)
    # Beyond look 20 they would be treated as further apart than they are; none is here.
    assert found == pytest.approx(critical, abs=0.002)


@pytest.mark.parametrize("end", [57, 200, 1280, 3000])
def test_walks_without_a_difference_are_rejected_at_their_level(end):
    rng = np.random.default_rng(end)
    walks = np.cumsum(rng.normal(size=(4000, end)), axis=1)
    planned = norm.isf(sequential.nominal_error(10, LOOKS, 0.05, at_planned_look=True) / 2)
    last = norm.isf(sequential.nominal_error(end, LOOKS, 0.05, at_planned_look=False) / 2)
    crossed = np.abs(walks[:, -1]) / math.sqrt(end) > last
    for look in LOOKS:
        if look < end:
            crossed |= np.abs(walks[:, look - 1]) / math.sqrt(look) > planned
    # 4,000 walks of a true 5 %: three standard errors are 1 %.
    assert 0.038 <= crossed.mean() <= 0.061


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4000), st.floats(0.001, 0.2))
def test_no_look_may_use_more_than_the_whole_error(blocks, error):
    for planned in (True, False):
        found = sequential.nominal_error(blocks, LOOKS, error, at_planned_look=planned)
        assert 0 < found <= error * (1 + 1e-9)


def test_the_end_of_the_budget_may_use_the_remaining_error():
    for blocks in (8, 15, 60, 500, 2000):
        end = sequential.nominal_error(blocks, LOOKS, 0.05, at_planned_look=False)
        assert end > sequential.nominal_error(blocks, LOOKS, 0.05, at_planned_look=True)


def test_a_run_without_earlier_looks_uses_the_whole_error():
    assert sequential.nominal_error(8, LOOKS, 0.05, at_planned_look=False) == 0.05
    assert sequential.nominal_error(50, (), 0.05, at_planned_look=False) == 0.05


def test_only_the_looks_before_the_end_count():
    # A planned look at the end itself is not an additional one, and no earlier one is left out.
    for looks, end in (((10, 20, 40), 40), ((10, 20, 40), 60), ((10,), 15)):
        passed = [look for look in looks if look < end]
        critical = sequential._pocock(looks, 0.8 * 0.05)
        last = norm.isf(sequential.nominal_error(end, looks, 0.05, at_planned_look=False) / 2)
        spent = sequential._crossing(tuple(passed), (critical,) * len(passed), end, last)
        assert spent == pytest.approx(0.05, rel=1e-6)
