"""Waves of blocks on another GPU: the formulas of the paper, and their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.durations.roofline import Limits, scaled
from slipstream.durations.wave_scaling import Gpu, Launch, gamma, wave_scaled
from slipstream.durations.work import Work

V100 = Gpu(900e9, 1.53e9, 80, 2048, 65536, 96 << 10, {"fp32": 15.7e12})
A100 = Gpu(2039e9, 1.41e9, 108, 2048, 65536, 164 << 10, {"fp32": 19.5e12})


@pytest.mark.parametrize(
    ("flops", "nbytes", "share"),
    [(0, 100, 1.0), (100, 0, 0.0), (5, 1, 0.75), (10, 1, 0.5), (20, 1, 0.25), (1e9, 1, 0.0)],
)
def test_the_memory_share_decreases_with_intensity(flops: int, nbytes: int, share: float) -> None:
    assert gamma(flops, nbytes, 10e12, 1e12) == pytest.approx(share, abs=1e-7)


def test_the_share_is_continuous_at_the_ridge() -> None:
    assert gamma(9.999, 1, 10, 1) == pytest.approx(gamma(10.001, 1, 10, 1), abs=1e-3)


def test_full_waves_scale_with_bandwidth_or_with_clocks_and_units() -> None:
    full = Launch(10_000, 256)
    assert wave_scaled(V100, A100, full, 1.0) == pytest.approx(900 / 2039)
    assert wave_scaled(V100, A100, full, 0.0) == pytest.approx(1.53 / 1.41 * 80 / 108)
    between = wave_scaled(V100, A100, full, 0.5)
    assert between**2 == pytest.approx(900 / 2039 * 1.53 / 1.41 * 80 / 108)
    assert wave_scaled(V100, A100, None, 1.0) == wave_scaled(V100, A100, full, 1.0)


def test_less_than_a_wave_scales_with_the_clock_alone() -> None:
    few = Launch(8, 128)
    assert wave_scaled(V100, A100, few, 0.0) == pytest.approx(1.53 / 1.41)
    # One round on the larger device, two on the smaller.
    some = Launch(100, 128)
    assert wave_scaled(V100, A100, some, 0.0) == pytest.approx(1.53 / 1.41 / 2)
    assert wave_scaled(V100, A100, few, 1.0) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("blocks", [1, 90, 500, 100_000])
def test_scaling_there_and_back_is_the_identity(share: float, blocks: int) -> None:
    launch = Launch(blocks, 256, 40, 4096)
    scaled = wave_scaled(V100, A100, launch, share)
    assert scaled * wave_scaled(A100, V100, launch, share) == pytest.approx(1)
    assert wave_scaled(V100, V100, launch, share) == 1.0


@pytest.mark.parametrize(
    ("launch", "each"),
    [
        (Launch(1, 32), 32),  # at most that many blocks
        (Launch(1, 1024), 2),  # threads
        (Launch(1, 128, 128), 4),  # registers
        (Launch(1, 128, 0, 40 << 10), 2),  # shared memory
        (Launch(1, 1024, 255, 200 << 10), 1),  # one always fits_
    ],
)
def test_the_binding_limit_of_a_wave(launch: Launch, each: int) -> None:
    assert launch.blocks_at_once(V100) == 80 * each


def test_scales_an_operator_between_two_cpus() -> None:
    here = Limits({"float32": 100e9}, 10e9, 1000.0)
    target = Limits({"float32": 200e9}, 40e9, 500.0)
    streaming = Work(0, 1 << 20, "float32")
    assert scaled(101_000.0, streaming, here, target) == pytest.approx(500 + 25_000)
    arithmetic = Work(1 << 40, 1 << 10, "float32")
    assert scaled(101_000.0, arithmetic, here, target) == pytest.approx(500 + 50_000, rel=1e-3)
    nothing = Work(0, 0, "float32")
    assert scaled(1_000.0, nothing, here, target) == pytest.approx(500)
    assert scaled(101_000.0, arithmetic, here, replace(target, flops_per_s={})) is None
    assert scaled(101_000.0, arithmetic, here, here) == pytest.approx(101_000)
