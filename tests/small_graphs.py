"""Graphs built by hand, and by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from slipstream.graph import (
    PROVENANCES,
    Call,
    Dependency,
    Edges,
    Edit,
    Graph,
    Kind,
    StepPhase,
    Tasks,
    TensorSpec,
)


def graph_of(
    rows: Sequence[tuple[int, float, float]],
    edges: Sequence[tuple[int, int] | tuple[int, int, float] | tuple[int, int, float, int]] = (),
    **changes: Any,
) -> Graph:
    """Return a graph from (lane, duration, gap) of tasks and (source, target[, delay[, lag]])."""
    n = len(rows)
    lane = np.array([row[0] for row in rows], np.int32)
    nothing = np.zeros(n, np.int32)
    full = [(e[0], e[1], e[2] if len(e) > 2 else 0.0, e[3] if len(e) > 3 else 0) for e in edges]
    parts: dict[str, Any] = {
        "tasks": Tasks(
            name=np.arange(1, n + 1, dtype=np.int32), scope=nothing, module=nothing,
            source=nothing, kind=np.full(n, Kind.OP, np.uint8),
            phase=np.full(n, StepPhase.FORWARD, np.uint8), lane=lane, rank=nothing.copy(),
            call=np.full(n, -1, np.int32), sequence=np.full(n, -1, np.int64),
            duration_ns=np.array([row[1] for row in rows], np.float64),
            gap_ns=np.array([row[2] for row in rows], np.float64),
            spread=np.zeros(n), provenance=np.zeros(n, np.uint8),
        ),
        "edges": Edges(
            np.array([e[0] for e in full], np.int32), np.array([e[1] for e in full], np.int32),
            np.full(len(full), Dependency.DATA, np.uint8),
            np.array([e[2] for e in full], np.float64), np.array([e[3] for e in full], np.uint8),
        ),
        "strings": ("", *(f"task {i}" for i in range(n))),
        "calls": (),
        "operand_start": np.zeros(n + 1, np.int64),
        "operands": np.empty(0, np.int32),
        "parameters": np.empty(0, np.int32),
        "lanes": tuple(f"lane {i}" for i in range(int(lane.max(initial=-1)) + 1)),
        "samples": 4,
    }  # fmt: skip
    made = Graph(**{**parts, **changes})
    made.check()
    return made


times = st.floats(0, 1e9, allow_nan=False, width=32)


@st.composite
def graphs(draw: st.DrawFn, most_lanes: int = 3) -> Graph:
    """Draw acyclic graphs: edges lead from earlier to later tasks, or to the next step."""
    n = draw(st.integers(1, 12))
    lanes = draw(st.integers(1, most_lanes))
    rows = [(draw(st.integers(0, lanes - 1)), draw(times), draw(times)) for _ in range(n)]
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=8))
    edges = [
        (min(pair), max(pair), draw(times), 0) if pair[0] != pair[1] else (*pair, draw(times), 1)
        for pair in pairs
    ]
    spec = TensorSpec("float32", (2, 3), (3, 1))
    calls = (Call("aten::relu(Tensor self) -> Tensor", (spec,), (spec,)),)
    counts = [2 * draw(st.booleans()) for _ in range(n)]
    made = graph_of(
        rows,
        edges,
        calls=calls,
        operand_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        operands=np.arange(sum(counts), dtype=np.int32),
        parameters=np.array(draw(st.lists(st.integers(0, 9), max_size=3)), np.int32),
        lanes=tuple(f"lane {i}" for i in range(lanes)),
        samples=draw(st.integers(0, 64)),
        meta=draw(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4))),
        edits=tuple(
            Edit("amp:bf16", what, 3, what[1:]) for what in draw(st.lists(st.text(max_size=9)))
        ),
    )
    columns = made.tasks.columns()
    for name, high in (("kind", len(Kind)), ("phase", 4), ("provenance", len(PROVENANCES))):
        columns[name][:] = [draw(st.integers(0, high - 1)) for _ in range(n)]
    for t in range(n):
        columns["call"][t] = 0 if counts[t] else -1
    made.check()
    return made
