"""The operators that become tasks, and their phases and modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.capture.modules import PREFIX
from slipstream.capture.trace import Node
from slipstream.capture.units import find_units
from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from tiny_models import MODELS, captured, in_phase, module_of, name_of, parts

SPEC = TensorSpec("float32", (2, 2), (2, 1))
ENGINE = "autograd::engine::evaluate_function: "
SCHEMAS = {
    "aten::mm": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "aten::linear": "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "aten::silu_backward": "aten::silu_backward(Tensor grad_output, Tensor self) -> Tensor",
    "aten::add": "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    "aten::detach": "aten::detach(Tensor(a) self) -> Tensor(a)",
}


def node(name: str, parent: int = -1, sequence: int = -1, storages: tuple[int, ...] = ()) -> Node:
    call = Call(SCHEMAS[name], (SPEC,), (SPEC,)) if name in SCHEMAS else None
    return Node(name, parent, sequence, call, storages)


def test_the_outermost_operator_with_a_kernel_is_the_unit() -> None:
    nodes = [node("aten::linear"), node("aten::mm", 0), node("aten::copy_", 1), node("aten::mm")]
    units = find_units(nodes)
    assert units.nodes.tolist() == [1, 3]
    assert units.first.tolist() == [1, 3]
    assert units.last.tolist() == [2, 3]
    assert units.scope == ("aten::linear", "")


def test_an_operator_with_a_kernel_and_a_composite_form_is_a_unit() -> None:
    assert len(find_units([node("aten::silu_backward")]).nodes) == 1


def test_module_annotations_are_not_events() -> None:
    nodes = [node(PREFIX + "model"), node(PREFIX + "model.a", 0), node("aten::mm", 1)]
    units = find_units(nodes)
    assert units.events == ("aten::mm",)
    assert units.module == ("model.a",)


@pytest.mark.parametrize("first", [0, 7])
def test_backward_belongs_to_the_module_of_its_number(first: int) -> None:
    nodes = [
        node(PREFIX + "model.a"), node("aten::mm", 0, first),
        node(PREFIX + "model.b"), node("aten::mm", 2, first + 1),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 4, first + 1), node("aten::mm", 5),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 7, first), node("aten::mm", 8),
    ]  # fmt: skip
    units = find_units(nodes)
    assert units.module == ("model.a", "model.b", "model.b", "model.a")
    assert [StepPhase(p).name for p in units.phase] == ["FORWARD"] * 2 + ["BACKWARD"] * 2


def test_operators_added_by_the_engine_belong_to_the_one_it_evaluates() -> None:
    nodes = [
        node(PREFIX + "model.a"), node("aten::mm", 0, 7),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 2, 7), node("aten::mm", 3),
        node("aten::add", 2),
    ]  # fmt: skip
    units = find_units(nodes)
    assert units.module[-1] == "model.a"
    assert units.sequence[-1] == 7


def test_accumulation_belongs_to_the_module_that_made_the_gradient() -> None:
    nodes = [
        node(PREFIX + "model.a"), node("aten::mm", 0, 7, (1, 2)),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 2, 7), node("aten::mm", 3, -1, (2, 9)),
        node(ENGINE + "torch::autograd::AccumulateGrad"),
        node("torch::autograd::AccumulateGrad", 5), node("aten::detach", 6, -1, (9, 9)),
    ]  # fmt: skip
    assert find_units(nodes).module[-1] == "model.a"


def test_the_operator_that_made_the_autograd_node_is_the_last_with_its_number() -> None:
    # An operator that needs no gradient has the number of the next one.
    nodes = [
        node(PREFIX + "model.a"), node("aten::mm", 0, 7),
        node(PREFIX + "model.b"), node("aten::mm", 2, 7),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 4, 7), node("aten::mm", 5),
    ]  # fmt: skip
    assert find_units(nodes).module[-1] == "model.b"


def test_a_second_forward_pass_is_forward_again() -> None:
    nodes = [
        node(PREFIX + "model"), node("aten::mm", 0, 7),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 2, 7), node("aten::mm", 3),
        node(PREFIX + "model"), node("aten::mm", 5, 8), node("aten::add", -1, 9),
        node(ENGINE + "MmBackward0"), node("MmBackward0", 8, 8), node("aten::mm", 9),
        node("Optimizer.step#SGD.step"), node("aten::add", 11), node("aten::add"),
    ]  # fmt: skip
    phases = [StepPhase(phase).name for phase in find_units(nodes).phase]
    assert phases == [
        "FORWARD", "BACKWARD", "FORWARD", "FORWARD", "BACKWARD", "OPTIMIZER", "OTHER",
    ]  # fmt: skip


TRAINED = sorted(MODELS)
OUTSIDE = ("aten::view", "aten::_log_softmax", "aten::nll_loss", "aten::ones_like")


@pytest.mark.parametrize("name", TRAINED)
def test_every_task_of_the_model_knows_its_module(name: str) -> None:
    """All except the loss, which `tiny_models` computes outside modules."""
    graph = captured(name)
    names = {"model"} | {f"model.{part}" for part, _ in parts(name)[0].named_modules() if part}
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
        for task in in_phase(graph, phase):
            module = module_of(graph, task)
            assert module in names or name_of(graph, task).startswith(OUTSIDE), (
                name_of(graph, task), graph.string(graph.tasks.scope[task]),
            )  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_every_task_has_its_phase(name: str) -> None:
    graph = captured(name)
    phases = graph.tasks.phase[1:]
    # The last task is the step's `loss.detach()`.
    assert name_of(graph, len(graph) - 1) == "aten::detach"
    assert phases[-1] == StepPhase.OTHER
    forward, backward, update = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER
    assert set(phases[:-1].tolist()) == {forward, backward, update}
    assert (np.diff(phases[:-1].astype(int)) >= 0).all()


def weight_of(graph: Graph, task: int) -> int:
    """Return the parameter storage that a task reads, or -1."""
    found = set(graph.storages(task).tolist()) & set(graph.parameters.tolist())
    return min(found, default=-1)


@pytest.mark.parametrize("name", ["mlp", "transformer", "transformer, separate projections"])
def test_backward_matmuls_with_a_weight_belong_to_its_layer(name: str) -> None:
    """An independent reference: the weight's storage, which the attribution does not use."""
    graph = captured(name)
    owner = {
        weight_of(graph, task): module_of(graph, task)
        for task in in_phase(graph, StepPhase.FORWARD)
        if name_of(graph, task) == "aten::addmm"
    }
    products = [
        task
        for task in in_phase(graph, StepPhase.BACKWARD)
        if name_of(graph, task) == "aten::mm" and weight_of(graph, task) >= 0
    ]
    assert len(products) >= len(owner) - 1
    for task in products:
        weights = set(graph.storages(task).tolist()) & set(graph.parameters.tolist())
        assert any(owner.get(weight) == module_of(graph, task) for weight in weights)


def test_source_lines_name_the_users_file() -> None:
    graph = captured("transformer")
    sources = {
        graph.string(graph.tasks.source[task]) for task in in_phase(graph, StepPhase.FORWARD)
    }
    assert any(source.startswith("tiny_models.py:") for source in sources)


def test_the_update_and_the_backward_pass_have_the_lines_that_called_them() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(2, 4)

    def step() -> None:
        optimizer.zero_grad()
        (model(inputs) * inputs).sum().backward()
        optimizer.step()

    first = step.__code__.co_firstlineno
    graph = profile(Workload.of(model, step=step), steps=2)
    lines = {
        phase: {graph.string(int(graph.tasks.source[task])) for task in in_phase(graph, phase)}
        for phase in (StepPhase.BACKWARD, StepPhase.OPTIMIZER)
    }
    here = Path(__file__).name
    assert f"{here}:{first + 2}" in lines[StepPhase.BACKWARD]
    assert "" not in lines[StepPhase.BACKWARD]
    assert lines[StepPhase.OPTIMIZER] == {f"{here}:{first + 3}"}
