"""Replicate the step of one rank on many, with copies that synchronise in their exchanges.

The graph of one rank represents all of them as long as they are equally fast. Otherwise every
collective waits for the slowest rank, and the other work of a rank determines how much of that
wait is exposed. Copies with separate paces simulate this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.graph.graph import Graph
from slipstream.graph.values import Dependency, Edges, Edit, Kind, Tasks


def replicate(graph: Graph, ranks: int, *, jitter: float = 0.0, seed: int = 0) -> Graph:
    """Return `graph` on `ranks` ranks; task t of rank r is task ``r * len(graph) + t``.

    Each rank has separate lanes. An exchange (`Graph.exchanges`) begins on all ranks when the last
    one is ready for it: with several ranks, a task per exchange follows in which they meet.
    Allocations are those of the first rank, because ranks do not share memory.

    Args:
        ranks: the number of ranks; equal to `graph.workers` if that is above 1.
        jitter: relative standard deviation of the pace of a rank: the factor of the durations of
            its local tasks, drawn from a normal distribution.
        seed: the seed of these factors.

    Raises:
        InvalidArgumentError: `ranks` is below 1 or differs from `graph.workers`, or `jitter` is
            outside [0, 1).
    """
    if ranks < 1 or (graph.workers > 1 and ranks != graph.workers):
        raise InvalidArgumentError(
            "ranks",
            f"{ranks} ranks for a step of {graph.workers}",
            remedy=f"pass {graph.workers}" if graph.workers > 1 else "pass 1 or more",
        )
    if not 0 <= jitter < 1:
        raise InvalidArgumentError(
            "jitter", f"{jitter} is not between 0 and 1", remedy="for example 0.03 for 3 %"
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
    if ranks > 1:
        replicated = _with_joins(graph, replicated, ranks)
    replicated.check()
    return replicated


def _with_joins(graph: Graph, copies: Graph, ranks: int) -> Graph:
    """Return `copies` of `graph` whose exchanges begin together.

    A task without duration waits for all ranks to be ready for an exchange, and releases it on each
    of them, so that the number of edges is proportional to that of ranks.
    """
    n, edges, rows = len(graph), graph.edges, [row.task for row in graph.exchanges]
    offset = np.repeat(np.arange(ranks) * n, len(edges))
    source, target = np.tile(edges.source, ranks), np.tile(edges.target, ranks) + offset
    kind, delay_ns, lag = (
        np.tile(column, ranks) for column in (edges.kind, edges.delay_ns, edges.lag)
    )
    join_of = np.full(n, -1)
    join_of[rows] = n * ranks + np.arange(len(rows))
    joined = np.tile(join_of[edges.target], ranks)
    released = np.concatenate([np.arange(ranks) * n + row for row in rows] or [np.empty(0, int)])
    joins = np.repeat(n * ranks + np.arange(len(rows)), ranks)
    zeros = np.zeros(len(joins))
    # Joins of exchanges on one lane are in their order.
    lanes, lane = np.unique(graph.tasks.lane[rows], return_inverse=True)
    tasks = graph.tasks.take(np.array(rows, np.int64))
    nothing = np.zeros(len(rows))
    tasks = replace(
        tasks, duration_ns=nothing, gap_ns=nothing, spread=nothing,
        kind=np.full(len(rows), int(Kind.WAIT), np.uint8),
        lane=(len(copies.lanes) + lane).astype(np.int32),
    )  # fmt: skip
    return replace(
        copies,
        tasks=copies.tasks.joined(tasks),
        edges=Edges.of(
            np.concatenate([source + offset, joins]),
            np.concatenate([np.where(joined >= 0, joined, target), released]),
            np.concatenate([
                np.where(joined >= 0, Dependency.COMMUNICATION, kind),
                np.full(len(joins), int(Dependency.COMMUNICATION)),
            ]),
            np.concatenate([delay_ns, zeros]), np.concatenate([lag, zeros]),
        ),
        operand_start=np.append(
            copies.operand_start, np.full(len(rows), copies.operand_start[-1])
        ),
        lanes=(*copies.lanes, *(f"start of {graph.lanes[number]}" for number in lanes)),
    )  # fmt: skip
