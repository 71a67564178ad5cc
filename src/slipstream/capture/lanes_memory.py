"""Allocations of a step with several lanes, attributed to its tasks.

The host calls the allocator, also for a device: the output of a kernel is allocated before its
launch, and freed in stream order when the host drops it. An allocation is therefore owned by a task
of a thread. Within a task, only its peak counts.
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
"""Reason for missing allocations of a step without a device."""


@dataclass(frozen=True)
class WatchedStep:
    """A step recorded with its allocations and module names.

    Attributes:
        trace: Trace whose last step it is.
        before: Storages at its start: bytes and role, by address.
        gradients: Addresses of parameters' gradients at its end.
    """

    trace: KinetoTrace
    before: Held
    gradients: frozenset[int]


def with_memory(graph: Graph, watched: WatchedStep, device: str) -> Graph:
    """Add the allocations on `device` of a step of the same kind, or the reason for none."""
    if device == "cpu":
        return replace(graph, meta={**graph.meta, "memory_reason": SEVERAL_THREADS})
    step = watched.trace.steps[-1]
    other, start = watched.trace.timed_graph(step.number)
    changes = [change for change in watched.trace.memory if change.device == device]
    inside = [c for c in changes if step.begin_ns <= c.time_ns < step.end_ns]
    if not inside:
        return replace(graph, meta={**graph.meta, "memory_reason": NOTHING_SEEN})
    earlier = ((c.address, c.nbytes) for c in changes if c.time_ns < step.begin_ns)
    before = alive_after(earlier, watched.before)
    if device == "cuda":
        # The allocator reports the total, part of which may be unidentified.
        given_out = inside[0].total_bytes - inside[0].nbytes
        unknown = given_out - sum(size for size, _ in before.values())
        if unknown > 0:
            before = {**before, -1: (unknown, Role.OTHER)}
    blocks = _allocations(other, start, inside, before, watched.gradients)
    owner = _owners(graph, other)
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
    """Return the task in or after which each change happened, on its thread."""
    # Changes of other threads belong to the host's last task.
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


def _owners(graph: Graph, watched: Graph) -> NDArray[np.int64]:
    """Return the task of `graph` for each task of `watched`, int64; else its predecessor's."""
    partner = partners(watched, graph)
    for lane in np.unique(watched.tasks.lane):
        tasks = np.flatnonzero(watched.tasks.lane == lane)
        latest = np.maximum.accumulate(np.where(partner[tasks] >= 0, np.arange(len(tasks)), -1))
        first = partner[tasks][partner[tasks] >= 0]
        fallback = int(first[0]) if len(first) else 0
        partner[tasks] = np.where(latest >= 0, partner[tasks][np.maximum(latest, 0)], fallback)
    return partner
