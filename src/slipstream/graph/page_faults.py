"""The task that stands for a step's page faults, and how it changes when the step's memory does.

The C library gives freed memory back to the system when enough of it lies free at the top of its
heap; what the step needs again is then mapped page by page. Which blocks lie at the top depends
on the whole history of a process: two runs of one program may differ by all of it.
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
"""What the task is called."""
PAGE_FAULT_LAUNCHES = "page_fault_launches_ns"
"""Of a graph's `meta`: their time in each launch that was watched, the recorded one first."""
# What the rule of growth is off by where memory changes, for each e-fold: over seven models and six
# techniques, page faults followed it within a factor of 1.6. It knows nothing of holes, and is off
# by more where these decide: checkpointed, a depthwise net faults two to four times as often.
_OF_CHANGE = 0.4
_LEAST_FACTOR = 0.1
# Few launches that happen to agree do not show that all do.
_LEAST_SPREAD = 0.1
# glibc keeps twice the largest block it mapped on its own and has back, which is at most this.
_LARGEST_MAPPED = 32 << 20
_SMALLEST_KEPT = 128 << 10
# Where the heap's holes are is not known: the rule is tried with less and with more at its top.
_KEPT = (0.5, 1.0, 2.0)


# What a step allocates anew, from which on the heap may shrink in between: glibc's least threshold.
_MAY_SHRINK = 128 << 10
MATTERS = 0.01
"""Below this share of a step they are left out, as they are where a step is recorded."""


def page_fault_tasks(graph: Graph) -> list[int]:
    """The tasks that stand for page faults; none where they do not matter."""
    if PAGE_FAULTS not in graph.strings:
        return []
    name = graph.strings.index(PAGE_FAULTS)
    return np.flatnonzero(graph.tasks.name == name).tolist()


def page_fault_ns(graph: Graph) -> float:
    """Time of the step that goes to page faults."""
    return float(graph.tasks.duration_ns[page_fault_tasks(graph)].sum())


def page_fault_error_ns(graph: Graph) -> float:
    """By how much that time differs between launches, as a standard deviation."""
    tasks = page_fault_tasks(graph)
    return float(graph.tasks.duration_ns[tasks] @ graph.tasks.spread[tasks])


def may_fault(graph: Graph) -> bool:
    """Whether the recorded step allocates enough for glibc to give some back in between."""
    memory = graph.memory
    changing = (memory.producer >= 0) | (memory.release >= 0)
    return int(memory.nbytes[changing].sum()) > _MAY_SHRINK


def with_launches(graph: Graph, others_ns: Sequence[float]) -> Graph:
    """The step with page faults as they are in the mean of several launches of its program.

    How far these lie apart is the spread of the task: it is what another launch will differ by.
    They are kept in the graph's `meta`.

    Args:
        others_ns: time of a step that goes to page faults, in other launches than the recorded.
    """
    if not others_ns:
        return graph
    every = [page_fault_ns(graph), *others_ns]
    mean, count = float(np.mean(every)), len(every)
    tasks = page_fault_tasks(graph)
    if not tasks and mean < MATTERS * float(graph.tasks.duration_ns.sum()):
        return graph
    # Of a mean of few and one more launch.
    spread = float(np.std(every, ddof=1)) * math.sqrt(1 + 1 / count) / max(mean, 1.0)
    spread = max(spread, _LEAST_SPREAD)
    graph = replace(graph, meta={**graph.meta, PAGE_FAULT_LAUNCHES: every})
    if not tasks:
        return append_task(graph, PAGE_FAULTS, mean, spread, Kind.HOST)
    duration_ns, spreads = graph.tasks.duration_ns.copy(), graph.tasks.spread.copy()
    duration_ns[tasks] = mean / len(tasks)
    spreads[tasks] = spread
    return replace_tasks(graph, duration_ns=duration_ns, spread=spreads)


def with_page_faults(before: Timeline, after: Timeline) -> Timeline:
    """`after` with the page faults of its own memory; as it is where none were recorded.

    Their time goes with how far the heap grows again in every step, see `heap_growth`.
    """
    graph, tasks = after.graph, after.graph.tasks
    faults, recorded = page_fault_tasks(graph), page_fault_ns(before.graph)
    if not faults or not recorded or not len(before.graph.memory):
        return after
    grown = heap_growth(before)
    factor = heap_growth(after) / grown if grown else 1.0
    if factor == 1.0 and page_fault_ns(graph) == recorded:
        return after
    duration_ns, spread = tasks.duration_ns.copy(), tasks.spread.copy()
    provenance = tasks.provenance.copy()
    unsure = _OF_CHANGE * abs(math.log(max(factor, _LEAST_FACTOR)))
    duration_ns[faults] = recorded * factor / len(faults)
    spread[faults] = np.hypot(spread[faults], unsure)
    provenance[faults] = PROVENANCES.index(Provenance.FITTED)
    what = f"page faults as the heap grows {factor:.2f} times as far in a step"
    edited = replace_tasks(graph, duration_ns=duration_ns, spread=spread, provenance=provenance)
    edits = (*graph.edits, Edit(PAGE_FAULTS, what, len(faults)))
    return replay_like(after, replace(edited, edits=edits))


def heap_growth(timeline: Timeline) -> float:
    """Bytes by which the heap grows again during each step, were it free of holes.

    It grows to the most that lives at once, and shrinks to what lives whenever more lies free
    than glibc keeps.
    """
    memory = timeline.graph.memory
    changing = (memory.producer >= 0) | (memory.release >= 0)
    nbytes = memory.nbytes
    mapped = nbytes[changing & (nbytes <= _LARGEST_MAPPED)]
    kept = 2 * max(int(mapped.max(initial=0)), _SMALLEST_KEPT)
    begin = int(nbytes[(memory.producer < 0) & (memory.release >= 0)].sum())
    change = timeline.memory_changes
    return float(np.mean([native.heap_growth(change, begin, kept * by) for by in _KEPT]))
