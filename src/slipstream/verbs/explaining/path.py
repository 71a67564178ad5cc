"""Explain a step's time by its critical path: by group, task by task, or causally."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from slipstream.graph import (
    PROVENANCES,
    CriticalPath,
    Dependency,
    Timeline,
    communication,
    find_critical_path,
    lane_utilisation,
    virtual_speedups,
)
from slipstream.graph.views.critical_path import Lane
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent
from slipstream.verbs.results import named

_NO_LINE = (
    "No source line: run by no module of the model, backward() or optimizer.step() of yours, or by "
    "slipstream's own loop, which a function that returns (model, batch, loss, optimizer) gets."
)
_MAX_NAME_LENGTH = 72
_Row = Mapping[str, Any]
Shown = Literal["groups", "path", "causal"]


def path_report(
    timeline: Timeline, by: str, top: int, show: Shown
) -> tuple[list[Table], dict[str, Any]]:
    """Return tables and JSON; times in nanoseconds."""
    path = find_critical_path(timeline)
    groups = [group for group in path.by(by) if group.total_ns]
    payload: dict[str, Any] = {
        "step_ns": timeline.step_ns,
        "by": by,
        "contributions": [
            {
                "name": c.name, "busy_ns": c.busy_ns, "waited_ns": c.waited_ns, "tasks": c.tasks,
                "share": c.total_ns / timeline.step_ns if timeline.step_ns else 0.0,
            }
            for c in groups[:top]
        ],
        "waiting_ns": {kind.name.lower(): ns for kind, ns in path.by_dependency().items()},
        "lanes": lane_utilisation(timeline),
        "machine": timeline.graph.meta.get("machine"),
        "communication": communication(timeline),
        "duration_share": _provenances(timeline),
    }  # fmt: skip
    if show == "path":
        payload["critical_path"] = _entries(path, top)
        first = _path_table(path, payload["critical_path"])
    elif show == "causal":
        payload["virtual_speedups"] = _curves(timeline, by, top)
        first = _causal_table(payload["virtual_speedups"], by)
    else:
        first = _group_table(path, payload, by)
    return [first, Table.of(lane_utilisation(timeline), _LANE_FIELDS)], payload


def shorten(name: str) -> str:
    """Shorten a name to fit a table: C++ kernels spell out all their template arguments."""
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"


def _provenances(timeline: Timeline) -> dict[str, float]:
    tasks = timeline.graph.tasks
    sums = np.bincount(tasks.provenance, tasks.duration_ns, minlength=len(PROVENANCES))
    total = float(sums.sum())
    return {
        str(provenance): float(part) / total
        for provenance, part in zip(PROVENANCES, sums.tolist(), strict=True)
        if part
    }


def _group_table(path: CriticalPath, payload: dict[str, Any], by: str) -> Table:
    fields: tuple[Field[_Row], ...] = (
        Field.of(by, lambda row: shorten(row["name"])),
        Field.number("share of step", lambda row: format_percent(row["share"])),
        Field.number("runs", lambda row: format_duration(row["busy_ns"])),
        Field.number("waits before", lambda row: format_duration(row["waited_ns"])),
        Field.number("tasks", lambda row: row["tasks"], optional=True),
    )
    rows = payload["contributions"]
    notes = [
        *_notes(path, payload),
        _NO_LINE if any(row["name"] == "(no source line)" for row in rows) else "",
        'Only tasks on the critical path count; "waits before" is the time before tasks in '
        "which nothing on the path ran: Python, dispatch, delays.",
    ]
    title = f"{named(path.timeline.graph)}: {format_duration(path.step_ns)} per step"
    return Table.of(rows, fields, title, notes)


def _notes(path: CriticalPath, payload: dict[str, Any]) -> list[str]:
    origins = ", ".join(
        f"{format_percent(share)} {name}" for name, share in payload["duration_share"].items()
    )
    lines = [f"Durations: {origins or 'none'}; the timeline is simulated from them."]
    lines += _recorded_on(path.timeline)
    waiting = {name: ns for name, ns in payload["waiting_ns"].items() if ns}
    if waiting:
        parts = [f"{name.replace('_', ' ')} {format_duration(ns)}" for name, ns in waiting.items()]
        lines.append("Waiting on the path, by cause: " + ", ".join(parts) + ".")
    communication_ = payload["communication"]
    if communication_.total_ns:
        lines.append(
            f"Communication takes {format_duration(communication_.total_ns)}; "
            f"{format_duration(communication_.exposed_ns)} of it are not hidden by computation."
        )
    return lines


def _recorded_on(timeline: Timeline) -> list[str]:
    """Return the machine in one line; empty if it was not recorded."""
    meta = timeline.graph.meta
    machine = meta.get("machine")
    if not isinstance(machine, Mapping):
        return []
    parts = [str(machine["cpu.model"])] if "cpu.model" in machine else []
    if "cpu.logical" in machine:
        parts.append(f"{machine['cpu.logical']} logical cores")
    if "memory.total_mib" in machine:
        parts.append(format_bytes(machine["memory.total_mib"] * 2**20))
    threads = meta.get("threads", 1)
    parts.append(f"torch {meta.get('torch', 'unknown')} on {threads} thread{'s' * (threads != 1)}")
    return [f"Recorded on {', '.join(parts)}."]


def _entries(path: CriticalPath, top: int) -> list[dict[str, Any]]:
    """Return the path's tasks in order; with more than `top`, those that contribute most."""
    graph = path.timeline.graph
    longest = np.sort(np.argsort(-(path.busy_ns + path.waited_ns), kind="stable")[:top])
    return [
        {
            "task": int(path.task[i]),
            "name": graph.task(path.task[i]).name,
            "module": graph.task(path.task[i]).module,
            "lane": graph.lanes[graph.tasks.lane[path.task[i]]],
            "start_ns": float(path.start_ns[i] - path.start_ns[0]),
            "busy_ns": float(path.busy_ns[i]),
            "waited_ns": float(path.waited_ns[i]),
            "waits_for": Dependency(path.via[i]).name.lower(),
        }
        for i in longest.tolist()
    ]


