"""Tests of fits against exact and noisy lines with known parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.verbs.batch.curve import Point, fit


def points(sizes: list[int], bias: float, slope: float, knee: float = math.inf, bend: float = 0):
    """Exact values with a nominal spread of half a percent."""
    return [Point(b, bias + slope * b + bend * max(b - knee, 0.0), 0.005) for b in sizes]


def test_recovers_a_line() -> None:
    curve = fit(points([8, 20, 48], 5.0, 0.25), 0.02)
    assert curve.knee is None
    assert (curve.bias, curve.slope) == pytest.approx((5.0, 0.25))
    assert curve.at(64).estimate == pytest.approx(21.0)


@pytest.mark.parametrize("bend", [0.2, -0.1])
def test_recovers_a_knee(bend: float) -> None:
    curve = fit(points([8, 13, 20, 31, 48], 5.0, 0.25, 22.0, bend), 0.02)
    assert curve.knee == pytest.approx(22.0, rel=0.1)
    assert curve.last_slope == pytest.approx(0.25 + bend, rel=0.05)
    # The last line continues beyond the last size.
    assert curve.at(96).estimate == pytest.approx(5.0 + 0.25 * 96 + bend * (96 - 22), rel=0.02)


def test_noise_gives_no_knee() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        noisy = [
            Point(p.samples, p.value * (1 + 0.005 * rng.standard_normal()), 0.005)
            for p in points([8, 13, 20, 31, 48], 5.0, 0.25)
        ]
        assert fit(noisy, 0.02).knee is None


def test_three_sizes_give_no_knee() -> None:
    assert fit(points([8, 20, 48], 5.0, 0.25, 20.0, 0.5), 0.02).knee is None


def test_the_bias_is_never_negative() -> None:
    steep = fit(points([8, 20, 48], -0.02, 0.25), 0.02)
    assert steep.bias == 0.0
    assert steep.at(96).estimate == pytest.approx(24, rel=0.02)
    bent = fit(points([8, 13, 20, 31, 48], -0.1, 0.25, 22.0, 0.2), 0.02)
    assert bent.bias == 0.0
    assert bent.knee == pytest.approx(22.0, rel=0.2)
    assert bent.worst <= 0.03


def test_the_interval_widens_outside_the_measured_sizes() -> None:
    curve = fit(points([8, 20, 48], 5.0, 0.25), 0.02)

    def width(samples: int) -> float:
        found = curve.at(samples)
        return (found.high - found.low) / found.estimate

    assert width(20) < width(96) < width(192) < width(384)
    assert width(4) > width(8)
    assert curve.beyond(30) == 0
    assert curve.beyond(192) == pytest.approx(2)


def test_the_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(300):
        noisy = [
            Point(p.samples, p.value * (1 + 0.01 * rng.standard_normal()), 0.01)
            for p in points([8, 20, 48], 5.0, 0.25)
        ]
        found = fit(noisy, 0.05).at(30)
        inside += found.low <= 5.0 + 0.25 * 30 <= found.high
    assert inside >= 0.85 * 300


def test_largest_within_is_the_inverse() -> None:
    bent = fit(points([8, 13, 20, 31, 48], 5.0, 0.25, 22.0, 0.2), 0.02)
    for samples in (4.0, 15.0, 40.0, 500.0):
        assert bent.largest_within(bent.at(samples).estimate) == pytest.approx(samples)
    assert bent.largest_within(1.0) == 0.0
    flat = fit(points([8, 20, 48], 5.0, 0.0), 0.02)
    assert flat.largest_within(4.0) == 0.0


def test_noisy_points_weigh_less() -> None:
    good = points([8, 20, 48], 5.0, 0.25)
    bad = [*good[:2], Point(48, good[2].value * 1.2, 0.2)]
    assert fit(bad, math.inf).at(48).estimate == pytest.approx(good[2].value, rel=0.05)


def test_refuses_fewer_than_two_sizes() -> None:
    with pytest.raises(InvalidArgumentError):
        fit([Point(8, 1.0, 0.01), Point(8, 1.1, 0.01)], 0.02)
    with pytest.raises(InvalidArgumentError):
        fit(points([8, 20], 5.0, 0.25), 0.02).at(0)
