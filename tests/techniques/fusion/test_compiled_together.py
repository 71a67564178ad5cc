"""Kernels that are timed in one batch are compiled together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import graph_of
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream import codegen
from slipstream.codegen import rows_kernels
from slipstream.durations import microbenchmark
from slipstream.graph import Call
from slipstream.techniques.fusion.recorded import recorded_regions


def gated() -> Any:
    """Two kernels: a gate and its gradient."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.inner(x)) * torch.tanh(x) + x

    model = nn.Sequential(Gate(), nn.Linear(64, 4))
    batch = (torch.randn(512, 64), torch.randint(0, 4, (512,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The sources that were compiled."""
    sources: list[str] = []

    def load(source: str) -> Any:
        sources.append(source)
        return codegen.load(source)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rows_kernels, "load", load)
    return sources


def test_a_batch_of_kernels_is_one_source(compiled: list[str]) -> None:
    calls = [region.call for region in recorded_regions(graph_of(gated))]
    assert len(calls) > 1
    answers = microbenchmark.run([call.to_json() for call in calls], 1)
    assert all(answer["nanoseconds"] > 0 for answer in answers)
    assert len(compiled) == 1


def test_one_that_has_no_loops_leaves_the_others_theirs(compiled: list[str]) -> None:
    calls = [region.call for region in recorded_regions(graph_of(gated))]
    broken = Call(calls[0].op, ("[[],[]]", ()), ())
    answers = microbenchmark.run([call.to_json() for call in (*calls, broken)], 1)
    assert all(answer["nanoseconds"] > 0 for answer in answers[:-1])
    assert "error" in answers[-1]
    assert len(compiled) == len(calls)