_PATH_FIELDS: tuple[Field[_Row], ...] = (
    Field.number("at", lambda entry: format_duration(entry["start_ns"])),
    Field.of("task", lambda entry: shorten(entry["name"])),
    Field.of("module", lambda entry: entry["module"], optional=True),
    Field.of("lane", lambda entry: entry["lane"]),
    Field.number("runs", lambda entry: format_duration(entry["busy_ns"])),
    Field.number("waits before", lambda entry: format_duration(entry["waited_ns"])),
    Field.of("for", lambda entry: entry["waits_for"].replace("_", " ")),
)


def _path_table(path: CriticalPath, entries: Sequence[_Row]) -> Table:
    title = f"{named(path.timeline.graph)}: {len(path)} tasks make up the step"
    shown = f"{len(entries)} of {len(path)} shown, the longest ones."
    return Table.of(entries, _PATH_FIELDS, title, [shown] if len(entries) < len(path) else ())


def _curves(timeline: Timeline, by: str, top: int) -> list[dict[str, Any]]:
    return [
        {
            "name": curve.name,
            "total_ns": curve.total_ns,
            "tasks": curve.tasks,
            "faster": list(curve.faster),
            "gain": list(curve.gains),
        }
        for curve in virtual_speedups(timeline.graph, by, most=top)
    ]


def _gain(number: int, curve: _Row) -> str:
    return format_percent(curve["gain"][number])


def _causal_table(curves: Sequence[_Row], by: str) -> Table:
    fields: list[Field[_Row]] = [
        Field.of(by, lambda curve: shorten(curve["name"])),
        Field.number("takes", lambda curve: format_duration(curve["total_ns"])),
    ]
    for number, share in enumerate(curves[0]["faster"] if curves else ()):
        fields.append(Field.number(f"-{share:.0%}", functools.partial(_gain, number)))
    title = "what the step would gain if one group took less time"
    note = "Simulated; 100 % less bounds the gain of any technique there."
    return Table.of(curves, fields, title, [note])


_LANE_FIELDS: tuple[Field[Lane], ...] = (
    Field.of("lane", lambda lane: lane.name),
    Field.number("busy", lambda lane: format_percent(lane.busy)),
    Field.number("runs", lambda lane: format_duration(lane.busy_ns)),
    Field.number("gaps", lambda lane: format_duration(lane.gap_ns)),
    # Sums of fractions have a rounding error.
    Field.number("idle", lambda lane: format_duration(lane.idle_ns if lane.idle_ns >= 1 else 0)),
)
