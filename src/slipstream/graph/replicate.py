"""The step of one rank on many: copies side by side that wait for each other where they talk.

The graph of one rank stands for all of them as long as they are equally fast. Where they are not,
every collective waits for whoever comes last, and what the others had to do meanwhile decides how
much of that shows. Copies with a pace of their own each say so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.graph.graph import Graph
from slipstream.graph.values import Dependency, Edges, Edit, Kind, Tasks


def replicate(graph: Graph, ranks: int, *, jitter: float = 0.0, seed: int = 0) -> Graph:
    """`graph` on so many ranks; task t of rank r is task ``r * len(graph) + t``.

    Each rank has lanes of its own. What a rank sends (`Graph.exchanges`) begins on all of them when
    the last one is ready for it. What is allocated is that of the first rank: others have their
    own memory.

    Args:
        ranks: as many as a step that was edited to be shared is shared among.
        jitter: standard deviation, relative, of how long a rank's own tasks take in this step; a
            normal factor for each rank.
        seed: of these factors.

    Raises:
        InvalidArgumentError: less than one rank, another number than the step is shared among, or
            a jitter outside of [0, 1).
    """
    if ranks < 1 or (graph.workers > 1 and ranks != graph.workers):
        raise InvalidArgumentError(
            "ranks",
            f"{ranks} ranks of a step of {graph.workers}",
            remedy=str(graph.workers) if graph.workers > 1 else "1 or more",
        )
    if not 0 <= jitter < 1:
        raise InvalidArgumentError(
            "jitter", f"{jitter} is not between 0 and 1", remedy="0.03 for 3 %"
        )
    n, tasks = len(graph), graph.tasks
    pace = np.maximum(1.0 + jitter * np.random.default_rng(seed).standard_normal(ranks), 0.0)
    local = ~np.isin(tasks.kind, (Kind.COMMUNICATION, Kind.WAIT))
    factor = np.where(local, pace[:, None], 1.0).ravel()
    columns = {name: np.tile(column, ranks) for name, column in tasks.columns().items()}
    of_rank = np.repeat(np.arange(ranks, dtype=np.int32), n)
    lanes = len(graph.lanes)
    columns |= {
        "rank": of_rank,
        "lane": (columns["lane"] + of_rank * lanes).astype(np.int32),
        "duration_ns": columns["duration_ns"] * factor,
        "gap_ns": columns["gap_ns"] * factor,
    }
    storages = int(graph.operands.max(initial=-1)) + 1
    shift = np.repeat(np.arange(ranks) * storages, len(graph.operands))
    operands = np.tile(graph.operands, ranks)
    starts = graph.operand_start[:-1] + (np.arange(ranks) * len(graph.operands))[:, None]
    rows = [
        row.renumbered(at.__add__)
        for at in range(0, n * ranks, max(n, 1))
        for row in graph.exchanges
    ]
    samples, meta = graph.samples, dict(graph.meta)
    if graph.workers == 1:
        samples, meta = samples * ranks, {**meta, "workers": ranks}
    replicated = replace(
        graph,
        tasks=Tasks(**columns),
        edges=_edges(graph, ranks),
        operand_start=np.append(starts.ravel(), len(operands)).astype(np.int64),
        operands=np.where(operands >= 0, operands + shift, -1).astype(np.int32),
        parameters=(graph.parameters + (np.arange(ranks) * storages)[:, None])
        .ravel()
        .astype(np.int32),
        lanes=tuple(
            lane if rank == 0 else f"{lane}, rank {rank}"
            for rank in range(ranks)
            for lane in graph.lanes
        ),
        samples=samples,
        meta=meta,
        exchanges=tuple(rows),
        edits=(*graph.edits, Edit("replicate", f"{ranks} ranks", n * (ranks - 1))),
    )
    replicated.check()
    return replicated


def _edges(graph: Graph, ranks: int) -> Edges:
    """Each rank's own, and from what releases an exchange on one rank to that on all others."""
    edges, n = graph.edges, len(graph)
    every = np.arange(len(edges))
    releasing = np.flatnonzero(np.isin(edges.target, [row.task for row in graph.exchanges]))
    pairs = [(a, b, every if a == b else releasing) for a in range(ranks) for b in range(ranks)]
    chosen = np.concatenate([which for _, _, which in pairs])
    here = np.concatenate([np.full(len(which), a * n) for a, _, which in pairs])
    there = np.concatenate([np.full(len(which), b * n) for _, b, which in pairs])
    kind = np.where(here == there, edges.kind[chosen], Dependency.COMMUNICATION)
    return Edges.of(
        edges.source[chosen] + here, edges.target[chosen] + there, kind,
        edges.delay_ns[chosen], edges.lag[chosen],
    )  # fmt: skip
