"""The source lines of a step's operators, in a script written for the test."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from slipstream.graph import Attribution, Cost, Graph, StepPhase, attribute, replay
from slipstream.verbs.explaining.lines import lines_report
from slipstream.verbs.profiling import profile

_PROJECT = {
    "parts.py": """
        import functools
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint


        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2  # in forward

            @staticmethod
            def backward(ctx, gradient):
                (x,) = ctx.saved_tensors
                for _ in range(40):
                    gradient = gradient + x.sin() * 0
                return gradient * 2


        def logged(function):
            @functools.wraps(function)
            def inner(*arguments):
                return function(*arguments)  # wrapper
            return inner


        @logged
        def scaled(x):
            return x * 3  # scaled


        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Linear(16, 32)

            def inner(self, x):
                return torch.tanh(self.up(x))  # inner

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)  # checkpointed
    """,
    "train.py": """
        import torch
        from torch import nn
        from torch.nn import functional
        from parts import Block, Slow, scaled


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = Block()  # makes block
                self.norm = nn.LayerNorm(32)

            def forward(self, x):
                x = self.block(x)
                x = Slow.apply(x)  # applied
                x = scaled(self.norm(x))  # normed
                return x


        def make_workload():
            model = nn.Sequential(
                Net(),
                nn.Linear(32, 10),  # in Sequential
            )
            batch = torch.randn(8, 16), torch.randint(0, 10, (8,))
            optimizer = torch.optim.AdamW(model.parameters())  # optimizer
            return model, batch, functional.cross_entropy, optimizer  # returned
    """,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in _PROJECT.items():
        (root / name).write_text(textwrap.dedent(text).lstrip())
    return root


@pytest.fixture(scope="module")
def graph(project: Path) -> Graph:
    return profile(f"{project / 'train.py'}:make_workload", warmup=1, steps=2, threads=1)


@pytest.fixture(scope="module")
def found(graph: Graph) -> Attribution:
    return attribute(replay(graph))


def where(mark: str) -> str:
    """``file:line`` of the line with this comment."""
    for file, text in _PROJECT.items():
        for number, line in enumerate(textwrap.dedent(text).lstrip().splitlines(), start=1):
            if line.endswith(f"# {mark}"):
                return f"{file}:{number}"
    raise LookupError(mark)


def operators(graph: Graph, mark: str, phase: StepPhase) -> set[str]:
    tasks = graph.tasks
    return {
        graph.string(int(name)).removeprefix("aten::")
        for name, source, part in zip(tasks.name, tasks.source, tasks.phase, strict=True)
        if graph.string(int(source)) == where(mark) and part == phase
    }


def test_the_parts_add_up_exactly(found: Attribution) -> None:
    total = sum(found.parts(), Cost())
    assert total.time_ns == found.step_ns > 0
    assert total.memory_bytes == found.peak_bytes > 0
    functions = sum(found.functions.values(), Cost())
    assert functions + found.page_faults + found.untracked == total
    assert found.modules
    assert all(name and (cost.tasks or cost.memory_bytes) for name, cost in found.modules.items())


def test_a_backward_operator_belongs_to_its_forward_line(graph: Graph) -> None:
    assert "native_layer_norm_backward" in operators(graph, "normed", StepPhase.BACKWARD)
    assert "native_layer_norm" in operators(graph, "normed", StepPhase.FORWARD)
    assert "nll_loss_backward" in operators(graph, "returned", StepPhase.BACKWARD)
    tasks = graph.tasks
    numbered = (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence >= 0)
    assert numbered.any()
    assert (tasks.source[numbered] != 0).all()


def test_a_functions_own_backward_belongs_to_the_line_that_applies_it(graph: Graph) -> None:
    assert "sin" in operators(graph, "applied", StepPhase.BACKWARD)
    assert operators(graph, "in forward", StepPhase.FORWARD) == {"mul"}


def test_the_deepest_line_of_the_project_counts_through_wrappers(graph: Graph) -> None:
    assert operators(graph, "scaled", StepPhase.FORWARD) == {"mul"}
    assert operators(graph, "wrapper", StepPhase.FORWARD) == set()
    callers = graph.meta["lines"]["callers"][where("scaled")]
    assert callers == [[where("wrapper"), where("normed")]]


def test_recomputation_belongs_to_its_own_line(graph: Graph) -> None:
    """Checkpointing runs the block's operators again during the backward pass."""
    assert "tanh" in operators(graph, "inner", StepPhase.FORWARD)
    assert {"addmm", "tanh_backward"} <= operators(graph, "inner", StepPhase.BACKWARD)
    assert operators(graph, "checkpointed", StepPhase.FORWARD) <= {"detach"}


def test_tasks_without_a_calling_line_belong_to_the_line_of_their_module(graph: Graph) -> None:
    assert "addmm" in operators(graph, "in Sequential", StepPhase.FORWARD)
    assert {"mm"} <= operators(graph, "in Sequential", StepPhase.BACKWARD)
    assert operators(graph, "optimizer", StepPhase.OPTIMIZER)


def test_modules_know_the_line_that_created_them(found: Attribution) -> None:
    assert found.made_at("model.0.block") == where("makes block")
    assert found.made_at("model.1") == where("in Sequential")
    assert found.made_at("model.9") == ""


def test_a_module_costs_what_it_contains(found: Attribution) -> None:
    whole, net = found.module("model"), found.module("model.0")
    assert whole.tasks > net.tasks > found.module("model.0.block").tasks > 0
    assert found.module("model.0.nothing") == Cost()


def test_functions_have_their_qualified_names(found: Attribution) -> None:
    assert ("train.py", "Net.forward") in found.functions
    assert ("parts.py", "Block.inner") in found.functions


def test_an_edit_changes_the_cost_of_its_line(graph: Graph, found: Attribution) -> None:
    edit = graph.what_if("slower")
    edit.select(source=where("normed")).scale(3.0)
    slower = attribute(replay(edit.apply("three times as slow")))
    before, after = (
        next(line for line in costs.lines if line.name == where("normed"))
        for costs in (found, slower)
    )
    assert after.cost.time_ns > before.cost.time_ns
    assert sum(slower.parts(), Cost()).time_ns == slower.step_ns


def test_explain_shows_the_most_expensive_lines_with_their_location(graph: Graph) -> None:
    tables, payload = lines_report(replay(graph), 3)
    parts = [*payload["lines"], payload["page_faults"], payload["untracked"]]
    assert sum(part["time_ns"] for part in parts) == payload["step_ns"]
    assert sum(part["memory_bytes"] for part in parts) == payload["peak_bytes"]
    rows = tables[0].rows
    shown = [(file, int(at)) for file, _, at in (str(r[0]).partition(":") for r in rows[:3])]
    assert shown == sorted(shown)
    assert all(row[-1] for row in rows[:3]), "each with its text"
    assert rows[-1][0] == "(untracked)"


def test_a_recording_without_lines_is_untracked_as_a_whole(graph: Graph) -> None:
    from dataclasses import replace

    from slipstream.graph import replace_tasks

    nothing = replace_tasks(graph, source=np.zeros_like(graph.tasks.source))
    found = attribute(replay(replace(nothing, meta={**graph.meta, "lines": ["?"]})))
    assert not found.lines
    assert found.untracked.time_ns + found.page_faults.time_ns == found.step_ns
    assert found.untracked_memory == 1.0
