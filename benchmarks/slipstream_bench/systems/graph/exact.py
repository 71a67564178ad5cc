"""Exact properties of random graphs: edits, bounds, order, round trips."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream import native
from slipstream.errors import GraphError
from slipstream.graph import (
    PROVENANCES,
    Allocations,
    Call,
    Dependency,
    Edges,
    Edit,
    Editor,
    Exchange,
    Graph,
    Kind,
    Role,
    StepPhase,
    Tasks,
    TensorSpec,
    load,
    lower,
    read_chakra,
    replace_tasks,
    replay,
    save,
    write_chakra,
)
from slipstream.provenance import Provenance
from slipstream_bench.programs import random_program, seeded
from slipstream_bench.rows import Bar, BenchOptions, for_all_seeds
from slipstream_bench.systems.engine import longest_path_ns

_FULL, _QUICK = 1000, 100
_SPEC = TensorSpec("float32", (2, 3), (3, 1))
_CALL = Call("aten::relu(Tensor self) -> Tensor", (_SPEC,), (_SPEC,))


def rows(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per property; 1,000 random graphs each, 100 in a quick run."""
    properties: list[tuple[str, Callable[[np.random.Generator], bool]]] = [
        ("(a) an edit of nothing gives a byte-equal timeline", identity_edit_changes_nothing),
        ("(b) step >= longest path and busy time of each lane", step_is_bounded_below),
        ("(c) a shorter task never makes the step end later", shorter_is_never_longer),
        ("(d) insert then remove restores the timeline", insert_then_remove_restores),
        ("(e) slipgraph and Chakra round trips are equal", round_trips_are_equal),
        ("(f) acyclic, or a cycle is named", acyclic_or_named_cycle),
    ]
    yield from for_all_seeds(
        options,
        "exact, graphs",
        [(name, seeded(holds)) for name, holds in properties],
        quick=_QUICK,
        full=_FULL,
        detail="random graphs: lanes, gaps, delays, lags, calls, allocations",
    )


def graph_of(program: native.Program, names: int = 5) -> Graph:
    """Return the tasks and edges of `program`, whose lanes have a fixed order, as a bare graph.

    Args:
        names: number of operator names, which the tasks cycle through.
    """
    n, edges = program.tasks, program.edges
    nothing = np.zeros(n, np.int32)
    return Graph(
        tasks=Tasks(
            name=(np.arange(n) % names + 1).astype(np.int32),
            scope=nothing,
            module=nothing,
            source=nothing,
            kind=np.full(n, Kind.OP, np.uint8),
            phase=np.full(n, StepPhase.FORWARD, np.uint8),
            lane=program.lane.astype(np.int32),
            rank=nothing,
            call=np.full(n, -1, np.int32),
            sequence=np.full(n, -1, np.int64),
            duration_ns=program.duration_ns.copy(),
            gap_ns=program.gap_ns.copy(),
            spread=np.zeros(n),
            provenance=np.full(n, PROVENANCES.index(Provenance.SIMULATED), np.uint8),
        ),
        edges=Edges(
            edges.src.astype(np.int32),
            edges.dst.astype(np.int32),
            np.full(len(edges.src), Dependency.DATA, np.uint8),
            edges.delay_ns.copy(),
            edges.lag.astype(np.uint8),
        ),
        strings=("", *(f"operator {i}" for i in range(names))),
        calls=(),
        operand_start=np.zeros(n + 1, np.int64),
        operands=np.empty(0, np.int32),
        parameters=np.empty(0, np.int32),
        lanes=tuple(f"lane {i}" for i in range(program.lanes)),
        samples=1,
    )


def random_graph(rng: np.random.Generator, *, acyclic: bool = True) -> Graph:
    """Return a small graph with entries in every column."""
    graph = graph_of(random_program(rng, fixed=True, acyclic=acyclic))
    n = len(graph)
    counts = 2 * rng.integers(0, 2, n)
    used = int(counts.sum())
    tasks = dataclasses.replace(
        graph.tasks,
        scope=_any_string(rng, graph),
        module=_any_string(rng, graph),
        source=_any_string(rng, graph),
        kind=rng.integers(0, len(Kind), n).astype(np.uint8),
        phase=rng.integers(0, len(StepPhase), n).astype(np.uint8),
        rank=rng.integers(0, 3, n).astype(np.int32),
        call=np.where(counts > 0, 0, -1).astype(np.int32),
        sequence=rng.integers(-1, 9, n),
        spread=rng.random(n),
        provenance=rng.integers(0, len(PROVENANCES), n).astype(np.uint8),
    )
    kind = rng.integers(0, len(Dependency), len(graph.edges)).astype(np.uint8)
    m = int(rng.integers(0, 6))
    born = rng.integers(-1, n, m)
    found = dataclasses.replace(
        graph,
        tasks=tasks,
        edges=dataclasses.replace(graph.edges, kind=kind),
        calls=(_CALL,),
        operand_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        operands=rng.integers(-1, 9, used).astype(np.int32),
        parameters=rng.integers(0, 9, int(rng.integers(0, 3))).astype(np.int32),
        samples=int(rng.integers(0, 64)),
        meta={"device": "cpu", "threads": int(rng.integers(1, 9))},
        edits=(Edit("amp:bf16", "casts", 3),) * int(rng.integers(0, 3)),
        memory=Allocations.of(
            rng.integers(1, 1 << 20, m),
            rng.integers(-1, 9, m),
            rng.integers(0, len(Role), m),
            born,
            np.where(rng.random(m) < 0.3, -1, rng.integers(np.maximum(born, 0), n)),
        ),
        exchanges=_any_exchange(rng, n),
    )
    found.check()
    return found


