"""Real steps that run operators on several threads."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.capture import CaptureSettings, capture
from slipstream.capture.trace import read_trace, recorded
from slipstream.errors import WorkloadError
from slipstream.graph import Dependency, Graph, Kind, StepPhase, replace_tasks, replay
from slipstream.technique import refusal, registry
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload, build_from

_WIDTH, _DEPTH = 96, 3
_POOL = ThreadPoolExecutor(2)


class Branches(nn.Module):
    """Two branches on two threads between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)
        self.left, self.right = (
            nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        # Both start before either ends, so that two threads are needed.
        met = threading.Barrier(2)
        done = [_POOL.submit(_along, branch, x, met) for branch in (self.left, self.right)]
        left, right = (future.result() for future in done)
        out: torch.Tensor = self.head(left + right)
        return out


def _along(branch: nn.Module, x: torch.Tensor, met: threading.Barrier) -> Any:
    met.wait(60)
    return branch(x)


@torch.jit.script
def _squares(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.relu(x @ w)
    return x


@torch.jit.script
def _both(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    forked = torch.jit.fork(_squares, x, a)
    here = _squares(x, b)
    return torch.jit.wait(forked) + here


class Forked(nn.Module):
    """Two branches, one of them on a TorchScript thread."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(_WIDTH, _WIDTH) / 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _both(x, self.a, self.b).mean()
        return out


def captured(model: nn.Module, loss: Any, targets: torch.Tensor | None, **more: Any) -> Graph:
    x = torch.randn(32, _WIDTH)
    batch = x if targets is None else (x, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    work = Workload.of(model, batch, loss, optimizer)
    return profile(work, steps=6, warmup=2, threads=1, **more)


@pytest.fixture(scope="module")
def branches() -> Graph:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    return captured(Branches(), loss, torch.randint(0, 4, (32,)), needs=("ids", "regions"))


def count(graph: Graph, name: str, phase: StepPhase, kind: Kind = Kind.OP) -> int:
    chosen = (graph.tasks.phase == phase) & (graph.tasks.kind == kind)
    return sum(graph.string(int(n)) == name for n in graph.tasks.name[chosen])


def lanes_of(graph: Graph, module: str) -> set[str]:
    forward = graph.tasks.phase == StepPhase.FORWARD
    tasks = [t for t in np.flatnonzero(forward) if _module(graph, t).startswith(module)]
    return {graph.lanes[graph.tasks.lane[t]] for t in tasks}


def _module(graph: Graph, task: int) -> str:
    return graph.string(int(graph.tasks.module[task]))


def test_every_operator_of_every_thread_is_recorded(branches: Graph) -> None:
    branches.check()
    assert "cpu" in branches.lanes
    assert len(branches.lanes) == 3
    assert count(branches, "aten::addmm", StepPhase.FORWARD) == 2 + 2 * _DEPTH
    # The gradient of the first layer's input is not needed.
    assert count(branches, "aten::mm", StepPhase.BACKWARD) == 2 * (2 + 2 * _DEPTH) - 1


def test_branches_have_separate_lanes_and_know_their_modules(branches: Graph) -> None:
    left, right = lanes_of(branches, "model.left"), lanes_of(branches, "model.right")
    assert len(left) == len(right) == 1
    assert left != right
    assert lanes_of(branches, "model.stem") == lanes_of(branches, "model.head") == {"cpu"}
    backward = branches.tasks.phase == StepPhase.BACKWARD
    modules = {_module(branches, t) for t in np.flatnonzero(backward)}
    assert {"model.left.0", "model.right.2", "model.stem"} <= modules
    sources = {branches.string(int(s)) for s in branches.tasks.source}
    assert any(source.startswith("test_capture_parallel.py:") for source in sources)


def test_the_step_adds_up_to_the_plain_one(branches: Graph) -> None:
    step_ns = branches.meta["step_ns"]
    assert replay(branches).step_ns == pytest.approx(step_ns["wall_minimum"], rel=1e-3)
    assert step_ns["wall_minimum"] <= step_ns["wall_median"]
    assert branches.samples == 32


def test_a_longer_branch_delays_the_step(branches: Graph) -> None:
    """A change on one thread affects the end of the step through the other."""
    handed = branches.edges.kind == Dependency.THREAD_TO_THREAD
    lanes = [
        (branches.lanes[branches.tasks.lane[s]], branches.lanes[branches.tasks.lane[t]])
        for s, t in zip(branches.edges.source[handed], branches.edges.target[handed], strict=True)
    ]
    (lane,) = lanes_of(branches, "model.left")
    assert ("cpu", lane) in lanes
    assert (lane, "cpu") in lanes
    longer = branches.tasks.duration_ns.copy()
    chosen = [
        t
        for t in np.flatnonzero(branches.tasks.phase == StepPhase.FORWARD)
        if _module(branches, t) == "model.left.1"
        and branches.string(int(branches.tasks.name[t])) == "aten::addmm"
    ]
    now = replay(branches).step_ns
    # More than the other branch can take, even if it was delayed during recording.
    more = 20 * now
    longer[chosen[0]] += more

    then = replay(replace_tasks(branches, duration_ns=longer)).step_ns
    assert now + 0.9 * more < then <= (now + more) * (1 + 1e-9)


def test_unrecordable_and_unpredictable_steps_give_a_reason(branches: Graph) -> None:
    assert "several threads" in branches.meta["memory_reason"]
    assert not len(branches.memory)
    assert "several threads" in branches.meta["regions"]["reason"]
    assert "several threads" in branches.statistics.reasons["ids"]
    for name, kind in registry().items():
        reason = refusal(kind(), branches)
        assert reason is not None, name
        assert "several threads" in reason or "NVIDIA GPUs" in reason


def test_forks_of_torchscript_are_lanes_too() -> None:
    torch.manual_seed(0)
    graph = captured(Forked(), None, None)
    assert graph.meta["lanes_of"] == "cpu"
    assert count(graph, "aten::mm", StepPhase.FORWARD) == 6
    assert len(graph.lanes) > 1
    assert replay(graph).step_ns == pytest.approx(graph.meta["step_ns"]["wall_minimum"], rel=1e-3)


def test_a_nearly_idle_thread_is_reported_and_not_merged() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60))), torch.randn(4, 8)

    def step() -> torch.Tensor:
        out: torch.Tensor = model(x).sum()
        _POOL.submit(torch.zeros, 3).result()
        out.backward()
        return out

    built = build_from(step, (), 0, "one small thing elsewhere")
    program = capture(CaptureSettings(warmup=1, steps=3, threads=1, own_process=False))(built)
    graph = _drive(program, built)
    assert graph.lanes == ("cpu",)
    assert 1 <= graph.meta["elsewhere"]["operators"] <= 3
    assert 0 < graph.meta["elsewhere"]["share"] < 0.02
    names = [graph.string(int(name)) for name in graph.tasks.name]
    assert "aten::zeros" not in names
    assert graph.meta["unaligned_share"] == 0.0


def _drive(program: Any, built: Any) -> Graph:
    value = None
    while True:
        try:
            program.send(value)
        except StopIteration as end:
            found: Graph = end.value
            return found
        value = built.step()


def test_an_execution_trace_holds_one_thread(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with recorded(tmp_path / "trace.json"):
        for _ in range(3):
            torch.relu(x)
        _POOL.submit(torch.sigmoid, x).result()
        torch.tanh(x)
    names = [node.name for node in read_trace(tmp_path / "trace.json")]
    assert names.count("aten::relu") == 3
    assert "aten::tanh" in names
    assert "aten::sigmoid" not in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_a_workload_that_requests_a_missing_device_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(2, 2).to('cuda')\n"
        "    return model, torch.zeros(1, 2)\n"
    )
    with pytest.raises(WorkloadError) as error:
        profile(f"{script}:make", steps=1)
    assert str(error.value.where).endswith("train.py:3")
    assert re.search(r"\bGPU\b.*\bnone here\b", str(error.value.remedy))
