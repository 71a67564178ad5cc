"""Plans of memory: valid, never above greedy, and least where that can be proved by other means."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from slipstream.ship.firmware import Buffer, greedy_plan, plan_memory


@st.composite
def buffers(draw: st.DrawFn, most: int = 12) -> list[Buffer]:
    count = draw(st.integers(1, most))
    made = []
    for _ in range(count):
        first = draw(st.integers(0, 9))
        made.append(Buffer(draw(st.integers(1, 400)), first, first + draw(st.integers(0, 4))))
    return made


def least_peak(given_buffers: list[Buffer], align: int) -> int:
    """The optimum, as an integer program: who of each pair that meets lies below the other."""
    sizes = [-(-one.size // align) for one in given_buffers]
    count, total = len(sizes), sum(sizes)
    pairs = [
        (a, b)
        for a, b in itertools.combinations(range(count), 2)
        if given_buffers[a].meets(given_buffers[b])
    ]
    # Variables: offsets, one order a pair (1: a below b), the peak.
    width = count + len(pairs) + 1
    rows, lows = [], []
    for number, (a, b) in enumerate(pairs):
        for low, high, sign in ((a, b, -total), (b, a, total)):
            row = np.zeros(width)
            row[high], row[low], row[count + number] = 1, -1, sign
            rows.append(row)
            lows.append(sizes[low] - total if low == a else sizes[low])
    for index in range(count):
        row = np.zeros(width)
        row[-1], row[index] = 1, -1
        rows.append(row)
        lows.append(sizes[index])
    cost = np.zeros(width)
    cost[-1] = 1
    upper = np.full(width, float(total))
    upper[count:-1] = 1
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), lb=np.array(lows)),
        integrality=np.ones(width),
        bounds=(np.zeros(width), upper),
    )
    assert found.success
    return round(found.fun) * align


@settings(max_examples=30)
@given(buffers(most=8))
def test_a_plan_said_to_be_optimal_is(found: list[Buffer]) -> None:
    plan = plan_memory(found)
    assert plan.optimal
    assert plan.peak == least_peak(found, 16)


@given(buffers())
def test_plans_are_valid_and_never_above_greedy(found: list[Buffer]) -> None:
    plan, greedy = plan_memory(found, seconds=0.2), greedy_plan(found)
    assert plan.bound <= plan.peak <= greedy.peak
    for a, b in itertools.combinations(range(len(found)), 2):
        if found[a].meets(found[b]):
            x, y = plan.offsets[a], plan.offsets[b]
            assert x + found[a].size <= y or y + found[b].size <= x
    assert all(offset % 16 == 0 for offset in plan.offsets)


@settings(max_examples=40)
@given(buffers(), st.randoms())
def test_distances_are_kept_and_only_help(found: list[Buffer], dice) -> None:  # type: ignore[no-untyped-def]
    distances = {
        (a, b): dice.randrange(found[a].size + 1)
        for a, b in itertools.permutations(range(len(found)), 2)
        if found[a].meets(found[b]) and dice.random() < 0.3
    }
    plan = plan_memory(found, distances=distances, seconds=0.2)
    assert plan.bound <= plan.peak <= greedy_plan(found).peak
    for a, b in itertools.combinations(range(len(found)), 2):
        if found[a].meets(found[b]):
            x, y = plan.offsets[a], plan.offsets[b]
            above = y - x >= distances.get((a, b), found[a].size)
            below = x - y >= distances.get((b, a), found[b].size)
            assert above or below


def test_a_chain_needs_what_its_fullest_step_does() -> None:
    sizes = [9216, 18432, 18432, 36864, 9216, 18432]
    chain = [Buffer(size, step, step + 1) for step, size in enumerate(sizes)]
    plan = plan_memory(chain)
    assert (plan.peak, plan.optimal) == (18432 + 36864, True)


def test_nothing_needs_nothing() -> None:
    assert plan_memory([]).peak == 0


@pytest.mark.full
def test_most_of_500_random_plans_are_proved() -> None:
    dice = np.random.default_rng(0)
    proved = 0
    for _ in range(500):
        count, steps = dice.integers(5, 61), dice.integers(5, 61)
        made = []
        for _ in range(count):
            first = int(dice.integers(steps))
            last = min(int(steps) - 1, first + int(dice.choice([0, 1, 1, 2, 3, 5, 10, 20])))
            made.append(Buffer(int(dice.integers(16, 5000)), first, last))
        plan = plan_memory(made)
        assert plan.peak <= greedy_plan(made).peak
        proved += plan.optimal
    assert proved >= 495
