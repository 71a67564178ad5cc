"""Captures of real small models: the graph against known facts of the model."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from slipstream.capture import CaptureSettings, program
from slipstream.durations.microbenchmark import run
from slipstream.errors import GraphError
from slipstream.graph import PROVENANCES, Graph, StepPhase, replay
from slipstream.graph.origin import long_steps_note
from slipstream.provenance import Provenance
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload, build_from
from tiny_models import MODELS, captured, in_phase, loss, name_of, parts, record, workload


@pytest.fixture(autouse=True)
def nothing_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the steps that only fill caches, so that the steps below have known numbers."""
    monkeypatch.setattr(program, "_SETTLING", 0)


ALL = [*sorted(MODELS), "mlp inference", "conv inference"]


@pytest.mark.parametrize("name", ALL)
def test_tasks_and_gaps_sum_to_the_quiet_step(name: str) -> None:
    graph = captured(name)
    total = graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()
    assert total == pytest.approx(graph.meta["step_ns"]["cpu_minimum"])
    assert replay(graph).step_ns == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_exactly_the_parameters_are_found(name: str) -> None:
    graph = captured(name)
    assert len(graph.parameters) == len(list(parts(name)[0].parameters()))
    assert graph.meta["parameters"] == sum(p.numel() for p in parts(name)[0].parameters())


def test_parameters_are_what_the_optimizer_writes() -> None:
    graph = captured("mlp")
    written = {
        int(graph.storages(task)[0])
        for task in in_phase(graph, StepPhase.OPTIMIZER)
        if name_of(graph, task) == "aten::addcdiv_"
    }
    assert written == set(graph.parameters.tolist())


@pytest.mark.parametrize("name", ALL)
def test_every_tensor_was_made_before_it_is_used(name: str) -> None:
    """Every operand comes from an earlier task or existed before the step."""
    graph = captured(name)
    made: dict[int, int] = {}
    inner = 0
    for task in range(len(graph)):
        if graph.tasks.call[task] < 0:
            continue
        call = graph.calls[graph.tasks.call[task]]
        storages = graph.storages(task).tolist()
        assert len(storages) == len(call.inputs) + len(call.outputs)
        inner += sum(storage in made for storage in storages[: len(call.inputs)])
        made.update(dict.fromkeys(storages[len(call.inputs) :], task))
    assert inner > len(graph) / 4


def test_the_output_of_a_layer_is_the_input_of_the_next() -> None:
    graph = captured("mlp")
    forward = in_phase(graph, StepPhase.FORWARD)
    chain = [t for t in forward if name_of(graph, t) in ("aten::addmm", "aten::relu", "aten::gelu")]
    assert len(chain) == 5
    for before, after in itertools.pairwise(chain):
        inputs = len(graph.calls[graph.tasks.call[after]].inputs)
        assert graph.storages(before)[-1] in graph.storages(after)[:inputs]


@pytest.mark.parametrize("name", ALL)
def test_every_recorded_call_can_be_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.durations.microbenchmark._ROUNDS", 1)
    monkeypatch.setattr("slipstream.durations.microbenchmark._SAMPLE_NS", 1)
    monkeypatch.setattr("slipstream.durations.microbenchmark._ROTATED_BYTES", 1)
    calls = captured(name).calls
    found = run([call.to_json() for call in calls], threads=1)
    assert [(c.name, f["error"]) for c, f in zip(calls, found, strict=True) if "error" in f] == []
    torch.set_flush_denormal(False)


def test_two_captures_of_a_model_have_the_same_structure() -> None:
    first, other = (profile(workload("transformer"), warmup=1, steps=3) for _ in range(2))

    def structure(graph: Graph) -> list[tuple[Any, ...]]:
        tasks = graph.tasks
        return [
            (
                name_of(graph, t), graph.string(tasks.module[t]), graph.string(tasks.scope[t]),
                int(tasks.phase[t]), graph.calls[tasks.call[t]].key if tasks.call[t] >= 0 else "",
            )
            for t in range(len(graph))
        ]  # fmt: skip

    assert structure(first) == structure(other)


def test_inference_has_no_backward_and_no_update() -> None:
    graph = captured("mlp inference")
    assert not graph.meta["training"]
    assert set(graph.tasks.phase[1:].tolist()) == {StepPhase.FORWARD}


