"""What page faults cost in other launches of the recorded program, which differ by their heaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from slipstream.capture.paging import watch_faults
from slipstream.graph import Graph
from slipstream.graph.page_faults import may_fault, page_fault_ns, with_launches
from slipstream.units import format_percent
from slipstream.verbs.children import call_in_child, run_program
from slipstream.workload import Built, Workload

# Besides the recorded one; two that hardly fault, and no more are made.
_LAUNCHES = 4
_ENOUGH_WITHOUT = 1
# No launch begins after so many seconds of them.
_LONGEST_S = 15.0


def watch_launches(
    graph: Graph,
    workload: Workload,
    *,
    threads: int,
    warmup: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> Graph:
    """The recorded step, its page faults being those of several launches in the mean.

    As it is where a step has no memory to give back, or runs on several lanes.

    Raises:
        WorkloadError, ChildError: as recording it does.
    """
    if "lanes_of" in graph.meta or not may_fault(graph):
        return graph
    others: list[float] = []
    began = time.monotonic()
    while len(others) < _LAUNCHES and time.monotonic() - began < _LONGEST_S:
        if not page_fault_ns(graph) and len(others) > _ENOUGH_WITHOUT and not any(others):
            break
        say(f"watching page faults of another launch, {len(others) + 1} of at most {_LAUNCHES}")
        others.append(
            call_in_child(
                workload,
                "slipstream.verbs.launches:watch_in_child",
                threads=threads,
                timeout_s=timeout_s,
                step_threads=int(graph.meta["threads"]),
                warmup=warmup,
            )
        )
    return with_launches(graph, others)


def watch_in_child(workload: dict[str, Any], keep_in: str, step_threads: int, warmup: int) -> float:
    """A step's time for page faults in this process, in ns. Runs in the child."""

    def program(built: Built) -> Generator[None, Any, float]:
        import torch

        torch.set_num_threads(step_threads)
        return (yield from watch_faults(step_threads, warmup))

    return float(run_program(workload, keep_in, program))


def launches_in_words(graph: Graph) -> str:
    """How page faults differ between launches; empty where they were not watched."""
    every = graph.meta.get("page_fault_launches_ns")
    if not every:
        return ""
    rest = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()) - page_fault_ns(graph)
    low, high = (format_percent(one / (rest + one)) for one in (min(every), max(every)))
    return f"page faults take {low} to {high} of a step in {len(every)} launches of the program"
