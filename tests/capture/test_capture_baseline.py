"""Techniques that a step already uses are detected, even if it hides its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from slipstream.capture import CaptureSettings, capture
from slipstream.graph import Graph, Role
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.checkpointing import Checkpointing
from slipstream.techniques.compile import Compile
from slipstream.techniques.fused_optimizer import FusedOptimizer
from slipstream.techniques.precision import Amp
from slipstream.workload import build_from


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class UnderAutocast(Net):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


def _parts(model: nn.Module) -> Any:
    batch = (torch.randn(8, 8), torch.randint(0, 4, (8,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


def _hidden(model: nn.Module, dtype: torch.dtype | None = None) -> Callable[[], Any]:
    """A user-defined step, which exposes nothing."""
    _, (x, y), loss_of, optimizer = _parts(model)

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _recorded(result: Any) -> Graph:
    built = build_from(result, (), 0, "test")
    running = capture(CaptureSettings(warmup=1, steps=2, threads=1, own_process=False))(built)
    while True:
        try:
            running.send(None)
        except StopIteration as end:
            graph: Graph = end.value
            return graph
        built.step()


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_plain_step_uses_no_technique() -> None:
    graph = _recorded(_parts(Net()))
    assert graph.meta["baseline"] == {"amp": "", "compiled": False, "distributed": None}


@pytest.mark.parametrize(
    "make",
    [lambda: _parts(UnderAutocast()), lambda: _hidden(Net(), torch.bfloat16)],
    ids=["in the model", "in the step"],
)
def test_autocast_is_not_offered_twice(make: Callable[[], Any]) -> None:
    graph = _recorded(make())
    assert graph.meta["baseline"]["amp"] == "bfloat16"
    assert "autocast (bfloat16) already" in (Amp().why_not(graph) or "")


@pytest.mark.parametrize("hidden", [False, True])
def test_a_compiled_step_hides_its_operators_only(hidden: bool) -> None:
    # Without Inductor: what torch annotates is the same, and no C++ has to be compiled.
    model: Any = torch.compile(Net(), backend="aot_eager")
    graph = _recorded(_hidden(model) if hidden else _parts(model))
    assert graph.meta["baseline"]["compiled"] is True
    for technique in (Compile(), Amp(), BatchSize(), Checkpointing()):
        assert "compiled already" in (technique.why_not(graph) or "")
    if not hidden:
        assert FusedOptimizer().why_not(graph) is None


@pytest.mark.parametrize("hidden", [False, True])
def test_replicas_are_detected(one_rank: None, hidden: bool) -> None:
    model = nn.parallel.DistributedDataParallel(Net())
    graph = _recorded(_hidden(model) if hidden else _parts(model))
    wrapper = {"wrapper": "DistributedDataParallel", "ranks": 1}
    assert graph.meta["baseline"]["distributed"] == wrapper
    # Work of other threads appears in the trace only: it must not count as differing operators.
    assert graph.meta["unaligned_share"] == 0.0
    assert len(graph.memory) > 0
    assert Role.GRADIENT in graph.memory.role


def test_a_step_that_hides_its_parts_reports_it() -> None:
    graph = _recorded(_hidden(Net()))
    for technique in (Amp(), Accumulation(), FusedOptimizer()):
        assert "hides its" in (technique.why_not(graph) or "")
