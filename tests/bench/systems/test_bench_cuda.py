"""Rows of steps on a CUDA device, which report a missing device."""

from __future__ import annotations

import pytest
import torch

from slipstream_bench import cuda_models
from slipstream_bench.rows import BenchOptions
from slipstream_bench.systems import cuda
from slipstream_bench.systems.fusion import on_cuda


def test_rows_report_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bars, full in ((cuda.bars, len(cuda_models.FAMILIES)), (on_cuda.bars, 6)):
        for options, count in ((BenchOptions(), 2), (BenchOptions(full=True), full)):
            rows = list(bars(options))
            assert [(row.holds, row.detail) for row in rows] == [(None, "no CUDA device")] * count
    (row,) = cuda.bars(BenchOptions(only="perceptron: simulated"))
    assert row.value is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_optimizer_has_the_moved_parameters() -> None:
    for make in cuda_models.FAMILIES:
        model, _, _, optimizer = make(8)
        of_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert of_optimizer == {id(p) for p in model.parameters()}
        assert all(p.is_cuda for p in model.parameters())
