"""Tests of numbers of storages in an execution trace."""

from __future__ import annotations

import numpy as np

from slipstream.capture.storages import number_storages
from slipstream.capture.trace import Node
from slipstream.graph.call import Call, TensorSpec
from tiny_models import captured

_SPEC = TensorSpec("float32", (2,), (1,), "cpu")


def operator(inputs: list[int], outputs: list[int], parent: int = -1) -> Node:
    call = Call("aten::op", (_SPEC,) * len(inputs), (_SPEC,) * len(outputs))
    return Node("aten::op", parent, -1, call, (*inputs, *outputs))


def numbers(*nodes: Node) -> list[tuple[int, ...]]:
    number_storages(nodes)
    return [node.storages for node in nodes]


def test_a_name_that_is_used_again_gets_another_number() -> None:
    assert numbers(
        operator([70], [50]), operator([50], [60]), operator([60], [50]), operator([50], [50])
    ) == [(1, 2), (2, 3), (3, 4), (4, 4)]


def test_an_output_that_two_operators_return_is_one_storage() -> None:
    # The inner operator creates it, and another inner one writes to it in place.
    assert numbers(
        operator([70], [50]),
        operator([70], [50]),
        operator([70], [50], parent=1),
        operator([50], [50], parent=1),
        operator([50], []),
    ) == [(1, 2), (1, 3), (1, 3), (3, 3), (3,)]


def test_an_output_is_new_to_the_operators_inside_that_fill_it() -> None:
    assert numbers(operator([70], [50]), operator([70], [50]), operator([50], [50], parent=1)) == [
        (1, 2),
        (1, 3),
        (3, 3),
    ]


def test_annotations_and_tensors_without_storage_remain() -> None:
    annotation = Node("step", -1, -1, None, ())
    assert numbers(annotation, operator([0, 9], [0], parent=0)) == [(), (0, 1, 0)]


def test_a_number_of_python_reuses_the_name_of_a_tensor() -> None:
    scalar = TensorSpec("float64", (), (), "cpu")
    node = Node("aten::mul", -1, -1, Call("aten::mul", (_SPEC, scalar), (_SPEC,)), (70, 50, 80))
    assert numbers(operator([70], [50]), node, operator([80], [50])) == [(1, 2), (1, 3, 4), (4, 5)]


def test_two_tensors_of_a_recorded_step_have_two_numbers() -> None:
    memory = captured("mlp").memory
    made = memory.storage[(memory.producer >= 0) & (memory.storage >= 0) & (memory.nbytes > 8)]
    assert len(np.unique(made)) == len(made) > 10
