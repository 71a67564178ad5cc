"""Makers and readers of values, backward tasks, and the layers that are found with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from slipstream.graph import Call, Graph, StepPhase, TensorSpec, replace_tasks
from slipstream.graph.flow import Flow, Match, flow_of, matches
from slipstream.graph.layers import layer_kinds, layers, module_layers
from small_graphs import graph_of as by_hand
from small_steps import graph_of, tail_heavy

NAMES = ("mlp", "conv", "lstm", "dropout", "transformer", "conv inference")
RELU = "aten::relu(Tensor self) -> Tensor"
RELU_IN_PLACE = "aten::relu_(Tensor(a!) self) -> Tensor(a!)"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
SPEC = TensorSpec("float32", (2, 3), (3, 1))


@pytest.fixture(params=NAMES)
def graph(request: pytest.FixtureRequest) -> Graph:
    return graph_of(request.param)


def unary(*rows: tuple[str, int, int]) -> Flow:
    """The flow of a step from the schema, input storage and output storage of each task."""
    calls = {op: Call(op, (SPEC,), (SPEC,)) for op, *_ in rows}
    made = by_hand(
        [(0, 1.0, 0.0)] * len(rows),
        calls=tuple(calls.values()),
        operand_start=np.arange(len(rows) + 1) * 2,
        operands=np.array([storage for _, *pair in rows for storage in pair], np.int32),
    )
    numbers = np.array([list(calls).index(op) for op, *_ in rows], np.int32)
    return Flow(replace_tasks(made, call=numbers))


def test_makers_precede_readers(graph: Graph) -> None:
    flow = flow_of(graph)
    for task in range(len(graph)):
        assert all(maker < task for maker in flow.makers[task])
        assert all(reader > task and task in flow.makers[reader] for reader in flow.readers[task])
        assert all(
            flow.views[view] and flow.makers[view][0] == task for view in flow.views_of[task]
        )


def test_a_storage_that_is_written_again_holds_another_value() -> None:
    flow = unary((RELU, 0, 1), (RELU, 1, 2), (RELU, 0, 1), (RELU, 1, 3))
    assert [flow.makers[task] for task in range(4)] == [[-1], [0], [-1], [2]]
    assert flow.only_reader(0) == 1
    # The second write waits for the reader of the first one.
    assert flow.waits[2] == [0, 1]


def test_views_pass_on_the_value_that_they_look_at() -> None:
    flow = unary((RELU, 0, 1), (VIEW, 1, 1), (RELU, 1, 2), (RELU_IN_PLACE, 1, 1), (RELU, 1, 3))
    assert flow.views.tolist() == [False, True, False, False, False]
    assert flow.readers[0] == [2, 3]
    assert flow.views_of[0] == [1]
    assert flow.makers[4] == [3]
    assert flow.waits[3] == [0, 2]
    assert flow.only_reader(0) == -1


def test_an_unknown_storage_has_no_maker() -> None:
    flow = unary((RELU, 0, -1), (RELU, -1, 1))
    assert flow.makers[1] == [-1]
    assert flow.readers[0] == []


def test_a_step_without_tasks_has_no_flow() -> None:
    flow = Flow(by_hand([]))
    assert len(flow.views) == len(flow.makers.item) == len(flow.waits.item) == 0


def test_what_is_overwritten_was_read_before(graph: Graph) -> None:
    flow = flow_of(graph)
    users: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for task in range(len(graph)):
        call, (inputs, outputs) = flow.call(task), flow.operands(task)
        before.append(set(flow.waits[task]).union(*(before[other] for other in flow.waits[task])))
        if call is None or flow.views[task]:
            continue
        assert {maker for maker in flow.makers[task] if maker >= 0} <= before[task]
        for storage in {*outputs, *(inputs if "!" in call.op else ())}:
            assert before[task].issuperset(users.get(storage, ()))
        for storage in inputs:
            users.setdefault(storage, []).append(task)


def test_a_backward_task_has_the_number_of_its_forward(graph: Graph) -> None:
    tasks = graph.tasks
    numbered = 0
    for match in matches(graph, layers):
        numbered += len(match.backward)
        for back in match.backward:
            assert back > match.forward[-1]
            assert tasks.phase[back] == StepPhase.BACKWARD
            assert tasks.sequence[back] == tasks.sequence[match.forward[0]] >= 0
    assert bool(numbered) == bool((tasks.phase == StepPhase.BACKWARD).any())


def test_backward_tasks_without_a_number_belong_to_nothing() -> None:
    graph = tail_heavy()
    assert [len(match.backward) for match in module_layers(graph)] == [1] + [2] * 6
    without = replace_tasks(graph, sequence=np.full(len(graph), -1))
    assert [match.backward for match in module_layers(without)] == [()] * 7


def test_weights_are_parameters(graph: Graph) -> None:
    found = matches(graph, layers)
    assert found
    for match in found:
        assert set(match.weights) <= set(graph.parameters.tolist())
        for spec in match.weights.values():
            assert spec.shape == match.settings.weight_shape(match.x)
            assert match.y.numel % match.settings.outputs == 0


def test_layers_of_one_kind_differ_only_in_their_tasks() -> None:
    graph = tail_heavy()
    found, kinds = module_layers(graph), layer_kinds(graph)
    assert [match.settings.outputs for match in found] == [48] * 6 + [300]
    assert kinds.task.tolist() == [task for match in found for task in match.tasks]
    assert len(set(kinds.task.tolist())) == len(kinds.task)
    for match, number in zip(found, kinds.kind, strict=True):
        kind = kinds.kinds[number]
        assert (kind.module, kind.x, kind.settings) == (match.module, match.x, match.settings)
    widest = kinds.only(lambda match: match.settings.outputs == 300)
    assert widest.task.tolist() == list(found[-1].tasks)
    assert not widest.kind.any()


def test_the_matches_of_several_rules_are_in_program_order(graph: Graph) -> None:
    def first_calls(flow: Flow) -> Iterator[Match]:
        for task in np.flatnonzero(flow.complete)[:3].tolist():
            call = flow.call(task)
            spec = call.inputs[0] if call and call.inputs else SPEC
            yield Match("any", "", (task,), (), spec, spec, {}, refusal="only looked at")

    found = matches(graph, layers, first_calls)
    firsts = [match.forward[0] for match in found]
    assert firsts == sorted(firsts)
    assert sum(match.refusal is not None for match in found) == 3
    assert matches(graph, layers, first_calls) is found


def test_a_boundary_is_what_others_make_and_read() -> None:
    flow = unary((RELU, 0, 1), (RELU, 1, 2), (RELU, 2, 3), (RELU, 3, 4))
    assert flow.boundary([1, 2]) == ({1: SPEC}, {3: SPEC})
    read, written = flow.boundary(range(4))
    assert (set(read), set(written)) == ({0}, set())
    # Task 2 takes the number of what task 0 made; task 3 reads the later value.
    reused = unary((RELU, 0, 1), (RELU, 1, 2), (RELU, 2, 1), (RELU, 1, 3))
    assert reused.boundary([0, 1]) == ({0: SPEC}, {2: SPEC})


def test_only_matmuls_of_parameters_are_layers() -> None:
    graph = graph_of("dropout")
    product = [match for match in matches(graph, layers) if match.kind == "linear"]
    foreign = np.setdiff1d(graph.parameters, [min(product[0].weights)]).astype(np.int32)
    other = replace(graph, parameters=foreign)
    assert not matches(other, layers)[0].weights
    assert matches(other, layers)[0].forward == product[0].forward
