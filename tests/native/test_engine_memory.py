"""Lifetimes of tensors and the sum of their memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream.native import Edges, MemoryTimeline, Program, Tensors, simulate
from slipstream_bench.programs import random_program


def chain(tensors: Tensors, steps: int = 1) -> MemoryTimeline:
    """Three tasks in a row: 0-2, 2-5, 5-9."""
    program = Program(np.zeros(3, int), np.array([2.0, 3.0, 4.0]), tensors=tensors, steps=steps)
    return simulate(program).memory


def test_a_tensor_lives_from_the_start_of_its_producer_to_the_end_of_its_last_consumer() -> None:
    memory = chain(Tensors([10], [0], [0, 2], [1, 2]))
    assert memory.birth_ns.tolist() == [[0.0]]
    assert memory.death_ns.tolist() == [[9.0]]
    assert memory.peak_bytes.tolist() == [10]


def test_without_consumers_it_ends_with_its_producer() -> None:
    memory = chain(Tensors([10], [1], [0, 0], []))
    assert (memory.birth_ns[0, 0], memory.death_ns[0, 0]) == (2.0, 5.0)


def test_without_a_producer_it_exists_from_the_start() -> None:
    memory = chain(Tensors([10, 20], [-1, -1], [0, 1, 1], [0]))
    assert memory.birth_ns.tolist() == [[0.0, 0.0]]
    assert memory.death_ns.tolist() == [[2.0, 9.0]]


def test_without_a_producer_it_is_allocated_in_every_step() -> None:
    memory = chain(Tensors([10], [-1], [0, 1], [0]), steps=2)
    assert memory.birth_ns.tolist() == [[0.0], [9.0]]
    assert memory.death_ns.tolist() == [[2.0], [11.0]]


def test_at_equal_times_frees_come_before_allocations() -> None:
    # Tensor 0 ends at 5 when tensor 1 begins: never 30 together.
    memory = chain(Tensors([10, 20], [0, 2], [0, 1, 1], [1]))
    assert memory.peak_bytes.tolist() == [20]
    assert memory.peak_time_ns.tolist() == [5.0]
    times, level = memory.curve()
    assert times.tolist() == [0.0, 5.0, 9.0]
    assert level.tolist() == [10, 20, 0]


def test_a_persistent_tensor_is_allocated_once_and_never_freed() -> None:
    memory = chain(Tensors([100, 1], [-1, 1], [0, 0, 0], [], [True, False]), steps=2)
    assert memory.peak_bytes.tolist() == [101]
    times, level = memory.curve()
    assert times.tolist() == [0.0, 2.0, 5.0, 11.0, 14.0]
    assert level.tolist() == [100, 101, 100, 101, 100]


def test_pools_are_counted_separately() -> None:
    memory = chain(Tensors([10, 20], [0, 1], [0, 1, 1], [2], pool=[0, 2]))
    assert memory.peak_bytes.tolist() == [10, 0, 20]
    assert memory.peak_time_ns.tolist() == [0.0, 0.0, 2.0]
    with pytest.raises(InvalidArgumentError, match=r"pool: 3\b.*\b3\b"):
        memory.curve(3)


def test_memory_changes_with_an_edit_of_durations() -> None:
    # Two producers on two lanes; whether their tensors overlap depends on their durations.
    program = Program(
        np.array([0, 1, 1]),
        np.array([4.0, 1.0, 1.0]),
        edges=Edges([0], [2]),
        tensors=Tensors([10, 10], [0, 2], [0, 0, 0], []),
    )
    compiled = program.compile()
    assert compiled.simulate().memory.peak_bytes.tolist() == [10]
    overlapping = Program(program.lane, program.duration_ns, tensors=program.tensors).compile()
    assert overlapping.simulate().memory.peak_bytes.tolist() == [20]
    assert overlapping.simulate([0.5, 1.0, 1.0]).memory.peak_bytes.tolist() == [10]


def test_a_program_without_tensors_has_no_memory_curve() -> None:
    with pytest.raises(InvalidArgumentError, match="has no tensors"):
        _ = simulate(Program(np.zeros(1, int), np.ones(1))).memory


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_peak_and_curve_agree_with_counting_at_every_time(seed: int) -> None:
    program = random_program(np.random.default_rng(seed))
    memory = simulate(program).memory
    tensors = program.tensors
    assert tensors is not None
    for pool in range(memory.peak_bytes.size):
        in_pool = tensors.pool == pool
        times, level = memory.curve(pool)
        for now, bytes_now in zip(times, level, strict=True):
            alive = (memory.birth_ns <= now) & (now < memory.death_ns)
            alive[:, tensors.persistent] = False
            alive[0, tensors.persistent] = memory.birth_ns[0, tensors.persistent] <= now
            assert bytes_now == (alive * tensors.nbytes)[:, in_pool].sum()
        assert memory.peak_bytes[pool] == level.max(initial=0)
        if level.size:
            assert memory.peak_time_ns[pool] == times[level.argmax()]
