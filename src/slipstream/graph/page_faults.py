"""The task that stands for a step's page faults, and how it changes when the step's memory does.

The C library gives freed memory back to the system when enough of it lies free at the top of its
heap; what the step needs again is then mapped page by page. Which blocks lie at the top depends
on the whole history of a process: two runs of one program may differ by all of it.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.graph.edit import Editor
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import Timeline, replay
from slipstream.provenance import Provenance

PAGE_FAULTS = "page faults"
"""What the task is called."""
# What the rule of growth is off by where memory changes, for each e-fold: over seven models and
# six techniques, page faults followed it within a factor of 1.6 at the worst.
_OF_CHANGE = 0.4
_LEAST_FACTOR = 0.1
# glibc keeps twice the largest block it mapped on its own and has back, which is at most this.
_LARGEST_MAPPED = 32 << 20
_SMALLEST_KEPT = 128 << 10
# Where the heap's holes are is not known: the rule is tried with less and with more at its top.
_KEPT = (0.5, 1.0, 2.0)
_CYCLES = 3


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


def with_page_faults(before: Timeline, after: Graph) -> Graph:
    """`after` with the page faults of its own memory; as it is where none were recorded.

    Their time goes with how far the heap grows again in every step, see `heap_growth`.
    """
    tasks, recorded = page_fault_tasks(after), page_fault_ns(before.graph)
    if not tasks or not recorded or not len(before.graph.memory):
        return after
    grown = heap_growth(before)
    factor = heap_growth(replay(after)) / grown if grown else 1.0
    if factor == 1.0 and page_fault_ns(after) == recorded:
        return after
    edit = Editor(after, PAGE_FAULTS)
    unsure = _OF_CHANGE * abs(math.log(max(factor, _LEAST_FACTOR)))
    for task in tasks:
        each = recorded * factor / len(tasks)
        spread = math.hypot(float(after.tasks.spread[task]), unsure)
        edit.set_duration(task, each, Provenance.FITTED, spread=spread)
    return edit.apply(f"page faults as the heap grows {factor:.2f} times as far in a step")


def heap_growth(timeline: Timeline) -> float:
    """Bytes by which the heap grows again during each step, were it free of holes.

    It grows to the most that lives at once, and shrinks to what lives whenever more lies free
    than glibc keeps.
    """
    memory, lives = timeline.graph.memory, timeline.memory
    changing = (memory.producer >= 0) | (memory.release >= 0)
    born = memory.producer >= 0
    freed = memory.release >= 0
    nbytes = memory.nbytes
    mapped = nbytes[changing & (nbytes <= _LARGEST_MAPPED)]
    kept = 2 * max(int(mapped.max(initial=0)), _SMALLEST_KEPT)
    times = np.concatenate([lives.birth_ns[0][born], lives.death_ns[0][freed]])
    change = np.concatenate([nbytes[born], -nbytes[freed]])
    # Frees come first at equal times, as in the simulation of memory.
    order = np.lexsort((change, times))
    changes = change[order].tolist()
    begin = int(nbytes[~born & freed].sum())
    return float(np.mean([_growth(changes, begin, kept * factor) for factor in _KEPT]))


def _growth(changes: list[int], begin: int, kept: float) -> int:
    """Growth in the last of a few steps, when the first one's is over."""
    top, grown = begin, 0
    for _ in range(_CYCLES):
        alive, grown, before = begin, 0, top
        for change in changes:
            alive += change
            if alive > top:
                grown += alive - top
                top = alive
            elif top - alive > kept:
                top = alive
        if top == before:  # the next one would be the same
            break
    return grown
