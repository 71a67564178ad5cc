"""Changed operands of tasks: aliases stay, and memory lives as long as it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import GraphError
from slipstream.graph import Allocations, Call, Editor, Graph, Role, TensorSpec, find_peak, replay
from slipstream.provenance import Provenance
from small_graphs import graph_of

SPEC = TensorSpec("float32", (64,), (1,))
SINE = Call("aten::sin(Tensor self) -> Tensor", (SPEC,), (SPEC,))
SUM = Call("aten::add.Tensor(Tensor self, Tensor other) -> Tensor", (SPEC, SPEC), (SPEC,))
IN_PLACE = Call("aten::relu_(Tensor(a!) self) -> Tensor(a!)", (SPEC,), (SPEC,))
VIEW = Call("aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)", (SPEC, (64,)), (SPEC,))
PLAIN = Call("aten::relu(Tensor self) -> Tensor", (SPEC,), (SPEC,))
MICRO = Provenance.MICROBENCHMARK


def step(*tasks: tuple[Call, Sequence[int]], memory: Sequence[tuple[int, int, int]]) -> Graph:
    """Return tasks with their storages, and allocations as (storage, producer, release)."""
    calls = tuple(dict.fromkeys(call for call, _ in tasks))
    graph = graph_of([(0, 10, 1)] * len(tasks))
    made = replace(
        graph,
        calls=calls,
        tasks=replace(
            graph.tasks, call=np.array([calls.index(call) for call, _ in tasks], np.int32)
        ),
        operand_start=np.cumsum([0, *(len(storages) for _, storages in tasks)]),
        operands=np.array([s for _, storages in tasks for s in storages], np.int32),
        memory=Allocations.of(
            [SPEC.nbytes] * len(memory), [storage for storage, _, _ in memory],
            [Role.ACTIVATION] * len(memory), [producer for _, producer, _ in memory],
            [release for _, _, release in memory],
        ),
    )  # fmt: skip
    made.check()
    return made


def lives(graph: Graph) -> list[tuple[int, int, int]]:
    """Return the storage, producer and release of each allocation."""
    memory = graph.memory
    columns = (memory.storage, memory.producer, memory.release)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def chain() -> Graph:
    """0 reads the batch (storage 9) and makes 0; 1 makes 1 from it; 2 makes 2; 3 makes 3."""
    return step(
        (SINE, (9, 0)), (SINE, (0, 1)), (SINE, (1, 2)), (SINE, (2, 3)),
        memory=[(9, -1, -1), (0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, -1)],
    )  # fmt: skip


def test_a_later_reader_extends_a_lifetime() -> None:
    edit = Editor(chain(), "read")
    edit.set_operands(3, [0])
    edited = edit.apply("the last task reads the first one's result")
    assert edited.storages(3).tolist() == [0, 3]
    # Storage 2 has no reader any more: it is freed after its producer.
    assert lives(edited) == [(0, 0, 3), (1, 1, 2), (2, 2, 2), (3, 3, -1), (9, -1, -1)]
    plain, longer = find_peak(replay(chain())), find_peak(replay(edited))
    assert longer.nbytes == plain.nbytes + SPEC.nbytes


def test_a_removed_task_passes_its_result_to_the_new_producer() -> None:
    edit = Editor(chain(), "fold")
    edit.set_operands(1, [0], [2])
    edit.remove(2)
    edited = edit.apply("the second task does the third one's work")
    edited.check()
    assert edited.storages(1).tolist() == [0, 2]
    assert lives(edited) == [(0, 0, 1), (2, 1, 2), (3, 2, -1), (9, -1, -1)]


def test_an_output_in_a_new_storage_is_allocated() -> None:
    edit = Editor(chain(), "rename")
    edit.set_operands(1, [0], [20])
    edit.set_operands(2, [20])
    edited = edit.apply("another storage between")
    assert lives(edited) == [(0, 0, 1), (2, 2, 3), (3, 3, -1), (9, -1, -1), (20, 1, 2)]
    assert replay(edited).peak_bytes == replay(chain()).peak_bytes


def test_a_forgotten_reader_is_named() -> None:
    edit = Editor(chain(), "rename")
    edit.set_operands(1, [0], [20])
    with pytest.raises(GraphError, match=r"\btask 2\b.*\bstorage 1\b"):
        edit.apply("its reader is forgotten")


def in_place() -> Graph:
    return step(
        (SINE, (9, 0)), (SINE, (9, 1)), (IN_PLACE, (0, 0)), (VIEW, (0, 0)), (SUM, (0, 1, 2)),
        memory=[(9, -1, -1), (0, 0, 4), (1, 1, 4), (2, 4, -1)],
    )  # fmt: skip


@pytest.mark.parametrize("task", [2, 3], ids=["in place", "view"])
def test_an_output_stays_in_its_input_if_it_aliases_it(task: int) -> None:
    edit = Editor(in_place(), "other")
    edit.set_operands(task, [1])
    assert edit.apply("of the other").storages(task).tolist() == [1, 1]


@pytest.mark.parametrize("task", [2, 3], ids=["in place", "view"])
def test_an_alias_that_would_be_split_is_an_error_that_names_it(task: int) -> None:
    edit = Editor(in_place(), "part")
    with pytest.raises(GraphError, match=rf"\boutput 0\b.*\btask {task}\b.*\binput 0\b"):
        edit.set_operands(task, [1], [7])


def test_an_out_of_place_call_splits_them() -> None:
    edit = Editor(in_place(), "functional")
    edit.set_duration(2, 10.0, MICRO, call=PLAIN)
    edit.set_operands(2, [0], [7])
    edit.set_operands(3, [7])
    edit.set_operands(4, [7, 1])
    edited = edit.apply("out of place")
    assert edited.storages(2).tolist() == [0, 7]
    assert lives(edited) == [(0, 0, 2), (1, 1, 4), (2, 4, -1), (7, 2, 4), (9, -1, -1)]


def test_an_in_place_call_joins_them_automatically() -> None:
    edit = Editor(chain(), "in place")
    edit.set_duration(1, 10.0, MICRO, call=IN_PLACE)
    edit.set_operands(1, [0])
    edit.set_operands(2, [0])
    edited = edit.apply("in place")
    assert edited.storages(1).tolist() == [0, 0]
    assert lives(edited) == [(0, 0, 2), (2, 2, 3), (3, 3, -1), (9, -1, -1)]


def test_a_new_tensor_is_not_placed_in_an_input() -> None:
    edit = Editor(chain(), "clash")
    with pytest.raises(GraphError, match=r"\bstorage 0\b.*\binput 0\b"):
        edit.set_operands(1, [0], [0])


def test_every_tensor_has_one_storage() -> None:
    edit = Editor(chain(), "few")
    with pytest.raises(GraphError, match=r"\b0 storages\b.*\b1 inputs\b.*aten::sin"):
        edit.set_operands(1, [])
    with pytest.raises(GraphError, match=r"\b2 storages\b.*\b1 outputs\b.*aten::sin"):
        edit.set_operands(1, [0], [3, 4])
    with pytest.raises(GraphError, match=r"\bcall\b.*\btask 0\b"):
        Editor(graph_of([(0, 1, 0)]), "none").set_operands(0, [])


def test_an_explicit_lifetime_of_an_edit_wins() -> None:
    edit = Editor(chain(), "keep")
    edit.set_operands(3, [0])
    edit.release_after(1, 2)
    assert (0, 0, 2) in lives(edit.apply("freed sooner all the same"))
