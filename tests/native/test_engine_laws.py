"""Invariants of every program, checked on programs drawn by hypothesis."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import networkx
import numpy as np
import pytest
from brute_force import brute_force
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.native import CycleError, Policy, Program, Schedule
from slipstream_bench.programs import large_program, random_program

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, **config: Any) -> Program:
    return random_program(np.random.default_rng(seed), **config)


def bits(schedule: Schedule) -> tuple[bytes, bytes, bytes]:
    return (
        schedule.start_ns.tobytes(),
        schedule.end_ns.tobytes(),
        schedule.step_end_ns.tobytes(),
    )


def unrolled(program: Program) -> networkx.DiGraph:
    """Instances and the dependencies between them; fixed lanes are chains."""
    graph = networkx.DiGraph()
    columns = (program.edges.src, program.edges.dst, program.edges.delay_ns, program.edges.lag)
    edges = list(zip(*(column.tolist() for column in columns), strict=True))
    last: dict[int, tuple[tuple[int, int], float]] = {}
    for k in range(program.steps):
        for t in range(program.tasks):
            graph.add_node((k, t))
            lane = int(program.lane[t])
            if program.policies[lane] == Policy.FIXED:
                if lane in last:
                    add(graph, last[lane][0], (k, t), last[lane][1])
                last[lane] = ((k, t), float(program.gap_ns[t]))
        for src, dst, delay, lag in edges:
            if k >= lag:
                add(graph, (k - lag, src), (k, dst), delay)
    return graph


def add(graph: networkx.DiGraph, src: Any, dst: Any, delay: float) -> None:
    earlier = graph.get_edge_data(src, dst, {"delay": 0.0})["delay"]
    graph.add_edge(src, dst, delay=max(earlier, delay))


def longest_path_ends(program: Program) -> dict[tuple[int, int], float]:
    graph = unrolled(program)
    end: dict[tuple[int, int], float] = {}
    for node in networkx.topological_sort(graph):
        ready = max(
            (end[pred] + graph.edges[pred, node]["delay"] for pred in graph.predecessors(node)),
            default=0.0,
        )
        end[node] = ready + float(program.duration_ns[node[1]])
    return end


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_every_policy_agrees_with_brute_force(seed: int) -> None:
    program = replace(drawn(seed, on_grid=seed % 2 == 0), resources=None)
    start, end = brute_force(program)
    result = program.compile().simulate()
    assert {key: result.start_ns[key] for key in start} == start
    assert {key: result.end_ns[key] for key in end} == end


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_on_fixed_lanes_every_end_is_a_longest_path(seed: int) -> None:
    program = drawn(seed, fixed=True, on_grid=False)
    result = program.compile().simulate()
    assert {key: result.end_ns[key] for key in longest_path_ends(program)} == longest_path_ends(
        program
    )


@settings(max_examples=300, deadline=None)
@given(seeds, st.booleans(), st.booleans())
def test_native_and_python_agree_bitwise(seed: int, fixed: bool, on_grid: bool) -> None:
    program = drawn(seed, fixed=fixed, on_grid=on_grid)
    native, python = program.compile("native").simulate(), program.compile("python").simulate()
    assert bits(native) == bits(python)
    assert native.makespan_ns == python.makespan_ns


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_the_event_loop_and_the_single_pass_agree_bitwise(seed: int) -> None:
    compiled = drawn(seed, fixed=True, on_grid=False).compile()
    assert compiled.fixed_order
    assert bits(compiled.simulate()) == bits(compiled.simulate(force_event_loop=True))


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_every_schedule_follows_the_rules(seed: int) -> None:
    program = drawn(seed)
    result = program.compile().simulate()
    start, end = result.start_ns, result.end_ns
    assert np.all(end >= start + program.duration_ns)
    for (j, a), (k, b), data in unrolled(program).edges(data=True):
        assert start[k, b] >= end[j, a] + data["delay"]
    assert result.makespan_ns >= max(longest_path_ends(replace(program)).values())
    assert np.all(result.makespan_ns >= result.lane_busy_ns)
    not_preemptive = np.flatnonzero(program.policies != Policy.PREEMPTIVE)
    for lane in not_preemptive:
        own = np.flatnonzero(program.lane == lane)
        spans = sorted(zip(start[:, own].ravel(), end[:, own].ravel(), strict=True))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_no_resource_is_ever_overdrawn(seed: int) -> None:
    program = drawn(seed)
    if program.needs is None or program.resources is None:
        return
    offset, resource, amount = program.needs
    task = np.repeat(np.arange(program.tasks), np.diff(offset))
    result = program.compile().simulate()
    for now in np.unique(result.start_ns):
        held = (result.start_ns <= now) & (now < result.end_ns)
        used = np.bincount(
            resource, held.sum(axis=0)[task] * amount, minlength=program.resources.capacity.size
        )
        assert np.all(used <= program.resources.capacity)


@settings(max_examples=150, deadline=None)
@given(seeds, st.data())
def test_on_fixed_lanes_a_shorter_task_never_lengthens_the_makespan(
    seed: int, data: st.DataObject
) -> None:
    compiled = drawn(seed, fixed=True).compile()
    duration = compiled.program.duration_ns.copy()
    task = data.draw(st.integers(0, compiled.program.tasks - 1))
    duration[task] *= data.draw(st.floats(0.0, 1.0))
    assert compiled.simulate(duration).makespan_ns <= compiled.simulate().makespan_ns


def test_on_priority_lanes_it_may_lengthen_the_makespan() -> None:
    """Graham's anomaly: monotonicity does not hold there."""
    for seed in range(400):
        compiled = drawn(seed).compile()
        before = compiled.simulate().makespan_ns
        for task in range(compiled.program.tasks):
            if compiled.resimulate([task], [0.0]).makespan_ns > before:
                return
    pytest.fail("no anomaly found")


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_a_program_is_acyclic_or_names_a_real_cycle(seed: int) -> None:
    program = drawn(seed, acyclic=False)
    graph = unrolled(replace(program, steps=1))
    if networkx.is_directed_acyclic_graph(graph):
        program.compile("native")
        program.compile("python")
        return
    for backend in ("native", "python"):
        with pytest.raises(CycleError, match="task") as caught:
            program.compile(backend)
        cycle = caught.value.tasks
        assert all(
            graph.has_edge((0, a), (0, b))
            for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
        )


