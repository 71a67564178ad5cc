"""What page faults cost in other launches of the recorded program, which differ by their heaps."""

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

# Besides the recorded one; fewer where they differ by less than this share of a step, and one where
# page faults do not matter in either.
_LAUNCHES, _ENOUGH = 4, 2
_ALIKE = 0.03
_LONGEST_S = 15.0


def watch_launches(
    graph: Graph,
    workload: Workload,
    *,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    longest_s: float = _LONGEST_S,
    launch_s: float = 0.0,
    until: float = math.inf,
    say: Callable[[str], None] = lambda line: None,
) -> Graph:
    """The recorded step, its page faults being those of several launches in the mean.

    As it is where a step has no memory to give back, runs on several lanes or in this process, or
    where they were watched already.

    Args:
        longest_s: no launch begins after so many seconds of them.
        launch_s: an estimate of what the first launch takes, in seconds.
        until: deadline, of `time.monotonic`: no launch begins if the previous one took longer than
            the time left, and a launch that runs at the deadline is killed and not counted.

    Raises:
        WorkloadError, ChildError: as recording it does; no ChildError with a finite `until`.
    """
    watched = "lanes_of" in graph.meta or PAGE_FAULT_LAUNCHES in graph.meta
    if watched or workload.live is not None or not may_fault(graph):
        return graph
    recorded = page_fault_ns(graph)
    step_ns = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum())
    others: list[float] = []
    began = now = time.monotonic()
    while len(others) < _LAUNCHES and now - began < longest_s and now + launch_s < until:
        most = max(recorded, *others, 0.0)
        apart = most - min(recorded, *others, math.inf)
        enough = _ENOUGH if most >= MATTERS * step_ns else 1
        if len(others) >= enough and apart < _ALIKE * step_ns:
            break
        say(f"watching page faults of another launch, {len(others) + 1} of at most {_LAUNCHES}")
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
    """A step's time for page faults in this process, in ns. Runs in the child."""

    def program(built: BuiltWorkload) -> Generator[None, Any, float]:
        import torch

        torch.set_num_threads(step_threads)
        return (yield from watch_faults(step_threads))

    return float(run_program(workload, keep_in, program))


def launches_in_words(graph: Graph) -> str:
    """How page faults differ between launches; empty where they were not watched."""
    every = graph.meta.get(PAGE_FAULT_LAUNCHES)
    if not every:
        return ""
    rest = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()) - page_fault_ns(graph)
    low, high = (format_percent(one / (rest + one)) for one in (min(every), max(every)))
    return f"page faults take {low} to {high} of a step in {len(every)} launches of the program"
