"""A step whose optimizer calls a closure gives the same graph as one without."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.capture import CaptureSettings, capture
from slipstream.capture.clocks import UpdateClock
from slipstream.capture.closures import ClosureWatch
from slipstream.graph import Graph, StepPhase
from slipstream.workload import Workload, run_steps


def closure_step(optimizer: torch.optim.Optimizer, passes: Callable[[], Any]) -> Any:
    return optimizer.step(passes)  # type: ignore[arg-type]


def plain_step(optimizer: torch.optim.Optimizer, passes: Callable[[], Any]) -> Any:
    loss = passes()
    optimizer.step()
    return loss


@cache
def recorded(kind: str, take_step: Callable[..., Any]) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(32, 8), torch.randn(32, 4)

    def passes() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    settings = CaptureSettings(1, 3, 1, own_process=False, other_size=False)
    workload = Workload.of(lambda: take_step(optimizer, passes))
    return run_steps(workload.build(), capture(settings))


def shape_of(graph: Graph) -> list[tuple[str, StepPhase, str, str]]:
    tasks = [graph.task(number) for number in range(len(graph))]
    return [(task.name, task.phase, task.module, task.scope) for task in tasks]


def test_the_graph_is_the_same_with_and_without_a_closure() -> None:
    with_closure, without = recorded("Adam", closure_step), recorded("Adam", plain_step)
    assert shape_of(with_closure) == shape_of(without)


def test_every_pass_of_lbfgs_has_its_phase() -> None:
    graph = recorded("LBFGS", closure_step)
    phases = {task.phase for task in map(graph.task, range(len(graph))) if "addmm" in task.name}
    assert phases == {StepPhase.FORWARD}
    assert {StepPhase.BACKWARD, StepPhase.OPTIMIZER} <= set(graph.tasks.phase.tolist())


@pytest.mark.parametrize("named", [False, True])
def test_the_closure_is_not_part_of_the_update(named: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure() -> float:
        return float(sum(range(2_000_000)))

    with ClosureWatch() as closures, UpdateClock(optimizer, closures) as clock:
        loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        update = clock.take()
    assert loss == closure()
    assert 0 < update.cpu_ns < closures.cpu_ns
