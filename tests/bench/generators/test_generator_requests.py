"""Arrivals against the closed forms of Poisson and Markov-modulated Poisson processes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import RequestTrace, Tenant, request_trace

CALM = Tenant("calm", rate_per_s=20)
BURSTY = Tenant("bursty", rate_per_s=10, burst_ratio=20, burst_share=0.1, burst_s=0.5)


def _counts(trace: RequestTrace, tenant: int, window_s: float) -> np.ndarray:
    times = trace.times_s[trace.tenants == tenant]
    windows = int(trace.duration_s / window_s)
    return np.histogram(times, bins=windows, range=(0, windows * window_s))[0]


def test_a_ratio_of_one_is_a_poisson_process() -> None:
    trace = request_trace([CALM], 2000, seed=1)
    gaps = np.diff(trace.times_s)
    assert kstest(gaps, "expon", args=(0, 1 / 20)).pvalue > 0.001
    # Gaps are independent of the ones before them.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / len(gaps) ** 0.5
    assert CALM.dispersion(1.0) == 1.0


@pytest.mark.parametrize("window_s", [0.2, 1.0, 5.0])
def test_bursts_have_the_stated_rate_and_dispersion(window_s: float) -> None:
    trace = request_trace([BURSTY], 40_000, seed=2)
    counts = _counts(trace, 0, window_s)
    # The mean's error from the dispersion over long times, where counts are independent.
    error = 4 * (BURSTY.rate_per_s * BURSTY.dispersion(1e6) / trace.duration_s) ** 0.5
    assert len(trace) / trace.duration_s == pytest.approx(BURSTY.rate_per_s, abs=error)
    assert counts.var() / counts.mean() == pytest.approx(BURSTY.dispersion(window_s), rel=0.1)


def test_dispersion_is_that_of_an_independent_simulation() -> None:
    """Simulate the two states on a fine time grid with Poisson counts, not event by event."""
    generator = np.random.default_rng(0)
    step, steps, copies = 0.02, 100, 20_000
    state = generator.random(copies) < BURSTY.burst_share
    counts = np.zeros(copies)
    for _ in range(steps):
        rate = BURSTY.calm_rate_per_s * np.where(state, BURSTY.burst_ratio, 1)
        counts += generator.poisson(rate * step)
        leave = -np.expm1(-step / np.where(state, BURSTY.burst_s, BURSTY.calm_s))
        state ^= generator.random(copies) < leave
    assert counts.mean() == pytest.approx(BURSTY.rate_per_s * step * steps, rel=0.03)
    stated = BURSTY.dispersion(step * steps)
    assert counts.var() / counts.mean() == pytest.approx(stated, rel=0.06)


def test_states_average_to_the_stated_rate() -> None:
    share = BURSTY.burst_share
    calm = BURSTY.calm_rate_per_s
    assert calm * (1 - share) + calm * BURSTY.burst_ratio * share == pytest.approx(10)
    assert BURSTY.burst_s / (BURSTY.burst_s + BURSTY.calm_s) == pytest.approx(share)


def test_tenants_are_merged_in_order_and_do_not_disturb_each_other() -> None:
    both = request_trace([CALM, BURSTY], 100, seed=3)
    alone = request_trace([CALM], 100, seed=3)
    assert (np.diff(both.times_s) >= 0).all()
    assert both.times_s.max() < 100
    assert np.array_equal(both.times_s[both.tenants == 0], alone.times_s)
    assert len(both.sizes) == len(both.tenants) == len(both)


def test_sizes_are_log_normal_integers() -> None:
    tenant = Tenant("t", 100, size_median=200, size_sigma=0.5)
    sizes = request_trace([tenant], 200, seed=4).sizes
    assert sizes.min() >= 1
    logs = np.log(sizes)
    assert np.median(logs) == pytest.approx(np.log(200), abs=5 * 0.5 / len(sizes) ** 0.5 + 0.005)
    assert logs.std() == pytest.approx(0.5, rel=0.03)
    assert set(request_trace([CALM], 5).sizes) == {1}


def test_arguments_out_of_range_are_named() -> None:
    for argument, value in [
        ("rate_per_s", 0), ("burst_ratio", 0.5), ("burst_share", 1), ("burst_s", 0),
        ("size_median", 0), ("size_sigma", -1),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=argument):
            Tenant(**({"name": "t", "rate_per_s": 1} | {argument: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="sources"):
        request_trace([], 1)
    with pytest.raises(InvalidArgumentError, match="duration_s"):
        request_trace([CALM], 0)
