"""The simulated queue agrees with queueing theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.mlperf.serving import ServiceCurve, peak, simulate
from slipstream.runtimes import BatchPolicy

MS = 1e6


def md1_waiting_cdf(t: float, service: float, load: float) -> float:
    """P(waiting <= t) of M/D/1 (Erlang 1909; see Franx 2001 for the form)."""
    rate = load / service
    steps = range(math.floor(t / service) + 1)
    terms = [
        (rate * (k * service - t)) ** k / math.factorial(k) * math.exp(-rate * (k * service - t))
        for k in steps
    ]
    return (1 - load) * math.fsum(terms)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.8])
def test_single_queries_are_md1(load: float) -> None:
    service = 5 * MS
    found = simulate(ServiceCurve.of({1: service}), load / service * 1e9, queries=400_000)
    mean = service + load * service / (2 * (1 - load))
    assert found.mean_ns == pytest.approx(mean, rel=0.03)
    p99 = found.percentile_ns(0.99)
    assert md1_waiting_cdf(p99 - service, service, load) == pytest.approx(0.99, abs=0.001)
    assert found.busy == pytest.approx(load, rel=0.01)


def test_batches_that_cost_one_query_keep_latency_bounded() -> None:
    """The rate is far above the capacity without batches."""
    curve = ServiceCurve.of({1: MS, 64: MS})
    found = simulate(curve, 20_000, BatchPolicy(64))
    assert found.latencies_ns.max() <= 2 * MS + 1
    assert found.mean_batch == pytest.approx(20, rel=0.1)


def test_query_waits_for_others_as_long_as_the_policy_allows() -> None:
    curve = ServiceCurve.of({1: MS})
    found = simulate(curve, 1.0, BatchPolicy(8, round(3 * MS)), queries=2000)
    assert np.median(found.latencies_ns) == pytest.approx(4 * MS)


def test_overhead_per_batch_and_query_is_fitted_from_noisy_times() -> None:
    alone = ServiceCurve.of({1: MS, 8: 4 * MS})
    random = np.random.default_rng(0)
    sizes = random.choice([1, 2, 4, 8], 4000)
    noise = random.lognormal(0.0, 0.1, 4000)
    times = (np.array([alone.median_ns(n) for n in sizes]) + 0.3 * MS + 0.05 * MS * sizes) * noise
    served = alone.as_served([(int(n), float(t)) for n, t in zip(sizes, times, strict=True)], MS)
    assert served.median_ns(1) == pytest.approx(1.35 * MS, rel=0.02)
    assert served.median_ns(8) == pytest.approx(4.7 * MS, rel=0.02)
    assert np.std(np.log(served.spread())) == pytest.approx(0.1, rel=0.05)
    idle = simulate(served, 1.0, queries=4000)
    assert np.median(idle.latencies_ns) == pytest.approx(2.35 * MS, rel=0.02)


def test_server_is_not_faster_than_its_model() -> None:
    alone = ServiceCurve.of({1: MS})
    assert alone.as_served([(1, 0.5 * MS)] * 20, 0.0).median_ns(1) == pytest.approx(MS)


@settings(max_examples=12)
@given(st.floats(0.1, 5.0), st.sampled_from([1, 4, 16]), st.floats(1.5, 20.0))
def test_peak_meets_the_bound_and_a_higher_rate_does_not(
    query_ms: float, maximum: int, factor: float
) -> None:
    curve, policy = ServiceCurve.of({1: query_ms * MS, 16: 8 * query_ms * MS}), BatchPolicy(maximum)
    bound = factor * curve.median_ns(maximum)
    rate = peak(curve, bound, 0.99, policy)
    assert 0 < rate <= curve.capacity(policy)
    assert simulate(curve, rate, policy).percentile_ns(0.99) <= bound
    assert simulate(curve, 1.05 * rate, policy).percentile_ns(0.99) > 0.9 * bound
