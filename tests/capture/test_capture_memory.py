"""The memory of a recorded step, against PyTorch's allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from slipstream.capture import events, memory
from slipstream.graph import Graph, Role, StepPhase, replay
from slipstream.verbs.profiling import profile
from slipstream.workload import BuiltWorkload, Workload, build_from
from tiny_models import MODELS, captured, parts


def recorded(*made: Any) -> Graph:
    return profile(Workload.of(*made), warmup=1, steps=2, threads=1)


def by_role(graph: Graph) -> dict[Role, int]:
    found = graph.memory
    return {role: int(found.nbytes[found.role == role].sum()) for role in Role}


def allocator_peak(built: BuiltWorkload) -> int:
    """Return the bytes before a step plus the maximum that the allocator adds during it."""
    for _ in range(3):
        last = built.step()
    with events.profiler(record_shapes=True, profile_memory=True) as profiler:
        # As in a loop, the previous result exists while the next one is computed.
        last = built.step()
        before = sum(size for size, _ in memory.held(built).values())
        before += last.untyped_storage().nbytes()
        with torch.profiler.record_function("begin"):
            pass
        last = built.step()
    changes: list[tuple[int, int]] = []
    begin = [0]

    def walk(events: Any) -> None:
        for event in events:
            if event.name == "begin":
                begin[0] = event.end_time_ns
            if event.tag == torch._C._profiler._EventType.Allocation:
                changes.append((event.start_time_ns, event.typed[1].alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    after = [size for time, size in sorted(changes) if time >= begin[0]]
    return before + max(0, int(np.cumsum(after).max()))


@pytest.mark.parametrize("name", [*MODELS, "mlp inference", "transformer inference"])
def test_the_peak_equals_the_allocators(name: str) -> None:
    predicted = replay(captured(name)).peak_bytes
    assert predicted == pytest.approx(
        allocator_peak(build_from(parts(name), (), 0, name)), rel=0.02
    )


def test_existing_storages_have_their_role() -> None:
    model, (inputs, targets), *_ = parts("conv")
    found = captured("conv").memory
    before = found.producer < 0
    lasting = before & (found.release < 0)

    def held(role: Role) -> int:
        return int(found.nbytes[lasting & (found.role == role)].sum())

    parameters = sum(p.nbytes for p in model.parameters())
    assert held(Role.PARAMETER) == parameters
    assert held(Role.BUFFER) == sum(b.nbytes for b in model.buffers())
    assert held(Role.INPUT) == inputs.nbytes + targets.nbytes
    # Adam: two moments, and a counter of four bytes, for every parameter.
    assert held(Role.OPTIMIZER) == 2 * parameters + 4 * len(list(model.parameters()))
    # The step begins by freeing the previous gradients, and leaves its own.
    gradient = found.role == Role.GRADIENT
    assert int(found.nbytes[gradient & before].sum()) == parameters
    assert int(found.nbytes[gradient & ~before & (found.release < 0)].sum()) == parameters


def test_activations_live_from_forward_to_backward() -> None:
    graph = captured("mlp")
    found, phase = graph.memory, graph.tasks.phase
    saved = found.role == Role.ACTIVATION
    assert saved.any()
    assert (phase[found.producer[saved]] == StepPhase.FORWARD).all()
    assert (phase[found.release[saved]] != StepPhase.FORWARD).all()
    for a in np.flatnonzero(saved & (found.storage >= 0)).tolist():
        made = found.producer[a]
        assert found.storage[a] in graph.storages(int(made))


def test_a_storage_shared_by_two_parameters_counts_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.detach())
    model = nn.Sequential(first, second)
    found = memory.held(BuiltWorkload(model, torch.randn(2, 4)))
    assert sorted(role for _, role in found.values()) == [Role.PARAMETER, Role.INPUT]


def test_parameters_that_wrap_others_hold_the_storages_of_these() -> None:
    model = nn.Linear(4, 4, bias=False)
    parts = torch.ones(4, 4), torch.zeros(4, 4)
    model.weight = nn.Parameter(TwoTensor(*parts))
    found = memory.held(BuiltWorkload(model, torch.randn(2, 4)))
    storages = {part.untyped_storage().data_ptr() for part in parts}
    assert {ptr for ptr, (_, role) in found.items() if role is Role.PARAMETER} == storages


def test_tensors_inside_transforms_have_no_storage() -> None:
    found: list[memory.Held] = []

    def square(value: torch.Tensor) -> torch.Tensor:
        found.append(memory.held(BuiltWorkload(lambda: value, batch=value)))
        return value.square().sum()

    torch.func.vmap(torch.func.grad(square))(torch.ones(2, 3))
    assert found == [{}]


def test_a_tensor_that_no_walk_finds_is_detected_when_used() -> None:
    secret = torch.randn(64, 64)

    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ secret

    graph = recorded(Hidden(), torch.randn(3, 64))
    assert by_role(graph)[Role.INPUT] == secret.nbytes + 3 * 64 * 4


@pytest.mark.parametrize("name", ["mlp", "mlp inference", "conv inference"])
def test_every_parameter_of_the_model_is_known_even_without_an_optimizer(name: str) -> None:
    assert len(captured(name).parameters) == len(list(parts(name)[0].parameters()))


def test_an_opaque_step_has_parameters_by_their_use() -> None:
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(4, 16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph = recorded(step)
    size = sum(p.nbytes for p in model.parameters())
    roles = by_role(graph)
    assert roles[Role.PARAMETER] == size
    assert roles[Role.INPUT] == batch.nbytes
    assert replay(graph).peak_bytes >= 3 * size + batch.nbytes
