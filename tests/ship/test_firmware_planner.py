"""Memory plans are valid, never worse than greedy, and optimal if so reported."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from slipstream.ship.firmware import Buffer, greedy_plan, plan_memory


@st.composite
def buffers(draw: st.DrawFn, max_count: int = 12) -> list[Buffer]:
    count = draw(st.integers(1, max_count))
    made = []
    for _ in range(count):
        first = draw(st.integers(0, 9))
        made.append(Buffer(draw(st.integers(1, 400)), first, first + draw(st.integers(0, 4))))
    return made


def optimal_peak(buffer_list: list[Buffer], align: int) -> int:
    """Return the optimum by an integer program over the order of each conflicting pair."""
    sizes = [-(-buffer.size // align) for buffer in buffer_list]
    count, total = len(sizes), sum(sizes)
    pairs = [
        (a, b)
        for a, b in itertools.combinations(range(count), 2)
        if buffer_list[a].meets(buffer_list[b])
    ]
    # Variables: offsets, one order per pair (1: a below b), the peak.
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
@given(buffers(max_count=8))
def test_optimal_plans_are_optimal(found: list[Buffer]) -> None:
    plan = plan_memory(found)
    assert plan.optimal
    assert plan.peak == optimal_peak(found, 16)


@given(buffers())
def test_plans_are_valid_and_never_worse_than_greedy(found: list[Buffer]) -> None:
    plan, greedy = plan_memory(found, seconds=0.2), greedy_plan(found)
    assert plan.bound <= plan.peak <= greedy.peak
    for a, b in itertools.combinations(range(len(found)), 2):
        if found[a].meets(found[b]):
            x, y = plan.offsets[a], plan.offsets[b]
            assert x + found[a].size <= y or y + found[b].size <= x
    assert all(offset % 16 == 0 for offset in plan.offsets)


@settings(max_examples=40)
@given(buffers(), st.randoms())
def test_distances_hold_and_never_raise_the_peak(found: list[Buffer], rng) -> None:  # type: ignore[no-untyped-def]
    distances = {
        (a, b): rng.randrange(found[a].size + 1)
        for a, b in itertools.permutations(range(len(found)), 2)
        if found[a].meets(found[b]) and rng.random() < 0.3
    }
    plan = plan_memory(found, distances=distances, seconds=0.2)
    assert plan.bound <= plan.peak <= greedy_plan(found).peak
    for a, b in itertools.combinations(range(len(found)), 2):
        if found[a].meets(found[b]):
            x, y = plan.offsets[a], plan.offsets[b]
            above = y - x >= distances.get((a, b), found[a].size)
            below = x - y >= distances.get((b, a), found[b].size)
            assert above or below


def test_a_chain_needs_the_memory_of_its_fullest_step() -> None:
    sizes = [9216, 18432, 18432, 36864, 9216, 18432]
    chain = [Buffer(size, step, step + 1) for step, size in enumerate(sizes)]
    plan = plan_memory(chain)
    assert (plan.peak, plan.optimal) == (18432 + 36864, True)


def test_no_buffers_need_no_memory() -> None:
    assert plan_memory([]).peak == 0


@pytest.mark.full
def test_proves_most_of_500_random_plans() -> None:
    rng = np.random.default_rng(0)
    proved = 0
    for _ in range(500):
        count, steps = rng.integers(5, 61), rng.integers(5, 61)
        made = []
        for _ in range(count):
            first = int(rng.integers(steps))
            last = min(int(steps) - 1, first + int(rng.choice([0, 1, 1, 2, 3, 5, 10, 20])))
            made.append(Buffer(int(rng.integers(16, 5000)), first, last))
        plan = plan_memory(made)
        assert plan.peak <= greedy_plan(made).peak
        proved += plan.optimal
    assert proved >= 495
