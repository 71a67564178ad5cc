"""Invalid input gives an error that names the element; nothing crashes."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.native import CycleError, Edges, Policy, Program, Resources, Tensors, simulate
from slipstream_bench.programs import random_program

TWO = {"lane": np.array([0, 1]), "duration_ns": np.array([1.0, 2.0])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_ns": [1.0]}, "duration_ns: has shape"),
        ({"duration_ns": [1.0, np.nan]}, "duration_ns: task 1 has nan ns"),
        ({"duration_ns": [1.0, -1.0]}, "task 1 has -1.0 ns"),
        ({"duration_ns": [np.inf, 1.0]}, "task 0 has inf ns"),
        ({"duration_ns": [1e300, 1.0]}, "task 0 has 1e.300 ns"),
        ({"duration_ns": ["a", "b"]}, "duration_ns: .* numbers"),
        ({"gap_ns": [0.0, -2.0]}, "gap_ns: task 1"),
        ({"lane": [0, -1]}, "lane: entry 1 is -1"),
        ({"lane": [0.5, 1.0]}, "lane: has dtype float64"),
        ({"lane": [[0], [1]]}, "lane: has shape"),
        ({"lane": [0, 2**40]}, "lane: entry 1 is 1099511627776"),
        ({"policies": [0]}, "lane: task 1 names lane 1, of 1"),
        ({"policies": [0, 7]}, "policies: entry 1 is 7"),
        ({"quantum_ns": [0.0, np.nan]}, "quantum_ns: lane 1"),
        ({"quantum_ns": [0.0, 1e-300]}, "quantum_ns: lane 1 has 1e-300 ns"),
        ({"priority": [0, 2**31]}, "priority: entry 1"),
        ({"steps": 0}, "steps: 0"),
        ({"steps": 1.5}, "steps: 1.5"),
        ({"steps": 2**31}, "steps: 2147483648 steps of 2 tasks"),
        ({"names": ["a"]}, "names: has 1 entries"),
    ],
)
def test_an_invalid_array_is_refused_with_its_element(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Program(**{**TWO, **change})


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (([0], [2]), "edges.dst: edge 0 names task 2, of 2"),
        (([-1], [0]), "edges.src: entry 0 is -1"),
        (([0], [1], [-1.0]), "edges.delay_ns: edge 0 has -1.0 ns"),
        (([0], [1], [np.nan]), "edges.delay_ns: edge 0 has nan ns"),
        (([0], [1], [0.0], [2]), "edges.lag: edge 0 has lag 2"),
        (([0, 1], [1]), "edges.dst: has shape"),
    ],
)
def test_an_invalid_edge_is_refused(edges: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Program(**TWO, edges=Edges(*edges))


def test_more_than_the_capacity_is_refused_by_task_name() -> None:
    with pytest.raises(GraphError, match=r"task 1 \(mm\).*\b5\b.*\bresource 0\b.*\b4\b"):
        Program(**TWO, names=["add", "mm"], resources=Resources([4], [1, 1], [0, 0], [2, 3]))


def test_overflowing_amounts_are_refused_and_not_wrapped() -> None:
    with pytest.raises(GraphError, match="task 0 needs"):
        Program(**TWO, resources=Resources([4], [0] * 4, [0] * 4, [2**62] * 4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (([1], [2], [0, 0], []), "tensors.producer: tensor 0 names task 2"),
        (([1], [0], [0, 1], [9]), "tensors.consumer_task: use 0 names task 9"),
        (([1], [0], [0, 2], [1]), "tensors.consumer_offset: .* 0 to 1"),
        (([-1], [0], [0, 0], []), "tensors.nbytes: entry 0 is -1"),
        (([2**62, 2**62], [0, 0], [0, 0, 0], []), "tensors.nbytes: add up"),
    ],
)
def test_an_invalid_tensor_is_refused(tensors: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Program(**TWO, tensors=Tensors(*tensors))


def test_bytes_of_all_steps_are_summed_in_64_bits() -> None:
    tensors = Tensors([2**60], [0], [0, 0], [])
    assert Program(**TWO, tensors=tensors, steps=4).steps == 4
    with pytest.raises(InvalidArgumentError, match=r"tensors\.nbytes: add up"):
        Program(**TWO, tensors=tensors, steps=5)


@pytest.mark.parametrize("backend", ["native", "python"])
def test_a_cycle_names_its_tasks_in_order(backend: Any) -> None:
    program = Program(
        np.arange(4),
        np.ones(4),
        edges=Edges([0, 1, 2, 3], [1, 2, 3, 1]),
        names=["load", "forward", "backward", "update"],
    )
    with pytest.raises(CycleError, match=r"task \d \(") as caught:
        program.compile(backend)
    assert sorted(caught.value.tasks) == [1, 2, 3]
    for name in ("forward", "backward", "update"):
        assert name in str(caught.value)
    assert "load" not in str(caught.value)


@pytest.mark.parametrize("backend", ["native", "python"])
def test_an_edge_against_the_order_of_a_fixed_lane_is_a_cycle(backend: Any) -> None:
    edges = Edges([1], [0])
    with pytest.raises(CycleError):
        Program(np.array([0, 0]), np.ones(2), edges=edges).compile(backend)
    free = Program(np.array([0, 0]), np.ones(2), policies=[Policy.FIFO], edges=edges)
    assert free.compile(backend).simulate().start_ns.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("backend", ["native", "python"])
def test_a_task_that_waits_for_itself_is_a_cycle_unless_in_the_next_step(backend: Any) -> None:
    with pytest.raises(CycleError) as caught:
        Program(np.array([0]), np.ones(1), edges=Edges([0], [0])).compile(backend)
    assert caught.value.tasks == (0,)
    program = Program(np.array([0]), np.ones(1), edges=Edges([0], [0], [5.0], [1]), steps=2)
    assert program.compile(backend).simulate().start_ns.tolist() == [[0.0], [6.0]]


def test_a_very_long_cycle_is_reported_without_recursion() -> None:
    count = 50_000
    src = np.arange(count)
    program = Program(src, np.ones(count), edges=Edges(src, (src + 1) % count))
    with pytest.raises(CycleError, match=r"\.\.\.") as caught:
        program.compile("native")
    assert len(caught.value.tasks) == count


def test_other_durations_are_checked_as_well() -> None:
    compiled = Program(**TWO).compile()
    with pytest.raises(InvalidArgumentError, match="task 0 has nan"):
        compiled.simulate([np.nan, 1.0])
    with pytest.raises(InvalidArgumentError, match="has shape"):
        compiled.simulate([1.0])
    with pytest.raises(InvalidArgumentError, match=r"^task_ids: .*\b0\b.*\b2\b"):
        compiled.resimulate([2], [1.0])
    with pytest.raises(InvalidArgumentError, match=r"\b1\b.*\btwice\b"):
        compiled.resimulate([1, 0, 1], [1.0, 1.0, 1.0])
    with pytest.raises(InvalidArgumentError, match="edit 0 has -1"):
        compiled.resimulate([0], [-1.0])
    with pytest.raises(InvalidArgumentError, match="another program"):
        compiled.resimulate([0], [1.0], base=simulate(Program(**TWO)))


def test_the_longest_allowed_times_do_not_overflow() -> None:
    limit = float(2**60)
    program = Program(
        np.zeros(1000, int),
        np.full(1000, limit),
        gap_ns=np.full(1000, limit),
        policies=[Policy.PREEMPTIVE],
        quantum_ns=[2.0**-10],
        steps=100,
    )
    for backend in ("native", "python"):
        assert np.isfinite(program.compile(backend).simulate().makespan_ns)


def test_the_smallest_quantum_preempts_immediately_even_below_the_time_resolution() -> None:
    program = Program(
        np.array([0, 1, 1]),
        np.array([2.0**50, 2.0**51, 1.0]),
        priority=[0, 5, 1],
        policies=[Policy.FIXED, Policy.PREEMPTIVE],
        quantum_ns=[0.0, 2.0**-10],
        edges=Edges([0], [2]),
    )
    native, python = (program.compile(backend).simulate() for backend in ("native", "python"))
    assert native.start_ns[0, 2] == 2.0**50
    assert native.end_ns.tobytes() == python.end_ns.tobytes()


def test_arrays_of_a_schedule_are_read_only() -> None:
    result = simulate(Program(**TWO))
    for array in (result.start_ns, result.end_ns, result.duration_ns, result.step_end_ns):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0.0


def test_a_program_is_compiled_once_and_pickled_without_the_compiled_form() -> None:
    program = random_program(np.random.default_rng(1))
    assert program.compile() is program.compile()
    copy = pickle.loads(pickle.dumps(program))
    assert copy.compile().simulate().end_ns.tobytes() == simulate(program).end_ns.tobytes()


def test_a_schedule_keeps_its_inputs_alive() -> None:
    schedules = []
    for seed in range(200):
        compiled = random_program(np.random.default_rng(seed), fixed=True).compile()
        schedules.append(compiled.resimulate([0], [1.0]))
    del compiled
    assert all(schedule.end_ns.size for schedule in schedules)


def test_several_threads_may_simulate_one_compiled_program() -> None:
    compiled = random_program(np.random.default_rng(5)).compile()
    expected = compiled.simulate().end_ns.tobytes()
    results: list[bytes] = []

    def work() -> None:
        results.extend(compiled.simulate().end_ns.tobytes() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 200
