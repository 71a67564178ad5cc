"""Regions of a real torch.compile of a small model with a graph break."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from slipstream.capture import CaptureSettings, capture, covered_tasks, use_compiled
from slipstream.capture.compiling import Compiling
from slipstream.capture.events import StepEvents
from slipstream.capture.regions import _overhead_ns, record_regions
from slipstream.errors import WorkloadError
from slipstream.graph import Graph, StepPhase
from slipstream.workload import BuiltWorkload, build_from


class Broken(nn.Module):
    """Reads a number in the middle of its forward pass, which torch.compile cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        scale = 1.0 if x.detach().sum().item() > -1 else 0.5
        return self.last(x) * scale


def build() -> BuiltWorkload:
    torch.manual_seed(0)
    model = Broken()
    batch = (torch.randn(4, 8), torch.randn(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return build_from((model, batch, mse_loss, optimizer), [], 0, "broken")


def run(built: BuiltWorkload, program: Any) -> Any:
    value = None
    while True:
        try:
            program.send(value)
        except StopIteration as end:
            return end.value
        value = built.step()


def record(built: BuiltWorkload, *needs: str) -> Graph:
    settings = CaptureSettings(warmup=1, steps=3, threads=1, needs=needs, own_process=False)
    return run(built, capture(settings)(built))


@pytest.fixture(scope="module")
def recorded() -> tuple[BuiltWorkload, Graph]:
    built = build()
    return built, record(built, "regions")


def test_regions_are_recorded_only_on_request() -> None:
    assert "regions" not in record(build()).meta


def test_every_region_has_a_time_and_all_is_json(recorded: tuple[BuiltWorkload, Graph]) -> None:
    graph = recorded[1]
    found: Any = graph.meta["regions"]
    assert json.loads(json.dumps(found)) == found
    covered = covered_tasks(graph, {(module, name) for module, name in found["stays"]})
    for phase, tasks in covered.items():
        assert found["covered_calls"][phase] == len(tasks) > 1
        durations = [float(graph.tasks.duration_ns[task]) for task in tasks]
        assert found["covered_ns"][phase] == pytest.approx(math.fsum(durations))
    phases = [region["phase"] for region in found["regions"]]
    assert phases.count("forward") >= 2
    assert phases.count("backward") >= 2
    assert all(region["ns"] > 0 and region["operators"] > 0 for region in found["regions"])
    assert sum(region["saved_bytes"] for region in found["regions"]) > 0
    assert found["compile_s"] > 0
    assert found["compiled_ns"] > 0


def test_compile_time_is_the_extra_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build()
    # The first step takes 10 s of CPU time, others 1 s; 0.5 s pass between them.
    seconds = itertools.accumulate(itertools.chain([0.0, 10.0], itertools.cycle([0.5, 1.0])))
    monkeypatch.setattr("slipstream.capture.compiling._cpu_s", lambda: next(seconds))
    with Compiling(built.model, 1, lambda line: None) as compiling:
        for _ in compiling.warm_up():
            built.step()
    assert compiling.compile_s == pytest.approx(9.0)


def test_the_graph_break_is_named_and_its_operator_stays(
    recorded: tuple[BuiltWorkload, Graph],
) -> None:
    found: Any = recorded[1].meta["regions"]
    assert ["model", "aten::_local_scalar_dense"] in found["stays"]
    (where,) = {graph_break["where"].partition(":")[0] for graph_break in found["breaks"]}
    assert where == "test_capture_regions.py"
    assert any("item()" in graph_break["reason"] for graph_break in found["breaks"])


def test_regions_and_their_callers_fit_into_the_compiled_step(
    recorded: tuple[BuiltWorkload, Graph],
) -> None:
    graph = recorded[1]
    found: Any = graph.meta["regions"]
    pace = found["eager_ns"] / graph.meta["step_ns"]["cpu_minimum"]
    regions = sum(region["ns"] for region in found["regions"]) * pace
    assert 0 < regions < found["compiled_ns"] * (1 + 1e-9)
    assert found["overhead_ns"] > 0


def test_overhead_is_the_time_of_frames_beyond_regions_and_remaining_operators() -> None:
    graph = record(build())
    rows = [
        ("aten::addmm", 0, 5),  # before: not of the compiled model
        ("TorchDynamo Cache Lookup", 10, 13),
        ("Torch-Compiled Region: 0/0", 20, 100),
        ("CompiledFunction", 25, 70),
        ("aten::relu", 26, 28),  # of a wrapper itself
        ("## Call CompiledFxGraph abc ##", 30, 60),
        ("aten::addmm", 40, 50),
        ("aten::relu", 80, 90),  # of a graph break
        ("autograd::engine::evaluate_function: CompiledFunctionBackward", 200, 300),
        ("CompiledFunctionBackward", 210, 290),
        ("## Call CompiledFxGraph def ##", 220, 280),
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 300, 310),
    ]
    names, start, end = zip(*rows, strict=True)
    step = StepEvents(names, np.array(start), np.array(end), 400)
    assert _overhead_ns(graph, step) == 3 + (80 - 30 - 10) + (100 - 60)


def test_tasks_of_the_model_are_covered_but_not_gradient_accumulation(
    recorded: tuple[BuiltWorkload, Graph],
) -> None:
    graph = recorded[1]
    covered = covered_tasks(graph, set())
    names = {graph.string(int(graph.tasks.name[t])) for t in covered["forward"]}
    assert {"aten::addmm", "aten::relu", "aten::_local_scalar_dense"} <= names
    assert not any("mse" in name for name in names)
    assert (graph.tasks.phase[covered["backward"]] == StepPhase.BACKWARD).all()
    scopes = {graph.string(int(graph.tasks.scope[t])) for t in covered["backward"]}
    assert scopes
    assert not any("AccumulateGrad" in scope for scope in scopes)
    fewer = covered_tasks(graph, {("model.first", "aten::addmm")})
    assert len(fewer["forward"]) < len(covered["forward"])
    assert len(fewer["backward"]) < len(covered["backward"])


def test_the_model_is_restored(recorded: tuple[BuiltWorkload, Graph]) -> None:
    built = recorded[0]
    assert built.model._compiled_call_impl is None
    regions: Any = recorded[1].meta["regions"]
    calls = Compiling(built.model, 1, lambda line: None)
    assert torch.isfinite(built.step())
    assert calls.regions == []
    assert len(regions["regions"]) > 0


@pytest.mark.parametrize(
    ("message", "reason", "remedy"),
    [
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx", "C++ compiler", "g++"),
        ("the operator aten::odd is not supported\nmore", "aten::odd is not supported", "TORCH_"),
    ],
)
def test_uncompilable_models_give_a_reason_and_steps_continue(
    monkeypatch: pytest.MonkeyPatch, message: str, reason: str, remedy: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fail)
    built = build()
    found: Any = record(built, "regions").meta["regions"]
    assert set(found) == {"reason", "remedy"}
    assert reason in found["reason"]
    assert "more" not in found["reason"]
    assert remedy in found["remedy"]
    assert torch.isfinite(built.step())


def test_hidden_and_compiled_models_are_not_compiled() -> None:
    graph = record(build())
    hidden = BuiltWorkload(None, step=lambda: None)
    found = run(hidden, record_regions(hidden, graph, 1, lambda line: None))
    assert "hides its model" in found["reason"]
    compiled = build()
    use_compiled(compiled.model, "default")
    found = run(compiled, record_regions(compiled, graph, 1, lambda line: None))
    assert found.keys() == {"reason", "remedy"}
    assert re.search(r"\balready compiled\b", found["reason"])
    with pytest.raises(WorkloadError, match="already compiled"):
        use_compiled(compiled.model, "default")
