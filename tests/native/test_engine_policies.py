"""Each policy on examples small enough to follow by hand, on both backends."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from slipstream.native import Edges, Policy, Program, Resources, Schedule

Backend = Literal["native", "python"]


@pytest.fixture(params=["native", "python"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def run(backend: Backend, lane: list[int], duration: list[float], **rest: Any) -> Schedule:
    edges = rest.pop("edges", [])
    columns = list(zip(*edges, strict=True)) if edges else [[], []]
    program = Program(np.array(lane), np.array(duration), edges=Edges(*columns), **rest)
    return program.compile(backend).simulate()


def test_a_fixed_lane_keeps_the_order_of_ids_even_when_its_head_is_late(backend: Backend) -> None:
    # Task 1 waits for task 0 on another lane; task 2 was ready all along but comes after it.
    result = run(backend, [0, 1, 1], [10.0, 5.0, 3.0], edges=[(0, 1)])
    assert result.start_ns.tolist() == [[0.0, 10.0, 15.0]]
    assert result.makespan_ns == 18.0


def test_a_fifo_lane_takes_the_earliest_ready_and_the_lower_id_at_a_tie(
    backend: Backend,
) -> None:
    # Ready at 10 (task 2), 4 (task 3) and 4 (task 4); task 5 occupies the lane until 20.
    result = run(
        backend,
        [0, 1, 2, 2, 2, 2],
        [10.0, 4.0, 1.0, 1.0, 1.0, 20.0],
        policies=[0, 0, Policy.FIFO],
        edges=[(0, 2), (1, 3), (1, 4)],
    )
    assert result.start_ns[0, [5, 3, 4, 2]].tolist() == [0.0, 20.0, 21.0, 22.0]


def test_a_priority_lane_takes_the_smallest_number_but_never_interrupts_a_started_task(
    backend: Backend,
) -> None:
    result = run(
        backend,
        [0, 1, 1, 1],
        [1.0, 10.0, 2.0, 3.0],
        priority=[0, 9, 5, 1],
        policies=[Policy.FIXED, Policy.PRIORITY],
        edges=[(0, 2), (0, 3)],
    )
    assert result.start_ns[0, [1, 3, 2]].tolist() == [0.0, 10.0, 13.0]


def test_an_urgent_task_interrupts_and_the_interrupted_one_resumes(
    backend: Backend,
) -> None:
    result = run(
        backend,
        [0, 1, 1],
        [4.0, 10.0, 3.0],
        priority=[0, 5, 1],
        policies=[Policy.FIXED, Policy.PREEMPTIVE],
        edges=[(0, 2)],
    )
    assert result.start_ns[0].tolist() == [0.0, 0.0, 4.0]
    assert result.end_ns[0].tolist() == [4.0, 13.0, 7.0]


def test_equal_priority_does_not_preempt(backend: Backend) -> None:
    result = run(
        backend,
        [0, 1, 1],
        [4.0, 10.0, 3.0],
        priority=[0, 5, 5],
        policies=[Policy.FIXED, Policy.PREEMPTIVE],
        edges=[(0, 2)],
    )
    assert result.start_ns[0, 2] == 10.0


def test_a_quantum_delays_preemption_to_whole_pieces_of_work(backend: Backend) -> None:
    # Urgent at 4; pieces of 3 end at 3, 6, 9: it starts at 6 and ends at 9, the remainder takes 4.
    result = run(
        backend,
        [0, 1, 1],
        [4.0, 10.0, 3.0],
        priority=[0, 5, 1],
        policies=[Policy.FIXED, Policy.PREEMPTIVE],
        quantum_ns=[0.0, 3.0],
        edges=[(0, 2)],
    )
    assert result.start_ns[0, 2] == 6.0
    assert result.end_ns[0].tolist() == [4.0, 13.0, 9.0]


def test_quanta_count_from_the_last_resumption(backend: Backend) -> None:
    # Task 1 runs 0-2 (quantum 2), task 2 runs 2-5, task 1 resumes at 5: boundaries 7, 9, ...
    # Task 3 is ready at 6, so it starts at 7 and not at 6.
    result = run(
        backend,
        [0, 1, 1, 1, 2],
        [2.0, 10.0, 3.0, 1.0, 6.0],
        priority=[0, 5, 1, 1, 0],
        policies=[0, Policy.PREEMPTIVE, 0],
        quantum_ns=[0.0, 2.0, 0.0],
        edges=[(0, 2), (4, 3)],
    )
    assert result.start_ns[0, [2, 3]].tolist() == [2.0, 7.0]
    assert result.end_ns[0, 1] == 14.0


def test_a_lane_chooses_among_all_tasks_ready_at_the_same_time(backend: Backend) -> None:
    # Both become ready at 5 by different events; the urgent one goes first in any case.
    for first, second in ((0, 1), (1, 0)):
        result = run(
            backend,
            [0, 1, 2, 2],
            [5.0, 5.0, 1.0, 1.0],
            priority=[0, 0, 2, 1],
            policies=[0, 0, Policy.PRIORITY],
            edges=[(first, 2), (second, 3)],
        )
        assert result.start_ns[0, [3, 2]].tolist() == [5.0, 6.0]


def test_a_gap_blocks_the_lane_but_not_the_successors(backend: Backend) -> None:
    for policy in set(Policy) - {Policy.CONCURRENT}:
        result = run(
            backend,
            [0, 0, 1],
            [2.0, 1.0, 1.0],
            gap_ns=[3.0, 0.0, 0.0],
            policies=[policy, policy],
            edges=[(0, 2)],
        )
        assert result.start_ns[0].tolist() == [0.0, 5.0, 2.0]
        assert result.makespan_ns == 6.0


def test_a_trailing_gap_is_not_part_of_the_makespan(backend: Backend) -> None:
    assert run(backend, [0], [2.0], gap_ns=[7.0]).makespan_ns == 2.0


def test_an_edge_delays_its_target(backend: Backend) -> None:
    program = Program(
        np.array([0, 1]), np.array([2.0, 1.0]), edges=Edges(np.array([0]), np.array([1]), [1.5])
    )
    assert program.compile(backend).simulate().start_ns.tolist() == [[0.0, 3.5]]


def test_a_lagged_edge_gates_the_next_step(backend: Backend) -> None:
    # Communication (lane 1) of step k gates the second forward task (task 1) of step k + 1.
    program = Program(
        np.array([0, 0, 1]),
        np.array([2.0, 3.0, 10.0]),
        edges=Edges(np.array([1, 2]), np.array([2, 1]), lag=np.array([0, 1])),
        steps=3,
    )
    result = program.compile(backend).simulate()
    assert result.start_ns.tolist() == [[0, 2, 5], [5, 15, 18], [18, 28, 31]]
    assert result.step_end_ns.tolist() == [15, 28, 41]
    assert result.start_ns.min(axis=1).tolist() == [0, 5, 18]
    assert result.lane_busy_ns.tolist() == [15, 30]


def test_the_first_step_is_not_gated_by_lagged_edges(backend: Backend) -> None:
    program = Program(
        np.array([0, 1]),
        np.array([1.0, 1.0]),
        edges=Edges(np.array([0]), np.array([1]), lag=np.array([1])),
    )
    assert program.compile(backend).simulate().start_ns.tolist() == [[0.0, 0.0]]


def test_a_resource_is_held_from_start_to_end(backend: Backend) -> None:
    # Three lanes, two units: the third starts when the first to end releases its unit.
    result = run(
        backend,
        [0, 1, 2],
        [5.0, 3.0, 4.0],
        resources=Resources([2], [0, 1, 2], [0, 0, 0], [1, 1, 1]),
    )
    assert result.start_ns[0].tolist() == [0.0, 0.0, 3.0]


def test_a_waiter_for_a_resource_is_never_overtaken(backend: Backend) -> None:
    # Task 1 (ready at 1) needs both units; task 2 (ready at 2) needs one, which is free at 2, but
    # would starve task 1. Task 4 needs another resource and does not wait.
    result = run(
        backend,
        [0, 1, 2, 3, 4, 3],
        [10.0, 4.0, 1.0, 1.0, 1.0, 1.0],
        policies=[0] * 5,
        resources=Resources([2, 1], [0, 1, 2, 4], [0, 0, 0, 1], [1, 2, 1, 1]),
        edges=[(3, 1), (5, 2)],
    )
    assert result.start_ns[0, [0, 1, 2, 4]].tolist() == [0.0, 10.0, 14.0, 0.0]


def test_a_preempted_task_keeps_its_resources_and_resumes_when_its_lane_would_wait_for_them(
    backend: Backend,
) -> None:
    # Task 1 holds the unit and is preempted at 1 by task 2, which needs none and releases task 3
    # at 3: more urgent than task 1, but it needs the unit that task 1 holds. So task 1 resumes.
    result = run(
        backend,
        [0, 1, 1, 1],
        [1.0, 6.0, 2.0, 1.0],
        priority=[0, 5, 1, 1],
        policies=[Policy.FIXED, Policy.PREEMPTIVE],
        resources=Resources([1], [1, 3], [0, 0], [1, 1]),
        edges=[(0, 2), (2, 3)],
    )
    assert result.start_ns[0].tolist() == [0.0, 0.0, 1.0, 8.0]
    assert result.end_ns[0].tolist() == [1.0, 8.0, 3.0, 9.0]


def test_needs_of_the_same_resource_add_up(backend: Backend) -> None:
    result = run(
        backend, [0, 1], [5.0, 5.0], resources=Resources([3], [0, 0, 1], [0, 0, 0], [1, 1, 2])
    )
    assert result.start_ns[0].tolist() == [0.0, 5.0]


def test_no_tasks_and_no_lanes_make_an_empty_schedule(backend: Backend) -> None:
    result = run(backend, [], [], steps=2)
    assert result.makespan_ns == 0.0
    assert result.start_ns.shape == (2, 0)
    assert result.lane_busy_ns.shape == (0,)