def test_a_step_that_hides_its_model_still_shows_its_updates() -> None:
    model, batch, _, optimizer = parts("mlp")

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    graph = profile(Workload.of(None, step=step), warmup=1, steps=3, threads=1)
    assert set(graph.tasks.phase[1:].tolist()) == {1, 2, 3}
    assert len(graph.parameters) == len(list(model.parameters()))


class Fickle(nn.Module):
    """Runs one operator more in one of its steps.

    With one step to warm up and three recorded, the steps are: 1 warm-up, 2 the profiler's own
    start, 3-5 plain, 6-8 profiled, 9-10 for memory, 11 recorded with arguments.
    """

    def __init__(self, odd_step: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.odd_step, self.steps = odd_step, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.layer(x).relu()
        if self.steps == self.odd_step:
            x = x.sigmoid()
        return x.tanh()


def test_a_step_unlike_the_others_is_recorded_again() -> None:
    graph = profile(Workload.of(Fickle(12), torch.randn(2, 4)), warmup=1, steps=3, threads=1)
    assert "aten::sigmoid" not in graph.strings


class Late(nn.Module):
    """Runs one operator more in all steps after those that are profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x.sigmoid().tanh() if self.steps > 10 else x.tanh()


def test_slow_steps_are_recorded_again_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    patient, hurried = Late(), Late()
    record(build_from((patient, torch.randn(2, 4)), (), 0, "late"))
    monkeypatch.setattr(program, "_SLOW", 0)
    record(build_from((hurried, torch.randn(2, 4)), (), 0, "late"))
    assert patient.steps - hurried.steps >= program._RETRIES - 1


def test_an_operator_of_the_recorded_step_only_is_not_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "_RETRIES", 0)
    graph = profile(Workload.of(Fickle(12), torch.randn(2, 4)), warmup=1, steps=3, threads=1)
    provenance = {
        graph.strings[name]: PROVENANCES[code]
        for name, code in zip(graph.tasks.name, graph.tasks.provenance, strict=True)
    }
    assert provenance.pop("aten::sigmoid") is Provenance.ASSUMED
    assert set(provenance.values()) == {Provenance.MEASURED}


class Random(nn.Module):
    """Differs in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        operators = (torch.tanh, torch.sigmoid, torch.exp, torch.relu, torch.sin, torch.cos)
        for _ in range(3):
            x = operators[self.steps % len(operators)](x)
        return x


def test_steps_that_differ_are_refused_with_the_position() -> None:
    with pytest.raises(GraphError, match=r"\b\d+ % of their operators\b.*\boperator 0\b") as caught:
        profile(Workload.of(Random(), torch.randn(2, 4)), warmup=1, steps=3, threads=1)
    assert "branch" in (caught.value.remedy or "")


def test_an_odd_step_among_many_is_ignored() -> None:
    graph = profile(Workload.of(Fickle(7), torch.randn(2, 4)), warmup=1, steps=3, threads=1)
    assert graph.meta["aligned_steps"] == 2
    assert "aten::sigmoid" not in graph.strings


class Branching(nn.Module):
    """Runs one more layer in one of three steps, like a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.steps = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers[: 4 if self.steps % 3 == 2 else 3]:
            x = layer(x).tanh()
        return x.exp()


def test_branching_steps_are_aligned_and_report_how_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_RETRIES", 0)
    # The 12th step, of four layers, is recorded; the 6th, 7th and 8th were profiled.
    graph = profile(Workload.of(Branching(), torch.randn(2, 16)), warmup=1, steps=3, threads=1)
    assert 0 < graph.meta["unaligned_share"] < 0.4
    names = [graph.strings[name] for name in graph.tasks.name]
    assert names.count("aten::addmm") in (3, 4)
    assert names.count("aten::exp") == 1
    # A short operator may have no time after subtracting the profiler's cost; operators of only
    # the recorded step come on top.
    graph.check()
    assert replay(graph).step_ns >= 0.999 * graph.meta["step_ns"]["cpu_minimum"]


def test_a_step_without_operators_is_refused() -> None:
    with pytest.raises(GraphError, match="no operator"):
        profile(Workload.of(None, step=lambda: None), warmup=1, steps=3)


class Failing(nn.Module):
    """Fails in one of its steps; for their numbers see `Fickle`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ValueError("broken here")
        return x + 1


@pytest.mark.parametrize("step", [1, 2, 4, 7, 9, 11])
def test_an_error_of_the_step_is_raised_and_all_state_is_restored(step: int) -> None:
    with pytest.raises(ValueError, match="broken here"):
        profile(Workload.of(Failing(step), torch.randn(2)), warmup=1, steps=3, threads=1)
    assert gc.isenabled()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    graph = profile(workload("mlp"), warmup=1, steps=3, threads=1)
    assert len(graph.parameters) == 6


class Watching(nn.Module):
    """Records for each of its steps whether garbage is collected; step numbers as in `Fickle`."""

    # A class attribute, because a capture runs a copy of the model.
    collecting: ClassVar[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.collecting.append(gc.isenabled())
        return x + 1


def test_no_garbage_is_collected_in_profiled_steps() -> None:
    Watching.collecting.clear()
    profile(Workload.of(Watching(), torch.randn(2)), warmup=1, steps=3, threads=1)
    plain, profiled, memory = (Watching.collecting[i:j] for i, j in ((2, 5), (5, 8), (8, 10)))
    assert plain == [True] * 3
    assert profiled + memory == [False] * 5
    assert gc.isenabled()


def test_a_capture_collects_once_and_leaves_frozen_objects_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections = 0
    collect = gc.collect

    def counted(*arguments: int) -> int:
        nonlocal collections
        collections += 1
        return collect(*arguments)

    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        monkeypatch.setattr(gc, "collect", counted)
        profile(workload("mlp"), warmup=1, steps=9, threads=1)
        assert collections == 1
        # Some may have been freed, but none was returned to the collector.
        assert 0.9 * frozen < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_disabled_garbage_collection_stays_disabled() -> None:
    gc.disable()
    try:
        profile(workload("mlp"), warmup=1, steps=3, threads=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_measured_times_are_real() -> None:
    graph = captured("transformer")
    assert (graph.tasks.duration_ns[1:] >= 0).all()
    # Regardless of load, the plain steps' CPU time is divided among all tasks.
    assert (graph.tasks.duration_ns + graph.tasks.gap_ns).sum() > 100 * len(graph)
    assert graph.meta["profiler_ns_per_event"] >= 0
    assert graph.meta["threads"] == 1
    assert graph.samples == 3


def test_by_default_a_capture_profiles_two_dozen_steps() -> None:
    assert CaptureSettings().steps == 24


def test_a_machine_that_becomes_busy_runs_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_MAX_CAPTURE_S", 0.5)
    weight, calls = torch.ones(8, 8), itertools.count()

    def step() -> torch.Tensor:
        if next(calls) > 4:
            time.sleep(0.1)
        return weight @ weight

    graph = profile(Workload.of(step), warmup=1, steps=24)
    assert 3 <= graph.meta["aligned_steps"] < 12


@pytest.mark.parametrize("evaluated", [-1, 8])
def test_a_step_longer_than_the_time_limit_runs_a_few_times(evaluated: int) -> None:
    weight, calls = torch.ones(8, 8), itertools.count()

    def step() -> torch.Tensor:
        time.sleep(0.01)
        return (weight @ weight).exp() if next(calls) == evaluated else weight @ weight

    graph = profile(Workload.of(step), threads=1, time_limit_s=0.01)
    assert graph.meta["aligned_steps"] == 1
    assert next(calls) <= 10
    assert not any("exp" in name_of(graph, task) for task in range(len(graph)))


def test_long_steps_in_between_are_counted() -> None:
    weight, calls = torch.ones(8, 8), itertools.count()

    def step() -> torch.Tensor:
        for _ in range(1 if next(calls) % 5 else 100):
            result = weight @ weight
        return result

    graph = profile(Workload.of(step), steps=24, threads=1)
    assert graph.meta["long_steps"]["of"] == 24
    assert graph.meta["long_steps"]["share"] > 0.5
    assert "steps took more than twice as long as most" in long_steps_note(graph)
