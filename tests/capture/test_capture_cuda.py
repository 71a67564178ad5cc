"""Captures of steps on a real CUDA device, if present."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.graph import Dependency, Graph, Kind, Role, StepPhase, replace_tasks, replay
from slipstream.technique import refusal, registry
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_BATCH, _WIDTH = 64, 512


def parts(width: int = _WIDTH) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).cuda()
    batch = torch.randn(_BATCH, width).cuda(), torch.randint(0, 10, (_BATCH,)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    return model, batch, nn.CrossEntropyLoss(), optimizer


@pytest.fixture(scope="module")
def graph() -> Graph:
    return profile(Workload.of(*parts()), steps=12)


def kernels(graph: Graph) -> Any:
    return np.flatnonzero(graph.tasks.kind == Kind.KERNEL)


def test_nearly_all_kernels_are_linked_and_the_device_is_named(graph: Graph) -> None:
    graph.check()
    assert graph.meta["device"] == "cuda"
    assert graph.meta["device_name"] == torch.cuda.get_device_name(0)
    assert graph.meta["kernels"] > 0
    assert graph.meta["kernels_linked"] >= 0.995 * graph.meta["kernels"]
    assert (graph.edges.kind == Dependency.LAUNCH).sum() >= graph.meta["kernels_linked"]


def test_the_simulated_step_equals_the_plain_one(graph: Graph) -> None:
    step_ns = graph.meta["step_ns"]
    assert step_ns["unsynchronised"] <= step_ns["wall_median"] * 1.1
    assert replay(graph).step_ns == pytest.approx(step_ns["wall_minimum"], rel=0.15)


def test_kernels_belong_to_modules_and_phases(graph: Graph) -> None:
    found = {
        (graph.string(int(graph.tasks.module[k])), StepPhase(graph.tasks.phase[k]))
        for k in kernels(graph)
    }
    for module in ("model.0", "model.1", "model.2", "CrossEntropyLoss"):
        assert (module, StepPhase.FORWARD) in found
        assert (module, StepPhase.BACKWARD) in found
    assert any(phase is StepPhase.OPTIMIZER for _, phase in found)


def test_the_step_waits_for_the_device_once_at_its_end(graph: Graph) -> None:
    waits = [graph.string(int(n)) for n in graph.tasks.name[graph.tasks.kind == Kind.WAIT]]
    assert waits.count("cudaDeviceSynchronize") == 1
    assert (graph.edges.kind == Dependency.SYNCHRONISATION).any()


def test_the_peak_equals_the_allocators(graph: Graph) -> None:
    model, (inputs, targets), loss, optimizer = parts()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    here = torch.cuda.max_memory_allocated()
    # Of another copy of the same objects; the captured one may still exist.
    assert replay(graph).peak_bytes >= 0.9 * sum(p.numel() * 4 * 2 for p in model.parameters())
    assert replay(graph).peak_bytes <= 2.5 * here
    assert {Role.PARAMETER, Role.GRADIENT} <= set(graph.memory.role.tolist())


def test_faster_kernels_never_lengthen_the_step(graph: Graph) -> None:
    duration = graph.tasks.duration_ns.copy()
    duration[kernels(graph)] /= 2
    assert replay(replace_tasks(graph, duration_ns=duration)).step_ns <= replay(graph).step_ns


def test_a_technique_that_needs_operators_explains_why_it_does_not_apply(graph: Graph) -> None:
    for name, kind in registry().items():
        if not kind.traits.kernels_only:
            assert "CUDA" in str(refusal(kind(), graph)), name
