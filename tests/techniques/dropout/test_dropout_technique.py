"""Torch's dropout modules become one kernel each, in the graph, the model and the source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.dropout.nn import Dropout
from slipstream.techniques.dropout.technique import FusedDropout
from slipstream.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of

from known_durations import context_for, timed_by_bytes

LARGE = (64, 2048)


class Regular(nn.Module):
    """A dropout module, an in-place one, and a functional dropout."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 2048), nn.Linear(2048, 64), nn.Linear(64, 4)
        self.drop, self.over, self.p = nn.Dropout(p), nn.Dropout(p, inplace=True), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.over(self.mid(self.drop(self.up(x))))
        return functional.dropout(self.down(x), self.p, self.training)


def workload(model: nn.Module) -> Any:
    batch = (torch.randn(64, 16), torch.randint(0, 4, (64,)))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.01)


def regular() -> Any:
    return workload(Regular())


def without() -> Any:
    return workload(Regular(0.0))


def evaluated() -> Any:
    return workload(Regular().eval())


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x), 0.5, self.training)


def by_function() -> Any:
    return workload(ByFunction())


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(16 * 8, 4))
    batch = (torch.randn(4, 8, 16), torch.randint(0, 4, (4,)))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.01)


@pytest.fixture
def context() -> Context:
    return context_for(FusedDropout(), graph_of(regular))


def names(graph: Graph) -> list[str]:
    return [graph.string(int(name)) for name in graph.tasks.name]


def test_each_module_becomes_a_kernel_forward_and_backward(context: Context) -> None:
    graph = graph_of(regular)
    after = FusedDropout().predict(graph, context)
    assert names(graph).count("aten::bernoulli_") == 3
    assert names(after).count("aten::bernoulli_") == 1, "the function's stays"
    made = [t for t, name in enumerate(names(after)) if name == "slipstream::dropout"]
    phases = [int(after.tasks.phase[t]) for t in made]
    assert phases == [StepPhase.FORWARD] * 2 + [StepPhase.BACKWARD] * 2
    assert all(len(after.storages(t)) == 3 for t in made)
    assert {after.string(int(after.tasks.module[t])) for t in made} == {"model.drop", "model.over"}


def test_the_large_one_is_faster_and_stores_no_mask(context: Context) -> None:
    graph = timed_by_bytes(graph_of(regular))
    after = FusedDropout().predict(graph, context)

    def spent(graph: Graph) -> float:
        chosen = [graph.string(int(m)) == "model.drop" for m in graph.tasks.module]
        return float(graph.tasks.duration_ns[chosen].sum())

    assert spent(after) < 0.5 * spent(graph)
    mask = 64 * 2048 * 4
    assert sorted(graph.memory.nbytes.tolist()).count(mask) == (
        sorted(after.memory.nbytes.tolist()).count(mask) + 1
    )


def test_requested_calls_can_be_timed() -> None:
    assert cannot_be_timed(FusedDropout().required_timings(graph_of(regular))) == []


def test_unknown_durations_are_assumed(tmp_path: Path) -> None:
    graph = graph_of(regular)
    nothing = Context(Durations(threads=1, path=tmp_path / "empty.db"))
    after = FusedDropout().predict(graph, nothing)
    assert after.tasks.duration_ns.sum() == pytest.approx(graph.tasks.duration_ns.sum())


def test_reasons_why_not() -> None:
    assert FusedDropout().why_not(graph_of(regular)) is None
    assert FusedDropout().why_not(graph_of(encoder)) is None
    for make in (without, evaluated):
        assert "dropout" in str(FusedDropout().why_not(graph_of(make)))
    assert "F.dropout" in str(FusedDropout().why_not(graph_of(by_function)))


def test_modules_of_the_model_are_replaced_in_place() -> None:
    plain, fused = build(regular), build(regular, FusedDropout())
    drops = [m for m in fused.model.modules() if isinstance(m, nn.Dropout)]
    assert [type(m) for m in drops] == [Dropout, Dropout]
    assert fused.model.state_dict().keys() == plain.model.state_dict().keys()
    losses = [float(fused.step()) for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused.step()
    assert sum(event.name == "slipstream::dropout" for event in profile.events()) == 4


def test_a_model_without_dropout_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no nn\.Dropout"):
        build(by_function, FusedDropout())


def test_it_is_registered_and_declares_its_numerics() -> None:
    (found,) = parse("dropout")
    assert found == FusedDropout()
    assert found.quality().kind is QualityKind.SAME_DISTRIBUTION


SOURCE = """\
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), torch.nn.Dropout(p=0.2))
    return model, torch.ones(2, 4)
"""


def test_the_source_edit_uses_our_class(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    change = FusedDropout().code(Workload(f"{file}:make"))
    assert change is not None
    added = [line for line in change.diff.splitlines() if line.startswith("+")]
    assert "+import slipstream.nn" in added
    assert any("slipstream.nn.Dropout(0.1), slipstream.nn.Dropout(p=0.2)" in line for line in added)
    file.write_text(SOURCE.replace("nn.Dropout", "nn.Dropout1d").replace("torch.nn.D", "nn.D"))
    refused = FusedDropout().code(Workload(f"{file}:make"))
    assert refused is not None
    assert not refused.diff
    assert "nn.Dropout" in refused.note
