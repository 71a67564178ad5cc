"""What a step with several lanes allocates and frees, tied to its tasks.

The host asks the allocator, on a device too: what a kernel writes was allocated before its launch,
and is given back, in the order of the stream, when the host drops it. So what owns an allocation
is a task of a thread. Within a task, only the most that it needs at once counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.lanes import partners
from slipstream.capture.memory import (
    NOTHING_SEEN,
    Held,
    alive_after,
    role_between,
    with_workspaces,
)
from slipstream.graph import Allocations, Graph, KinetoTrace, MemoryChange, Role

SEVERAL_THREADS = (
    "the step runs on several threads, and PyTorch's profiler sees the allocations of one"
)
"""Why there are no allocations of a step without a device."""


@dataclass(frozen=True)
class WatchedStep:
    """A step that was recorded with its allocations and the names of its modules.

    Attributes:
        trace: its last step is the one.
        before: what exists when that begins: by address, bytes and role.
        gradients: addresses of parameters' gradients when it ends.
    """

    trace: KinetoTrace
    before: Held
    gradients: frozenset[int]


def with_memory(graph: Graph, watched: WatchedStep, device: str) -> Graph:
    """`graph` with the allocations on `device` of a step of the same kind; or with why not."""
    if device == "cpu":
        return replace(graph, meta={**graph.meta, "memory_reason": SEVERAL_THREADS})
    step = watched.trace.steps[-1]
    there, start = watched.trace.timed_graph(step.number)
    changes = [change for change in watched.trace.memory if change.device == device]
    inside = [c for c in changes if step.begin_ns <= c.time_ns < step.end_ns]
    if not inside:
        return replace(graph, meta={**graph.meta, "memory_reason": NOTHING_SEEN})
    earlier = ((c.address, c.nbytes) for c in changes if c.time_ns < step.begin_ns)
    before = alive_after(earlier, watched.before)
    if device == "cuda":
        # The allocator says how much it has given out: some of it nobody could name.
        given_out = inside[0].total_bytes - inside[0].nbytes
        unknown = given_out - sum(size for size, _ in before.values())
        if unknown > 0:
            before = {**before, -1: (unknown, Role.OTHER)}
    blocks = _allocations(there, start, inside, before, watched.gradients)
    owner = _owners(graph, there)
    memory = replace(
        blocks,
        producer=np.where(blocks.producer >= 0, owner[blocks.producer], -1).astype(np.int32),
        release=np.where(blocks.release >= 0, owner[blocks.release], -1).astype(np.int32),
    )
    return replace(graph, memory=memory)


def _allocations(
    graph: Graph,
    start: NDArray[np.float64],
    changes: Sequence[MemoryChange],
    before: Held,
    gradients: frozenset[int],
) -> Allocations:
    task_of = _tasks_at(graph, start, changes)
    level = sum(size for size, _ in before.values())
    peak = np.zeros(len(graph), np.int64)
    rows: list[tuple[int, Role, int, int]] = []
    live: dict[int, tuple[int, int, Role]] = {
        at: (size, -1, role) for at, (size, role) in before.items()
    }
    for change, task in zip(changes, task_of.tolist(), strict=True):
        level += change.nbytes
        peak[task] = max(peak[task], level)
        if change.nbytes > 0:
            live[change.address] = (change.nbytes, task, Role.OTHER)
            continue
        size, producer, role = live.pop(change.address, (0, -1, Role.OTHER))
        if not size:
            level -= change.nbytes
        elif producer != task:
            rows.append((size, _role(graph, producer, task, role, False), producer, task))
    for at, (size, producer, role) in live.items():
        rows.append((size, _role(graph, producer, -1, role, at in gradients), producer, -1))
    nbytes, roles, producers, releases = zip(*rows, strict=True)
    allocated = Allocations.of(nbytes, [-1] * len(rows), roles, producers, releases)
    return with_workspaces(allocated, peak)


def _tasks_at(
    graph: Graph, start: NDArray[np.float64], changes: Sequence[MemoryChange]
) -> NDArray[np.int64]:
    """The task that each change happened in, or after, on the thread that made it."""
    # Other changes belong to whatever the host did last.
    host = np.array([not lane.startswith("gpu") for lane in graph.lanes], np.bool_)
    lanes = {name: np.flatnonzero(graph.tasks.lane == at) for at, name in enumerate(graph.lanes)}
    anywhere = np.flatnonzero(host[graph.tasks.lane])
    task_of = np.empty(len(changes), np.int64)
    for row, change in enumerate(changes):
        tasks = lanes.get(change.thread, anywhere)
        at = int(np.searchsorted(start[tasks], change.time_ns, side="right")) - 1
        task_of[row] = tasks[max(at, 0)]
    return task_of


def _role(graph: Graph, producer: int, release: int, role: Role, gradient: bool) -> Role:
    if producer < 0:
        return role
    phase = graph.tasks.phase
    return role_between(phase[producer], phase[release] if release >= 0 else None, gradient)


def _owners(graph: Graph, there: Graph) -> NDArray[np.int64]:
    """int64 [tasks of `there`]: the task of `graph` that each is, or that the last known is."""
    partner = partners(there, graph)
    for lane in np.unique(there.tasks.lane):
        tasks = np.flatnonzero(there.tasks.lane == lane)
        known = np.maximum.accumulate(np.where(partner[tasks] >= 0, np.arange(len(tasks)), -1))
        first = partner[tasks][partner[tasks] >= 0]
        fallback = int(first[0]) if len(first) else 0
        partner[tasks] = np.where(known >= 0, partner[tasks][np.maximum(known, 0)], fallback)
    return partner
