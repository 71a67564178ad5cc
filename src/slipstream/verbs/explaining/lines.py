"""Show the source with the cost of each line, for ``slipstream explain --lines``."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.graph import Attribution, Cost, Graph, LineCost, Timeline, attribute
from slipstream.graph.origin import has_changed
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration
from slipstream.verbs.results import named
from slipstream.workload.lines import project_root

_PAGE_FAULTS, _UNTRACKED = "(page faults)", "(untracked)"


def lines_report(timeline: Timeline, top: int) -> tuple[list[Table], dict[str, Any]]:
    """Return tables and JSON of the `top` costliest lines, in source order; times in ns."""
    attribution = attribute(timeline)
    shown = sorted(attribution.lines[:top], key=lambda line: (line.file, line.number))
    payload = {
        "step_ns": attribution.step_ns,
        "peak_bytes": attribution.peak_bytes,
        "lines": [
            {
                "file": line.file, "line": line.number, "function": line.function,
                **_numbers(line.cost), "modules": list(line.modules),
                "callers": [list(way) for way in line.callers],
            }
            for line in attribution.lines
        ],
        "page_faults": _numbers(attribution.page_faults),
        "untracked": _numbers(attribution.untracked),
    }  # fmt: skip
    return [_table(timeline, attribution, shown)], payload


def _numbers(cost: Cost) -> dict[str, Any]:
    memory = asdict(cost)
    other, forward, backward, optimizer = memory.pop("phase_ns")
    return {
        "time_ns": cost.time_ns, "forward_ns": forward, "backward_ns": backward,
        "optimizer_ns": optimizer, "other_ns": other, **memory,
    }  # fmt: skip


def _table(timeline: Timeline, found: Attribution, shown: list[LineCost]) -> Table:
    graph = timeline.graph
    rows = [(line.name, line.cost, _text(graph, line)) for line in shown]
    omitted = found.lines[len(shown) :]
    if omitted:
        omitted_cost = sum((line.cost for line in omitted), start=Cost())
        rows.append((f"{len(omitted)} others", omitted_cost, ""))
    if found.page_faults.tasks:
        rows.append((_PAGE_FAULTS, found.page_faults, ""))
    rows.append((_UNTRACKED, found.untracked, ""))

    def share(row: tuple[str, Cost, str]) -> str:
        return f"{100 * row[1].time_ns / found.step_ns:.1f} %" if found.step_ns else ""

    fields: tuple[Field[tuple[str, Cost, str]], ...] = (
        Field.of("line", lambda row: row[0]),
        Field.number("share of step", share),
        Field.number("forward", lambda row: _time(row[1].forward_ns)),
        Field.number("backward", lambda row: _time(row[1].backward_ns)),
        Field.number("optimizer", lambda row: _time(row[1].optimizer_ns)),
        Field.number("memory", lambda row: format_bytes(n) if (n := row[1].memory_bytes) else ""),
        Field.of("source", lambda row: row[2], optional=True),
    )
    peak = f", {format_bytes(found.peak_bytes)} peak" if found.peak_bytes else ""
    title = f"{named(graph)}: {format_duration(found.step_ns)} per step{peak}"
    notes = [
        "The rows add up to the step's time and peak memory. A line counts the time that its "
        "operators and the Python before them add, and the memory that they hold at the peak; an "
        "operator's backward pass counts for the line that ran it forward.",
        f"{changed} has changed since: source texts may be shown next to wrong line numbers."
        if (changed := has_changed(graph))
        else "",
    ]
    return Table.of(rows, fields, title, notes)


def _time(ns: float) -> str:
    return format_duration(ns) if ns else ""


def _text(graph: Graph, line: LineCost) -> str:
    """Return the line's current text in its file; empty if it cannot be read."""
    recorded = graph.meta.get("source")
    file = str(recorded.get("file", "")) if isinstance(recorded, Mapping) else ""
    if not file:
        return ""
    return linecache.getline(str(project_root(Path(file)) / line.file), line.number).strip()