@settings(max_examples=300, deadline=None)
@given(seeds, st.booleans(), st.booleans(), st.integers(0, 40))
def test_resimulation_equals_a_full_pass_bitwise(
    seed: int, fixed: bool, on_grid: bool, edits: int
) -> None:
    rng = np.random.default_rng(seed)
    compiled = random_program(rng, fixed=fixed, on_grid=on_grid).compile()
    base = compiled.simulate()
    for _ in range(3):
        ids = rng.permutation(compiled.program.tasks)[:edits]
        new = rng.integers(0, 9, ids.size) * (1.0 if on_grid else 0.1)
        edited = compiled.resimulate(ids, new, base=base)
        duration = base.duration_ns.copy()
        duration[ids] = new
        assert bits(edited) == bits(compiled.simulate(duration))
        assert edited.duration_ns.tobytes() == duration.tobytes()
        base = edited


@pytest.mark.parametrize("shape", ["forward ids", "far edges", "shuffled ids", "steps", "delays"])
@pytest.mark.parametrize("on_grid", [True, False])
def test_resimulation_of_a_long_trace_moves_blocks_and_is_exact(shape: str, on_grid: bool) -> None:
    rng = np.random.default_rng(3)
    program = large_program(20_000, lanes=4, locality=3000 if shape == "far edges" else 16)
    if not on_grid:
        program = replace(program, duration_ns=program.duration_ns / 3.0)
    if shape == "shuffled ids":
        # One lane per task keeps it acyclic under any numbering.
        new_id = rng.permutation(program.tasks)
        edges = replace(program.edges, src=new_id[program.edges.src], dst=new_id[program.edges.dst])
        program = replace(
            program,
            lane=np.arange(program.tasks),
            policies=np.zeros(program.tasks, int),
            quantum_ns=np.zeros(program.tasks),
            edges=edges,
        )
    elif shape == "steps":
        lag = (rng.random(program.edges.src.size) < 0.01).astype(int)
        program = replace(program, steps=3, edges=replace(program.edges, lag=lag))
    elif shape == "delays":
        program = replace(
            program,
            gap_ns=rng.integers(0, 2, program.tasks).astype(float),
            edges=replace(program.edges, delay_ns=rng.integers(0, 50, program.edges.src.size)),
        )
    compiled = program.compile()
    base = compiled.simulate()
    for first in (0, 7_000, 19_900):
        ids = np.arange(first, first + 100)
        duration = base.duration_ns.copy()
        duration[ids] = np.floor(duration[ids]) / 2
        edited = compiled.resimulate(ids, duration[ids], base=base)
        assert bits(edited) == bits(compiled.simulate(duration))
        if on_grid and shape in ("forward ids", "delays"):
            assert edited.recomputed_tasks < program.tasks / 4
        base = edited


@pytest.mark.parametrize("backend", ["native", "python"])
def test_edits_do_not_affect_later_edits(backend: str) -> None:
    compiled = large_program(3000, lanes=4).compile(backend)  # type: ignore[arg-type]
    base, other = compiled.simulate(), compiled.simulate(np.full(3000, 5.0))
    for start, chosen in ((0, base), (1, base), (2, other), (3, base)):
        ids = np.arange(start, 3000, 7)[::-1]
        duration = chosen.duration_ns.copy()
        duration[ids] += 3.0
        edited = compiled.resimulate(ids, duration[ids], base=chosen)
        assert edited.recomputed_tasks == 3000
        assert bits(edited) == bits(compiled.simulate(duration))
        assert edited.duration_ns.tobytes() == duration.tobytes()


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_a_program_gives_the_same_bytes_every_time(seed: int) -> None:
    first, second = drawn(seed), drawn(seed)
    assert bits(first.compile().simulate()) == bits(second.compile().simulate())
    assert bits(first.compile().resimulate([], [])) == bits(first.compile().simulate())
