"""Insert communications into a graph, with times from a cluster, and replace them.

The graph of one rank stands for all of them. A technique that compresses gradients takes the rows
of `Graph.exchanges` and specifies the replacement, on the lane of the gradients and on the network:

    edit = Editor(graph, "powersgd:4")
    for row in graph.exchanges:
        replace_exchange(
            edit, row, cluster,
            encode=[Work("P = M Q", 2.1e6, Provenance.MICROBENCHMARK)],
            transfers=[replace(row.collective, nbytes=compressed)],
            decode=[Work("P Q^T", 1.3e6, Provenance.MICROBENCHMARK)],
        )
    compressed = edit.apply("gradients of rank 4")

`Exchange.tensors` are the gradients in the bucket, `Exchange.ready` the task that releases it,
`Exchange.awaited` the first task that needs the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.call import Call, TensorSpec
from slipstream.graph.edit import Editor
from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import Timeline, replay
from slipstream.graph.values import Kind
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.cluster import Cluster, Collective, Cost

NETWORK = "network"
"""The name of the lane of communications."""
_Z90 = 1.645
# Half-width of the middle half of a normal distribution, in standard deviations.
_MIDDLE_HALF = 0.674
# Relative half-width of the 90 % interval of a network's time if only the data sheet is known.
_UNCALIBRATED = 0.25


@dataclass(frozen=True)
class Work:
    """A computation that an edit inserts."""

    name: str
    duration_ns: float
    provenance: Provenance
    spread: float = 0.0
    call: Call | None = None


def network_spread(cluster: Cluster) -> float:
    """Return the spread of communication times: relative half-width of the middle half."""
    calibration = cluster.calibration
    p90 = _UNCALIBRATED if calibration is None else calibration.residual_p90
    return p90 / _Z90 * _MIDDLE_HALF


def insert_exchange(
    edit: Editor,
    cluster: Cluster,
    collective: Collective,
    *,
    beside: int,
    ready: int,
    awaited: int,
    lag: int = 0,
    ready_lag: int = 0,
    tensors: tuple[TensorSpec, ...] = (),
    modules: tuple[str, ...] = (),
    name: str = "",
    duration_ns: float | None = None,
    cost: Cost | None = None,
    purpose: str = "gradient",
) -> int:
    """Insert a communication on the network's lane, with its time on `cluster`.

    Args:
        beside: the task that it follows in program order.
        ready: the task whose end releases it.
        awaited: the task that waits for it; -1 for none.
        lag: 1 when `awaited` belongs to the next step.
        ready_lag: 1 when `ready` belongs to the step before.
        modules: the module of each of `tensors`, which are its gradients.
        duration_ns: its duration, if known better than by the cluster's closed form.
        cost: the result of the cluster's closed form, if already computed.
        purpose: what it carries, see `Exchange.purpose`.

    Returns:
        The handle, as `Editor.insert` returns it.

    Raises:
        InvalidArgumentError: its group is larger than the cluster.
        ClusterError: two of its devices are not connected.
    """
    group = cluster.group_of(collective)
    if cost is None:
        cost = cluster.cost(replace(collective, group=group))
    handle = edit.insert(
        beside,
        name or collective.kind,
        cost.duration_ns if duration_ns is None else duration_ns,
        cost.provenance,
        spread=network_spread(cluster),
        kind=Kind.COMMUNICATION,
        lane=edit.lane(NETWORK),
    )
    edit.connect(ready, handle, lag=ready_lag)
    if awaited >= 0:
        edit.connect(handle, awaited, lag=lag)
    edit.exchange(
        Exchange(
            handle, ready, awaited, replace(collective, group=group), tensors, cost.latency_ns,
            cost.bytes_per_rank, cost.bottleneck, lag, modules, purpose,
        )
    )  # fmt: skip
    return handle


def replace_exchange(
    edit: Editor,
    row: Exchange,
    cluster: Cluster,
    *,
    encode: Sequence[Work],
    transfers: Sequence[Collective],
    decode: Sequence[Work],
    name: str = "compressed ",
    thread: str = "",
    duration_ns: float | None = None,
) -> None:
    """Replace `row` by encoding, sequential transfers and decoding.

    Without a `thread`, encoding runs on the lane of the gradients as soon as they are ready, and
    delays later tasks there; decoding runs there before the result is used.

    Args:
        name: prefix of the names of the transfers, before the kind of collective.
        thread: the lane of a thread with its own core, which processes the exchanges one by one,
            in the order of these calls: the next is encoded once the last is decoded.
        duration_ns: the duration of a transfer, as in `insert_exchange`.

    Raises:
        GraphError: the task that releases or awaits it is unknown.
    """
    if row.ready < 0 or row.awaited < 0:
        raise GraphError(
            f"exchange {row.task} cannot be replaced: the task that awaits it is unknown"
        )
    edit.remove(row.task)
    lane = edit.lane(thread) if thread else -1

    def in_turn(works: Sequence[Work], ready: int) -> int:
        """Insert `works` on the thread, sequentially; return the last."""
        for work in works:
            handle = _put(edit, row.task, work, lane=lane)
            edit.connect(ready, handle)
            ready = handle
        return ready

    def transfer(ready: int, awaited: int) -> int:
        """Insert the transfers, sequentially; return the last, for which `awaited` waits."""
        for number, collective in enumerate(transfers):
            last = number == len(transfers) - 1
            ready = insert_exchange(
                edit,
                cluster,
                collective,
                beside=row.task,
                ready=ready,
                awaited=awaited if last else -1,
                lag=row.lag if last and awaited >= 0 else 0,
                tensors=row.tensors if last else (),
                modules=row.modules if last else (),
                name=f"{name}{collective.kind}",
                duration_ns=duration_ns,
            )
        return ready

    if thread:
        ready = transfer(in_turn(encode, row.ready), -1 if decode else row.awaited)
        if decode:
            edit.connect(in_turn(decode, ready), row.awaited, lag=row.lag)
        return
    ready = row.ready
    for work in encode:
        ready = _put(edit, row.ready, work)
    # The first decoding waits for the last transfer; the others follow on their lane.
    decoded = [_put(edit, row.awaited, work, before=True) for work in decode]
    transfer(ready, decoded[0] if decoded else row.awaited)


def with_overlap(graph: Graph, cluster: Cluster) -> Graph:
    """Slow down computations by the cluster's penalty while the worker communicates.

    The overlap is that of `graph`; the additional overlap of longer tasks is neglected.
    """
    penalty = cluster.overlap_penalty
    if not penalty.value or not graph.exchanges:
        return graph
    timeline = replay(graph)
    edit = Editor(graph, "overlap")
    communicates = graph.tasks.kind == Kind.COMMUNICATION
    spans = {rank: _spans(graph, timeline, rank) for rank in np.unique(graph.tasks.rank).tolist()}
    slowed = 0
    for task in np.flatnonzero(~communicates & (graph.tasks.duration_ns > 0)).tolist():
        start, end = spans[int(graph.tasks.rank[task])]
        overlap = np.minimum(end, timeline.end_ns[task]) - np.maximum(
            start, timeline.start_ns[task]
        )
        spent = float(np.maximum(overlap, 0.0).sum())
        if spent > 0.0:
            longer = float(graph.tasks.duration_ns[task]) + penalty.value * spent
            edit.set_duration(task, longer, penalty.provenance)
            slowed += 1
    return edit.apply(f"{slowed} computations slowed by simultaneous communication")


def _spans(
    graph: Graph, timeline: Timeline, rank: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of the stretches in which a rank communicates, in ns."""
    tasks = graph.tasks
    joined = np.zeros(len(graph), bool)
    for row in graph.exchanges:
        group = row.collective.group
        joined[row.task] = not graph.has_several_ranks or group is None or rank in group.members
    communicates = (tasks.kind == Kind.COMMUNICATION) & (joined | (tasks.rank == rank))
    start, end = timeline.start_ns[communicates], timeline.end_ns[communicates]
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    # Simultaneous transfers in both directions count once.
    start[1:] = np.maximum(start[1:], end[:-1])
    return start, end


def _put(edit: Editor, where: int, work: Work, *, before: bool = False, lane: int = -1) -> int:
    return edit.insert(
        where,
        work.name,
        work.duration_ns,
        work.provenance,
        spread=work.spread,
        call=work.call,
        before=before,
        lane=lane,
    )
