"""Measure page faults in other launches of a recorded program, whose heaps differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any

from slipstream.capture.paging import watch_faults
from slipstream.errors import ChildError
from slipstream.graph import Graph
from slipstream.graph.page_faults import (
    MATTERS,
    PAGE_FAULT_LAUNCHES,
    may_fault,
    page_fault_ns,
    with_launches,
)
from slipstream.units import format_percent
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.script import ScriptEndedError

# Launches to add to the recorded one; _ENOUGH if they differ by less than _MAX_SPREAD of a step,
# and one if page faults matter in neither.
_LAUNCHES, _ENOUGH = 4, 2
_MAX_SPREAD = 0.03
_MAX_S = 15.0


def watch_launches(
    graph: Graph,
    workload: Workload,
    *,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    time_limit_s: float = _MAX_S,
    launch_s: float = 0.0,
    until: float = math.inf,
    report: Callable[[str], None] = lambda line: None,
) -> Graph:
    """Return the graph with its page faults averaged over several launches.

    Returns `graph` unchanged if its step frees no memory, runs on several lanes or in this process,
    or if its launches were watched before.

    Args:
        time_limit_s: no launch starts after this many seconds of launches.
        launch_s: estimated time of the first launch, in seconds.
        until: deadline, by `time.monotonic`: no launch starts if the previous one took longer than
            the remaining time; one still running at the deadline is killed and not counted.
    """
    watched = "lanes_of" in graph.meta or PAGE_FAULT_LAUNCHES in graph.meta
    if watched or workload.live is not None or not may_fault(graph):
        return graph
    recorded = page_fault_ns(graph)
    step_ns = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum())
    others: list[float] = []
    began = now = time.monotonic()
    while len(others) < _LAUNCHES and now - began < time_limit_s and now + launch_s < until:
        highest = max(recorded, *others, 0.0)
        spread_ns = highest - min(recorded, *others, math.inf)
        enough = _ENOUGH if highest >= MATTERS * step_ns else 1
        if len(others) >= enough and spread_ns < _MAX_SPREAD * step_ns:
            break
        report(f"watching page faults of another launch, {len(others) + 1} of at most {_LAUNCHES}")
        try:
            others.append(
                call_in_child(
                    workload,
                    "slipstream.verbs.page_faults:watch_in_child",
                    threads=threads,
                    timeout_s=timeout_s,
                    until=until,
                    step_threads=int(graph.meta["threads"]),
                )
            )
        except ScriptEndedError:
            break
        except ChildError:
            if until == math.inf:
                raise
            break
        before, now = now, time.monotonic()
        launch_s = now - before
    return with_launches(graph, others)


def watch_in_child(workload: dict[str, Any], keep_in: str, step_threads: int) -> float:
    """Return a step's page-fault time in this process, in ns. Runs in the child."""

    def program(built: BuiltWorkload) -> Generator[None, Any, float]:
        import torch

        torch.set_num_threads(step_threads)
        return (yield from watch_faults(step_threads))

    return float(run_program(workload, keep_in, program))


def launches_in_words(graph: Graph) -> str:
    """Describe how page faults differ between launches; empty if they were not watched."""
    launches = graph.meta.get(PAGE_FAULT_LAUNCHES)
    if not launches:
        return ""
    others_ns = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()) - page_fault_ns(
        graph
    )
    low, high = (format_percent(ns / (others_ns + ns)) for ns in (min(launches), max(launches)))
    return f"page faults take {low} to {high} of a step in {len(launches)} launches of the program"
