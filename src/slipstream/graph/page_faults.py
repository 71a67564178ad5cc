"""The task that represents a step's page faults, and its duration after changes of memory.

The C library returns freed memory to the system when enough of it is free at the top of the heap;
memory that the step needs again is then mapped page by page. Which blocks are at the top depends
on the whole history of a process: two runs of one program may have all page faults or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream import native
from slipstream.graph.edit import append_task
from slipstream.graph.graph import Graph, replace_tasks
from slipstream.graph.timeline import Timeline, replay_like
from slipstream.graph.values import PROVENANCES, Edit, Kind
from slipstream.provenance import Provenance

PAGE_FAULTS = "page faults"
"""Name of the task."""
PAGE_FAULT_LAUNCHES = "page_fault_launches_ns"
"""Key of `Graph.meta`: page fault time in each observed launch, the recorded one first."""
# Error of the rule of heap growth per e-fold change: over seven models and six techniques, page
# faults followed it within a factor of 1.6. It ignores fragmentation, and its error is larger where
# that dominates: a checkpointed depthwise net faults two to four times as often.
_ERROR_PER_E_FOLD = 0.4
_MIN_FACTOR = 0.1
# A few launches may agree by chance.
_MIN_SPREAD = 0.1
# glibc retains twice the size of the largest freed block that it had mapped separately, which has
# at most `_MAX_MAPPED` bytes. Its initial threshold is `_MIN_RETAINED`.
_MAX_MAPPED = 32 << 20
_MIN_RETAINED = 128 << 10
# The heap's holes are unknown, so the rule is averaged over these multiples of retained bytes.
_RETAINED_FACTORS = (0.5, 1.0, 2.0)
MATTERS = 0.01
"""Share of a step below which page faults are neglected, also by recordings."""


def page_fault_tasks(graph: Graph) -> list[int]:
    """Return the tasks that represent page faults; none if they are negligible."""
    if PAGE_FAULTS not in graph.strings:
        return []
    name = graph.strings.index(PAGE_FAULTS)
    return np.flatnonzero(graph.tasks.name == name).tolist()


def page_fault_ns(graph: Graph) -> float:
    """Return the time of page faults in the step."""
    return float(graph.tasks.duration_ns[page_fault_tasks(graph)].sum())


def page_fault_error_ns(graph: Graph) -> float:
    """Return the standard deviation of that time between launches."""
    tasks = page_fault_tasks(graph)
    return float(graph.tasks.duration_ns[tasks] @ graph.tasks.spread[tasks])


def may_fault(graph: Graph) -> bool:
    """Whether the recorded step allocates enough for glibc to return some memory within it."""
    memory = graph.memory
    changing = (memory.producer >= 0) | (memory.release >= 0)
    return int(memory.nbytes[changing].sum()) > _MIN_RETAINED


def with_launches(graph: Graph, others_ns: Sequence[float]) -> Graph:
    """Set the page faults of the step to their mean over several launches of its program.

    The spread of the task is the variation between launches. The times are stored in `Graph.meta`.

    Args:
        others_ns: page fault time of a step in each launch but the recorded one.
    """
    if not others_ns:
        return graph
    launches_ns = [page_fault_ns(graph), *others_ns]
    mean, count = float(np.mean(launches_ns)), len(launches_ns)
    tasks = page_fault_tasks(graph)
    if not tasks and mean < MATTERS * float(graph.tasks.duration_ns.sum()):
        return graph
    # The standard error of the difference between the mean and a further launch.
    spread = float(np.std(launches_ns, ddof=1)) * math.sqrt(1 + 1 / count) / max(mean, 1.0)
    spread = max(spread, _MIN_SPREAD)
    graph = replace(graph, meta={**graph.meta, PAGE_FAULT_LAUNCHES: launches_ns})
    if not tasks:
        return append_task(graph, PAGE_FAULTS, mean, spread, Kind.HOST)
    duration_ns, spreads = graph.tasks.duration_ns.copy(), graph.tasks.spread.copy()
    duration_ns[tasks] = mean / len(tasks)
    spreads[tasks] = spread
    return replace_tasks(graph, duration_ns=duration_ns, spread=spreads)


def with_page_faults(before: Timeline, after: Timeline) -> Timeline:
    """Scale the page faults of `after` to its memory.

    Returns it unchanged if it has none, or contains several ranks, which have separate heaps.

    Their time is proportional to the growth of the heap in every step, see `heap_growth`.
    """
    graph, tasks = after.graph, after.graph.tasks
    faults, recorded = page_fault_tasks(graph), page_fault_ns(before.graph)
    if not faults or not recorded or not len(before.graph.memory) or graph.has_several_ranks:
        return after
    grown = heap_growth(before)
    factor = heap_growth(after) / grown if grown else 1.0
    if factor == 1.0 and page_fault_ns(graph) == recorded:
        return after
    duration_ns, spread = tasks.duration_ns.copy(), tasks.spread.copy()
    provenance = tasks.provenance.copy()
    error = _ERROR_PER_E_FOLD * abs(math.log(max(factor, _MIN_FACTOR)))
    duration_ns[faults] = recorded * factor / len(faults)
    spread[faults] = np.hypot(spread[faults], error)
    provenance[faults] = PROVENANCES.index(Provenance.FITTED)
    what = f"page faults for {factor:.2f} times the heap growth per step"
    edited = replace_tasks(graph, duration_ns=duration_ns, spread=spread, provenance=provenance)
    edits = (*graph.edits, Edit(PAGE_FAULTS, what, len(faults)))
    return replay_like(after, replace(edited, edits=edits))


def heap_growth(timeline: Timeline) -> float:
    """Return the bytes by which a heap without holes grows in each step.

    It grows to the peak of live memory, and shrinks to live memory whenever more is free than
    glibc retains.
    """
    memory = timeline.graph.memory
    changing = (memory.producer >= 0) | (memory.release >= 0)
    nbytes = memory.nbytes
    mapped = nbytes[changing & (nbytes <= _MAX_MAPPED)]
    retained = 2 * max(int(mapped.max(initial=0)), _MIN_RETAINED)
    begin = int(nbytes[(memory.producer < 0) & (memory.release >= 0)].sum())
    change = timeline.memory_changes
    return float(
        np.mean([native.heap_growth(change, begin, retained * by) for by in _RETAINED_FACTORS])
    )
