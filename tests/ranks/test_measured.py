"""Calibrations: fits of made-up samples, and refused fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.cluster import ClusterError, closed_form_ns
from slipstream.cluster.fitting import fit, terms
from slipstream.cluster.samples import Operation, Sample
from slipstream.ranks import calibration
from slipstream.techniques.distributed.collectives.choice import chosen

ALPHA, SLOPE, ADD = 30e3, 8.0, 1.5


def made_up(
    noise: float, seed: int = 0, sizes: tuple[int, ...] = (2**12, 2**16, 2**20)
) -> list[Sample]:
    rng = np.random.default_rng(seed)
    found = []
    for kind, ranks in (("p2p", 2), ("all_reduce", 2), ("all_reduce", 4)):
        for size in sizes:
            operation = Operation(kind, size, tuple(range(ranks)))
            exact = float(terms(operation) @ np.array([ALPHA, SLOPE, ADD]))
            repeats = exact * (1 + noise * rng.standard_normal(9))
            found.append(Sample(operation, float(np.median(repeats)), tuple(repeats.tolist())))
    return found


def test_a_fit_recovers_the_true_parameters() -> None:
    found = fit(made_up(0.0))
    assert found.alpha_ns == pytest.approx(ALPHA)
    assert found.ns_per_byte == pytest.approx(SLOPE)
    assert found.reduce_ns_per_byte == pytest.approx(ADD)
    assert found.residual == pytest.approx(0.0, abs=1e-12)
    assert found.predict_ns(Operation("p2p", 1000, (0, 1))) == pytest.approx(ALPHA + 8000)


@pytest.mark.parametrize("seed", range(5))
def test_on_slow_links_the_reduction_cost_is_that_of_adding_alone(seed: int) -> None:
    """140 ns per byte on the link, 0.3 to add one."""
    rng = np.random.default_rng(seed)
    samples = []
    for operation in calibration.fitted_operations(4, calibration.SHAPED_SIZES, 5, shaped=True):
        exact = float(terms(operation) @ np.array([ALPHA, 140.0, 0.3]))
        repeats = exact * (1 + 0.05 * rng.standard_normal(5))
        samples.append(Sample(operation, float(np.median(repeats)), tuple(repeats.tolist())))
    found = fit(samples)
    assert found.reduce_ns_per_byte == pytest.approx(0.3, rel=0.2)
    assert found.ns_per_byte == pytest.approx(140.0, rel=0.05)
    cluster = calibration.fitted_cluster(4, "made up", True, found, samples, "gloo")
    assert {chosen(cluster, size, 4, 2) for size in (1 << 10, 1 << 19, 1 << 22)} == {"flat"}


def test_a_message_that_waited_for_a_core_does_not_bias_the_others() -> None:
    samples = made_up(0.0)
    small = min(
        (sample for sample in samples if sample.operation.kind == "all_reduce"),
        key=lambda sample: sample.operation.nbytes,
    )
    waited = tuple(small.duration_ns * factor for factor in (1.0, 1.2, 4.0, 9.0, 16.0))
    samples[samples.index(small)] = replace(
        small, duration_ns=float(np.median(waited)), repeats_ns=waited
    )
    found = fit(samples)
    assert found.ns_per_byte == pytest.approx(SLOPE, rel=1e-3)
    assert found.reduce_ns_per_byte == pytest.approx(ADD, rel=0.02)


@pytest.mark.parametrize("n", [2, 4])
def test_only_the_first_of_consecutive_gathers_starts_late(n: int) -> None:
    ranks = tuple(range(n))
    ring = closed_form_ns("all_gather", "ring", 1e6, n, alpha_ns=0.0, bytes_per_s=1e9)
    for count in (1, 2, 8):
        computed = terms(Operation("all_gather", 1_000_000, ranks, in_a_row=count))
        # Half a piece of 1e6 / n bytes, once.
        assert computed[1] - ring == pytest.approx(1e6 / n / 2 / count)


def test_intervals_contain_the_truth_under_noise() -> None:
    found = fit(made_up(0.03))
    low, high = found.intervals["ns_per_byte"]
    assert low < SLOPE * 1.02
    assert high > SLOPE * 0.98
    assert 0.0 < found.residual < 0.05


def test_times_that_latency_and_bandwidth_do_not_explain_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"\b\d+%"):
        fit(_steep())
    samples = made_up(0.0)
    samples[2] = low = _replaced(samples[2], samples[0].duration_ns / 2 / samples[2].duration_ns)
    # The doubted sample, and both times.
    operation, longest = low.operation, max(sample.duration_ns for sample in samples[:2])
    expected = rf"\b{operation.nbytes}\b.*\b{low.duration_ns:.0f} ns.*\b{longest:.0f} ns"
    with pytest.raises(ClusterError, match=expected):
        fit(samples)
    with pytest.raises(ClusterError, match="too few"):
        fit(samples[:2])


def _steep() -> list[Sample]:
    return [
        Sample(Operation("p2p", 2**k, (0, 1)), 2.0 ** (k * k / 8), (2.0 ** (k * k / 8),) * 3)
        for k in range(4, 24)
    ]


def _replaced(sample: Sample, factor: float) -> Sample:
    return Sample(sample.operation, sample.duration_ns * factor,
                  tuple(r * factor for r in sample.repeats_ns))  # fmt: skip
