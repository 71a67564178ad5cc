"""The untimed step with another number of samples, and when it is omitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.graph import Graph
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from tiny_models import MODELS, captured, loss, parts


def recorded(model: nn.Module, *rest: Any) -> Graph:
    return profile(Workload.of(model, *rest), warmup=1, steps=3, threads=1)


@pytest.mark.parametrize("name", ["mlp inference", *sorted(MODELS)])
def test_every_call_has_its_form_at_the_other_size(name: str) -> None:
    graph = captured(name)
    rows = 6 if name.startswith("mlp") else 3
    # Three rows are too few to halve.
    assert graph.meta["shrunk"] == {"samples": 3 if rows == 6 else 6, "of": rows}
    assert len(graph.shrunk) == len(graph.calls)
    assert all(
        call.op == other.op for call, other in zip(graph.calls, graph.shrunk, strict=True) if other
    )
    pairs = {
        (call.key, other.key if other else "")
        for call, other in zip(graph.calls, graph.shrunk, strict=True)
    }
    assert len(pairs) == len(graph.calls)
    assert set(graph.tasks.call[1:].tolist()) == set(range(len(graph.calls)))


def test_calls_equal_by_coincidence_are_kept_apart() -> None:
    # Eight samples of eight features, and a weight of eight by eight.
    graph = recorded(Doubled(), torch.randn(8, 8))
    squares = [
        other
        for call, other in zip(graph.calls, graph.shrunk, strict=True)
        if call.name == "aten::mul"
    ]
    assert {other.inputs[0].shape for other in squares if other} == {(8, 8), (4, 8)}


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0) @ (self.weight * 2.0)


class OnlyEight(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 8:
            raise ValueError("eight,\nno less")
        return x + 1


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if len(x) > 4 else x.tanh()


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            x = x + 1
        return x


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, 3) + 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OnlyEight(), " 4 samples fails: ValueError: eight, no less"),
        (Branching(), "number 0 is aten::relu with 8 and aten::tanh with 4"),
        (Looping(), "8 with 8, 4 with 4"),
        (Fixed(), "same work"),
    ],
)
def test_a_model_that_takes_no_other_batch_is_still_profiled(model: nn.Module, reason: str) -> None:
    graph = recorded(model, torch.randn(8, 2))
    assert reason in graph.meta["shrunk"]["reason"]
    assert graph.meta["shrunk"]["samples"] == 4
    assert graph.shrunk == ()
    assert graph.samples == 8


def test_a_step_that_hides_its_batch_reports_it() -> None:
    model, batch, _, optimizer = parts("mlp")

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    graph = profile(Workload.of(None, step=step), warmup=1, steps=3, threads=1)
    assert graph.shrunk == ()
    assert "hides its batch" in graph.meta["shrunk"]["reason"]
