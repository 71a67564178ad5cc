"""Subtraction of the profiler's overhead, against steps with known times."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.capture.overhead import StepTimes, calibrate, calibrate_apart

counts = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(counts, st.floats(0, 1400), st.randoms())
def test_a_known_cost_per_event_is_found_and_subtracted(
    inner: list[int], cost: float, random: Random
) -> None:
    units = len(inner)
    # Long enough relative to the cost that no time becomes negative.
    true = np.array([random.randint(20_000, 90_000) for _ in range(units)], float)
    true_gap = np.array([random.randint(20_000, 90_000) for _ in range(units + 1)], float)
    between = np.array([random.randint(0, 5) for _ in range(units + 1)])
    between[0] += 1
    inside = np.array(inner)
    quiet = float(true.sum() + true_gap.sum())
    found = calibrate(
        np.rint(true + cost * inside)[None].astype(np.int64),
        np.rint(true_gap + cost * between)[None].astype(np.int64),
        inside,
        between,
        quiet,
    )
    assert found.per_event_ns == pytest.approx(cost, abs=2.0 * units + 1)
    assert found.duration_ns == pytest.approx(true, abs=40 * units)
    assert found.gap_ns == pytest.approx(true_gap, abs=40 * units)


def test_events_of_an_update_count_with_their_number() -> None:
    # Two units and gaps of 3 + 1 + 2 events at 100 ns, and an update of 1 + 2 at 10 ns.
    inner, between = np.array([3, 1, 1]), np.array([1, 0, 2, 1])
    update = np.array([False, False, True]), np.array([False, False, True, False])
    true = np.array([20_000.0, 30_000.0, 40_000.0])
    cost, gap_cost = np.array([100.0, 100.0, 10.0]), np.array([100.0, 100.0, 10.0, 100.0])
    found = calibrate_apart(
        (true + cost * inner)[None], (gap_cost * between)[None], inner, between,
        90_000.0, (*update, 40_000.0),
    )  # fmt: skip
    assert found.duration_ns == pytest.approx(true)
    assert found.per_event_ns == pytest.approx((6 * 100 + 3 * 10) / 9)


times = st.integers(0, 10**6)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=8), st.integers(1, 10**7))
def test_the_remaining_times_sum_to_the_quiet_step(
    rows: list[tuple[int, int]], quiet_ns: int
) -> None:
    durations = np.array([[row[0] for row in rows]]) + 1
    gaps = np.array([[0, *(row[1] for row in rows)]])
    ones = np.ones(len(rows), np.int64)
    found = calibrate(durations, gaps, ones, np.append(ones, 1), quiet_ns)
    total = found.duration_ns.sum() + found.gap_ns.sum()
    assert total == pytest.approx(quiet_ns)
    assert (found.duration_ns >= 0).all()
    assert (found.gap_ns >= 0).all()


def test_every_task_has_its_minimum_time() -> None:
    durations = np.array([[10_000, 50_000], [30_000, 20_000]])
    gaps = np.zeros((2, 3), np.int64)
    nothing = np.zeros(2, np.int64)
    found = calibrate(durations, gaps, nothing, np.zeros(3, np.int64), 30_000.0)
    assert found.duration_ns.tolist() == [10_000, 20_000]
    assert found.scale == 1.0


def test_contention_is_not_mistaken_for_the_cost_of_events() -> None:
    # A tenth of a second over two events: no profiler is so slow, so all tasks shrink equally.
    found = calibrate(
        np.array([[10**8, 10**8]]), np.zeros((1, 3), np.int64), np.ones(2, np.int64),
        np.zeros(3, np.int64), 10.0**8,
    )  # fmt: skip
    assert found.duration_ns == pytest.approx([5e7, 5e7])


def test_a_step_of_zero_time_causes_no_division_by_zero() -> None:
    nothing = np.zeros((1, 1), np.int64)
    found = calibrate(nothing, np.zeros((1, 2), np.int64), nothing[0], np.zeros(2, np.int64), 10.0)
    assert np.isfinite(found.duration_ns).all()
    assert np.isfinite(found.gap_ns).all()


def test_contention_shows_as_queueing_or_in_steps_of_different_lengths() -> None:
    def contended(wall: tuple[int, ...], cpu: int, queued: int, threads: int) -> bool:
        return StepTimes(wall, (cpu,) * len(wall), queued_ns=queued).contended(threads)

    calm, uneven = (100, 101, 102), (100, 130, 140)
    assert not contended(calm, 100, 0, 1)
    assert contended(uneven, 100, 0, 1)
    # CPU time of the other thread does not count for this thread.
    assert not contended(calm, 60, 0, 2)
    assert contended(uneven, 60, 0, 2)
    # All steps delayed equally.
    assert contended(calm, 60, 90, 2)
