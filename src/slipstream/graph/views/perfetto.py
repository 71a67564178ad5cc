"""Export of a simulated timeline as Chrome JSON for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import GraphError
from slipstream.files import replacing
from slipstream.graph.timeline import Timeline
from slipstream.graph.values import PROVENANCES, Dependency, Kind, StepPhase
from slipstream.graph.views.critical_path import find_critical_path

# More arrows make the viewer slow and are unreadable.
_MAX_FLOWS = 20_000
_NS_PER_US = 1e3


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """Convert the first step to a trace: ranks as processes, lanes as threads.

    Every task has its module, phase, scope, source line, slack and provenance as arguments; tasks
    on the critical path have the category "critical". Dependencies are arrows, and the number of
    busy lanes of each rank is a counter.
    """
    graph, tasks = timeline.graph, timeline.graph.tasks
    path = find_critical_path(timeline)
    critical = np.zeros(len(tasks), np.bool_)
    critical[path.task] = True
    events = _lanes(timeline)
    start = (timeline.start_ns / _NS_PER_US).tolist()
    length = ((timeline.end_ns - timeline.start_ns) / _NS_PER_US).tolist()
    strings = graph.strings
    columns = {name: column.tolist() for name, column in tasks.columns().items()}
    for task in range(len(tasks)):
        kind = Kind(columns["kind"][task]).name.lower()
        events.append(
            {
                "ph": "X",
                "name": strings[columns["name"][task]],
                "cat": f"{kind},critical" if critical[task] else kind,
                "pid": columns["rank"][task],
                "tid": columns["lane"][task],
                "ts": start[task],
                "dur": length[task],
                "args": {
                    "task": task,
                    "phase": StepPhase(columns["phase"][task]).name.lower(),
                    "module": strings[columns["module"][task]],
                    "scope": strings[columns["scope"][task]],
                    "source": strings[columns["source"][task]],
                    "provenance": str(PROVENANCES[columns["provenance"][task]]),
                    "slack_us": float(path.slack_ns[task]) / _NS_PER_US,
                    "gap_us": columns["gap_ns"][task] / _NS_PER_US,
                },
            }
        )
    events += _arrows(timeline)
    events += _counters(timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "producer": "slipstream",
            "workload": str(graph.meta.get("workload", "")),
            "step_ns": timeline.step_ns,
            "provenance": "simulated",
            "edits": [edit.what for edit in graph.edits],
        },
    }


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write `to_perfetto` to `path`.

    Raises:
        GraphError: the file cannot be written.
    """
    text = json.dumps(to_perfetto(timeline), separators=(",", ":"))
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _lanes(timeline: Timeline) -> list[dict[str, Any]]:
    """Return names of processes and threads, lanes in the graph's order."""
    graph = timeline.graph
    places = sorted(set(zip(graph.tasks.rank.tolist(), graph.tasks.lane.tolist(), strict=True)))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in places})
    ]
    for rank, lane in places:
        where = {"ph": "M", "pid": rank, "tid": lane}
        events.append({**where, "name": "thread_name", "args": {"name": graph.lanes[lane]}})
        events.append({**where, "name": "thread_sort_index", "args": {"sort_index": lane}})
    return events


def _arrows(timeline: Timeline) -> list[dict[str, Any]]:
    """Return flow events for the dependencies within the step."""
    tasks, edges = timeline.graph.tasks, timeline.graph.edges
    events: list[dict[str, Any]] = []
    for edge in np.flatnonzero(edges.lag == 0)[:_MAX_FLOWS].tolist():
        source, target = int(edges.source[edge]), int(edges.target[edge])
        name = Dependency(edges.kind[edge]).name.lower()
        for phase, task, time in (
            ("s", source, timeline.start_ns[source]),
            ("f", target, timeline.start_ns[target]),
        ):
            event = {
                "ph": phase, "id": edge, "name": name, "cat": name,
                "pid": int(tasks.rank[task]), "tid": int(tasks.lane[task]),
                "ts": float(time) / _NS_PER_US,
            }  # fmt: skip
            events.append({**event, "bp": "e"} if phase == "f" else event)
    return events


def _counters(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a counter of busy lanes of each rank, at its changes."""
    tasks = timeline.graph.tasks
    events = []
    for rank in np.unique(tasks.rank).tolist():
        ran = (tasks.rank == rank) & (timeline.end_ns > timeline.start_ns)
        times = np.concatenate([timeline.start_ns[ran], timeline.end_ns[ran]])
        steps = np.concatenate([np.ones(ran.sum(), np.int64), -np.ones(ran.sum(), np.int64)])
        at, where = np.unique(times, return_inverse=True)
        change = np.bincount(where, steps, minlength=len(at)) if len(at) else np.zeros(0)
        busy = np.cumsum(change)
        # Back-to-back tasks do not change the number.
        events += [
            {
                "ph": "C",
                "name": "busy lanes",
                "pid": rank,
                "ts": float(at[i]) / _NS_PER_US,
                "args": {"lanes": int(busy[i])},
            }
            for i in np.flatnonzero(change).tolist()
        ]
    return events
