"""Whole networks compared with other runtimes, which are judged only if outputs agree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.lowbit import peers, whole


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Bar]]:
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.setattr(whole, "_NETWORKS", {"small CNN": (whole.small, 12)})
    return lambda: {row.bar.rpartition("times ")[2]: row for row in whole.bars(BenchOptions())}


def test_a_peer_with_equal_outputs_is_judged_and_a_missing_one_is_named(
    rows: Callable[[], dict[str, Bar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    measured = rows()
    assert list(measured) == list(whole._PEERS)
    for peer in ("ONNX Runtime int8", "ONNX Runtime float32"):
        row = measured[peer]
        assert row.value is not None
        assert row.value > 0
        assert "computes something" not in row.detail
        assert f"{peer} " in row.detail
        assert "torch int8" in row.detail
    for peer in ("OpenVINO int8", "OpenVINO float32"):
        assert measured[peer].holds is None
        assert "pip install openvino" in measured[peer].detail


def test_a_peer_with_other_outputs_is_not_judged(
    rows: Callable[[], dict[str, Bar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = peers.onnxruntime_network

    def wrong(file: Any, x: torch.Tensor) -> Any:
        run = right(file, x)
        assert not isinstance(run, str)
        return lambda: -run()  # type: ignore[operator]

    monkeypatch.setattr(peers, "onnxruntime_network", wrong)
    monkeypatch.setitem(sys.modules, "openvino", None)
    row = rows()["ONNX Runtime int8"]
    assert row.value is None
    assert row.holds is None
    assert "something else" in row.detail


def test_calibrated_norms_preserve_images() -> None:
    torch.manual_seed(0)
    model = whole._alive(whole.mobilenet_v2(), 32)
    first, other = model(torch.rand(2, 3, 32, 32)).detach()
    assert float((first - other).norm() / first.norm()) > 0.01