def _any_exchange(rng: np.random.Generator, tasks: int) -> tuple[Exchange, ...]:
    """Return no exchange, or one of a random task."""
    from slipstream.cluster import Collective, Group

    if rng.random() < 0.5:
        return ()
    group = Group.of(np.arange(int(rng.integers(2, 9))))
    collective = Collective("all_reduce", float(rng.integers(1, 1 << 20)), group)
    task, ready, awaited = (int(value) for value in rng.integers(0, tasks, 3))
    return (Exchange(task, ready, awaited, collective, latency_ns=1e3, bottleneck="link"),)


def _any_string(rng: np.random.Generator, graph: Graph) -> NDArray[np.int32]:
    return rng.integers(0, len(graph.strings), len(graph)).astype(np.int32)


def _timeline(graph: Graph) -> bytes:
    schedule = replay(graph).schedule
    return schedule.start_ns.tobytes() + schedule.end_ns.tobytes() + schedule.step_end_ns.tobytes()


def identity_edit_changes_nothing(rng: np.random.Generator) -> bool:
    """Applying no change, or setting every duration to itself, changes nothing."""
    graph = random_graph(rng)
    every = Editor(graph, "t")
    for task in range(len(graph)):
        every.set_duration(task, float(graph.tasks.duration_ns[task]), Provenance.USER)
    edited = (Editor(graph, "t").apply("nothing"), every.apply("all unchanged"))
    return all(_timeline(edited_graph) == _timeline(graph) for edited_graph in edited)


def step_is_bounded_below(rng: np.random.Generator) -> bool:
    """No timeline is shorter than its longest path of dependencies or its busiest lane."""
    graph = random_graph(rng)
    program, line = lower(graph), replay(graph)
    makespan = line.schedule.makespan_ns
    busy = float(line.schedule.lane_busy_ns.max(initial=0.0))
    return makespan >= longest_path_ns(program) and makespan >= busy


def shorter_is_never_longer(rng: np.random.Generator) -> bool:
    """Lanes of graphs have a fixed order, so the step's end is monotonic in durations."""
    graph = random_graph(rng)
    shorter = graph.tasks.duration_ns.copy()
    shorter[rng.integers(len(graph))] *= rng.random()
    before = replay(graph).schedule.step_end_ns
    after = replay(replace_tasks(graph, duration_ns=shorter)).schedule.step_end_ns
    return bool(np.all(after <= before))


def insert_then_remove_restores(rng: np.random.Generator) -> bool:
    """Inserting a task next to another and removing it restores the timeline."""
    graph = random_graph(rng)
    task, before = int(rng.integers(len(graph))), bool(rng.integers(2))
    editor = Editor(graph, "t")
    editor.insert(task, "new", 5.0, Provenance.USER, before=before, gap_ns=1.0)
    longer = editor.apply("inserted")
    undo = Editor(longer, "t")
    undo.remove(task if before else task + 1)
    return _timeline(undo.apply("removed")) == _timeline(graph)


def round_trips_are_equal(rng: np.random.Generator) -> bool:
    """Both file formats restore every column, and equal graphs give equal bytes."""
    graph = random_graph(rng)
    with tempfile.TemporaryDirectory() as folder:
        own, again, chakra = (Path(folder, name) for name in ("a.slipgraph", "b.slipgraph", "c.et"))
        save(graph, own)
        save(load(own), again)
        write_chakra(graph, chakra)
        return (
            own.read_bytes() == again.read_bytes()
            and same_graph(graph, load(own))
            and same_graph(graph, read_chakra(chakra))
        )


def same_graph(a: Graph, b: Graph) -> bool:
    """Return whether every part of two graphs is equal, in bits and dtypes."""
    return all(
        _same(getattr(a, part.name), getattr(b, part.name)) for part in dataclasses.fields(Graph)
    )


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (Tasks, Edges, Allocations)):
        return type(a) is type(b) and all(
            _same(getattr(a, column.name), getattr(b, column.name))
            for column in dataclasses.fields(a)
        )
    if isinstance(a, tuple) and isinstance(b, tuple) and a and isinstance(a[0], Exchange):
        # Groups of devices are equal only when they are the same object.
        return [exchange.to_json() for exchange in a] == [exchange.to_json() for exchange in b]
    return a == b


def acyclic_or_named_cycle(rng: np.random.Generator) -> bool:
    """Either every edge is respected, or the named tasks wait for each other."""
    graph = random_graph(rng, acyclic=False)
    edges = graph.edges
    within = edges.lag == 0
    source, target = edges.source[within], edges.target[within]
    try:
        line = replay(graph)
    except GraphError as error:
        if not isinstance(error, native.CycleError):
            return False
        gates = set(zip(source.tolist(), target.tolist(), strict=True))
        for lane in range(len(graph.lanes)):
            gates |= set(itertools.pairwise(np.flatnonzero(graph.tasks.lane == lane).tolist()))
        cycle = error.tasks
        return all(pair in gates for pair in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    delay = native.quantize_ns(edges.delay_ns[within])
    return bool(np.all(line.start_ns[target] >= line.end_ns[source] + delay))
