"""The memory peak of a step, and the allocations that are live then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import Timeline, pools
from slipstream.graph.values import Role


@dataclass(frozen=True)
class Peak:
    """Memory at the peak of a step.

    Attributes:
        nbytes: allocated bytes.
        at_ns: time since the step's begin.
        task: the task that reaches it.
        before_bytes: bytes that exist before the step and outlive it.
        by_role, by_module: live bytes, largest first. Allocations from before the step belong to
            the first module that uses them; to ``(role)`` if none is known.
    """

    nbytes: int
    at_ns: float
    task: int
    before_bytes: int
    by_role: tuple[tuple[Role, int], ...]
    by_module: tuple[tuple[str, int], ...]


def find_peak(timeline: Timeline) -> Peak:
    """Return the memory peak of the simulated step.

    Raises:
        GraphError: memory was not recorded.
    """
    graph, memory = timeline.graph, timeline.graph.memory
    if not len(memory):
        reason = graph.meta.get("memory_reason")
        if reason:
            raise GraphError(f"memory was not recorded: {reason}")
        raise GraphError(
            "memory was not recorded",
            remedy="record the step again: slipstream profile WORKLOAD -o run.slipgraph",
        )
    lives = timeline.memory
    # Of several ranks, the one with the highest peak.
    pool = int(lives.peak_bytes.argmax())
    at_ns, here = float(lives.peak_time_ns[pool]), pools(graph) == pool
    lasting = here & (memory.producer < 0) & (memory.release < 0)
    alive = lasting | (here & (lives.birth_ns[0] <= at_ns) & (at_ns < lives.death_ns[0]))
    begun = np.where(timeline.start_ns <= at_ns, timeline.start_ns, -1.0)
    # Of several that begin at the same time, the last in program order.
    task = len(begun) - 1 - int(begun[::-1].argmax())
    nbytes = memory.nbytes[alive]
    roles = np.bincount(memory.role[alive], nbytes, minlength=len(Role))
    names = [*graph.strings, *(f"({role.name.lower()})" for role in Role)]
    module = _modules(graph)
    module = np.where(module > 0, module, len(graph.strings) + memory.role.astype(np.int64))
    modules = np.bincount(module[alive], nbytes, minlength=len(names))
    return Peak(
        timeline.peak_bytes,
        at_ns,
        task,
        int(memory.nbytes[lasting].sum()),
        tuple((Role(r), n) for r, n in _largest_first(roles)),
        tuple((names[m], n) for m, n in _largest_first(modules)),
    )


def _largest_first(totals: NDArray[Any]) -> list[tuple[int, int]]:
    order = np.argsort(-totals, kind="stable")
    return [(int(i), int(totals[i])) for i in order if totals[i] > 0]


def _modules(graph: Graph) -> NDArray[np.int32]:
    """Return the string index of each allocation's module, int32 [allocations]."""
    first: dict[int, int] = {}
    for task in range(len(graph)):
        module = int(graph.tasks.module[task])
        if module:
            for storage in graph.storages(task).tolist():
                first.setdefault(storage, module)
    memory = graph.memory
    modules: NDArray[np.int32] = graph.tasks.module[memory.producer].copy()
    for i in np.flatnonzero(memory.producer < 0).tolist():
        modules[i] = first.get(int(memory.storage[i]), 0)
    return modules
