"""Rows for a CUDA device: reported as missing without one, measured with one."""

from __future__ import annotations

import pytest
import torch

from slipstream_bench.rows import BenchOptions
from slipstream_bench.systems.embedding import device as bench_device


def test_rows_report_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = list(bench_device.bars(BenchOptions()))
    assert [(row.holds, row.detail) for row in rows] == [(None, "no CUDA device")] * 2
    assert not list(bench_device.bars(BenchOptions(only="cached ids")))


def test_every_arm_runs_its_steps() -> None:
    cpu, factors = torch.device("cpu"), ((4, 5, 6), (2, 2, 4))
    taken = bench_device.steps(cpu, 120, factors, 3, (4, 40), 2)
    assert set(taken.arms) == {"ours", "products", "dense"}
    assert all(len(taken.times_s(arm)) == 2 for arm in taken.arms)
