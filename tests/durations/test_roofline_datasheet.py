"""Limits of devices that are not present."""

from __future__ import annotations

import pytest

from slipstream.durations.roofline import datasheet_limits, device_named
from slipstream.durations.work import Work
from slipstream.provenance import Provenance


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-sxm"),
        ("NVIDIA A100-PG509-200", "a100-sxm"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla P100-PCIE-16GB", None),
        ("", None),
    ],
)
def test_the_driver_s_name_determines_the_device(name: str, kind: str | None) -> None:
    found = device_named(name)
    assert (found.kind if found else None) == kind


def test_limits_match_the_data_sheet() -> None:
    device = device_named("NVIDIA A100-SXM4-40GB")
    assert device is not None
    limits = datasheet_limits(device)
    assert limits is not None
    assert limits.provenance is Provenance.DATASHEET
    # 19.5 Tflop/s, 312 in 16 bits, 2,039 GB/s, 5 us per launch.
    assert limits.min_ns(Work(19_500_000_000, 8, "float32")) == pytest.approx(1e6 + 5e3)
    assert limits.min_ns(Work(312_000_000_000, 8, "bfloat16")) == pytest.approx(1e6 + 5e3)
    assert limits.min_ns(Work(0, 2_039_000_000, "float32")) == pytest.approx(1e6 + 5e3)
    assert limits.min_ns(Work(1, 1, "float8")) is None
