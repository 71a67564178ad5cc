"""Recurrent modules become one call per layer: in the graph, the model and the source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import StepPhase, replay
from slipstream.graph.flow import matches
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.scan import kernels as door
from slipstream.techniques.scan.nn import CLASSES
from slipstream.techniques.scan.technique import RecordedDirection, ScanBackprop, recurrences
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Refused
from slipstream.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, mlp, record

from known_durations import BytesMoved, timed_by_bytes


class Reader(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.rnn = kind(3, 6, layers, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
        return made


def workload(kind: type[nn.RNNBase], layers: int) -> Any:
    model = Reader(kind, layers)
    batch = (torch.randn(4, 9, 3), torch.randint(0, 2, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)


def plain() -> Any:
    return workload(nn.RNN, 2)


def gated() -> Any:
    return workload(nn.GRU, 1)


def lstm() -> Any:
    return workload(nn.LSTM, 2)


class Wide(nn.Module):
    """Large enough to be factorised."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.head(self.rnn(x)[0])
        return states


def inferring() -> Any:
    """A recurrent layer without a loss."""
    return nn.LSTM(8, 8), torch.randn(6, 4, 8)


def wide() -> Any:
    model = Wide()
    batch = (torch.randn(4, 9, 64), torch.randn(4, 9, 64))
    return model, batch, mse_loss, torch.optim.SGD(model.parameters(), 0.1)


EXPECTED: dict[Callable[[], Any], list[RecordedDirection]] = {
    plain: [
        RecordedDirection("tanh", 9, 4, 3, 6, "float32"),
        RecordedDirection("tanh", 9, 4, 6, 6, "float32"),
    ],
    gated: [RecordedDirection("gru", 9, 4, 3, 6, "float32")],
    lstm: [
        RecordedDirection("lstm", 9, 4, 3, 6, "float32"),
        RecordedDirection("lstm", 9, 4, 6, 6, "float32"),
    ],
}


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_layers_are_derived_from_the_recorded_step(make: Callable[[], Any]) -> None:
    (found,) = matches(graph_of(make), recurrences)
    assert list(found.settings) == EXPECTED[make]
    # Whole states of four bytes per value are saved, and nothing else.
    states, rest = divmod(found.saved_bytes, 9 * 4 * 6 * 4)
    assert (states > 0, rest) == (True, 0)


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_a_module_is_one_task_per_direction(make: Callable[[], Any], require: Any) -> None:
    require("native", door.available(), "no compiled kernels")
    graph = timed_by_bytes(graph_of(make))
    technique, durations = ScanBackprop(backward="fused"), BytesMoved()
    assert technique.why_not(graph) is None
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    tasks = [edited.task(number) for number in range(len(edited))]
    ours = [task for task in tasks if task.name == "slipstream::scan_layers"]
    assert [task.phase for task in ours] == [StepPhase.FORWARD, StepPhase.BACKWARD]
    theirs = [task for task in tasks if task not in ours]
    assert not [task for task in theirs if task.scope.startswith(("aten::rnn", "aten::gru"))]
    assert edited.tasks.duration_ns.sum() < graph.tasks.duration_ns.sum() or make is lstm
    # Other tasks are unchanged: every gradient still reaches its parameter.
    gathers = [
        sum("AccumulateGrad" in step.string(scope) for scope in step.tasks.scope)
        for step in (graph, edited)
    ]
    assert gathers[0] == gathers[1]
    assert np.isfinite(edited.tasks.duration_ns).all()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_peak_memory_is_predicted(kind: type[nn.RNNBase], require: Any) -> None:
    require("native", door.available(), "no compiled kernels")

    def make() -> Any:
        model = kind(16, 64, 2, batch_first=True)
        batch = torch.randn(16, 48, 16), torch.randn(16, 48, 64)
        return (
            model,
            batch,
            lambda y, target: mse_loss(y[0], target),
            torch.optim.SGD(model.parameters(), 0.1),
        )

    technique, graph, durations = ScanBackprop(backward="fused"), graph_of(make), BytesMoved()
    durations.measure(technique.required_timings(graph))
    predicted = technique.predict(timed_by_bytes(graph), Context(durations))  # type: ignore[arg-type]
    taken = record(build(make, technique))
    peaks = [replay(step).peak_bytes for step in (predicted, taken)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.06)


def test_requested_calls_can_be_timed() -> None:
    for make in EXPECTED:
        assert cannot_be_timed(ScanBackprop().required_timings(graph_of(make))) == []


def test_the_step_makes_the_same_update(require: Any) -> None:
    require("native", door.available(), "no compiled kernels")
    for make in EXPECTED:
        steps = []
        for techniques in ((), (ScanBackprop(backward="fused"),)):
            built = build(make, *techniques)
            built.step()
            steps.append([parameter.detach().clone() for parameter in built.model.parameters()])
        assert type(built.model.rnn) in CLASSES.values()
        for value, other in zip(*steps, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_an_inference_without_a_backward_pass_is_predicted(require: Any) -> None:
    require("native", door.available(), "no compiled kernels")
    graph = timed_by_bytes(graph_of(inferring))
    technique, durations = ScanBackprop(backward="fused"), BytesMoved()
    durations.measure(technique.required_timings(graph))
    edited = technique.predict(graph, Context(durations))  # type: ignore[arg-type]
    assert [edited.task(task).name for task in range(len(edited))].count(
        "slipstream::scan_layers"
    ) == 1


def test_a_step_without_recurrence_is_refused_with_the_reason() -> None:
    assert "no nn.RNN" in str(ScanBackprop().why_not(graph_of(mlp)))
    with pytest.raises(WorkloadError, match=r"no nn\.RNN"):
        build(mlp, ScanBackprop())


def test_layers_of_another_technique_are_left_to_it(tmp_path: Path) -> None:
    (lowrank,) = parse("lowrank:0.25")
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    thinner = lowrank.predict(graph_of(wide), Context(durations))
    assert "another technique has already changed" in str(ScanBackprop().why_not(thinner))
    both = [lowrank, ScanBackprop()]
    (prediction,) = predict(graph_of(wide), [both], durations=durations, measuring_s=0)
    assert isinstance(prediction, Refused)


def test_the_edit_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    model = nn.Sequential(nn.GRU(3, 4), nn.LSTM(4, 4))\n"
        "    return model, torch.zeros(2, 1, 3)\n"
    )
    change = ScanBackprop().code(Workload(f"{path}:make"))
    assert change is not None
    assert "slipstream.nn.GRU(3, 4), slipstream.nn.LSTM(4, 4)" in change.diff


def test_it_is_found_by_name() -> None:
    (found,) = parse("scan:fused")
    assert found == ScanBackprop(backward="fused")
    assert found.quality().kind is QualityKind.ROUNDING
