"""Notebook representation of a graph: its step time, by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import GraphError
from slipstream.graph.timeline import replay
from slipstream.graph.views.critical_path import find_critical_path
from slipstream.tables import Column, Drawing, Table
from slipstream.units import format_bytes, format_duration, format_percent

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph

_ROWS = 8
# Simulating larger graphs is too slow for the display of a cell's value.
_MAX_TASKS = 300_000


def graph_line(graph: Graph) -> str:
    """Return workload, size and step time, in one line."""
    line = f"{graph.meta.get('workload', 'a step')}: {len(graph)} tasks"
    if len(graph) <= _MAX_TASKS:
        try:
            line += f", {format_duration(replay(graph).step_ns)} per step"
        except GraphError as error:
            line += f"; {error.what}"
    if graph.samples:
        line += f", {graph.samples} samples"
    return line + "".join(f", edited: {edit.technique}" for edit in graph.edits)


def graph_html(graph: Graph) -> str:
    """Return a table of the operators that take most of the step."""
    title = str(graph.meta.get("workload", "a step"))
    columns = [
        Column("operator"),
        Column("time", "right"),
        Column("share"),
        Column("tasks", "right"),
    ]
    if len(graph) > _MAX_TASKS:
        return Table(columns, (), title, [f"{len(graph)} tasks"]).to_html()
    try:
        timeline = replay(graph)
    except GraphError as error:
        return Table(columns, (), title, [f"{len(graph)} tasks; {error.what}"]).to_html()
    step_ns = timeline.step_ns
    path = find_critical_path(timeline)
    operators = sorted(path.by("operator"), key=lambda operator: -operator.busy_ns)
    rows = [
        (
            operator.name.removeprefix("aten::"),
            format_duration(operator.busy_ns),
            Drawing.share(operator.busy_ns / step_ns, format_percent(operator.busy_ns / step_ns)),
            operator.tasks,
        )
        for operator in operators[:_ROWS]
        if step_ns
    ]
    waited = sum(operator.waited_ns for operator in operators)
    notes = [
        f"{format_duration(step_ns)} a step, {len(graph)} tasks"
        + (f", {graph.samples} samples" if graph.samples else "")
        + (
            f", {format_bytes(timeline.peak_bytes)} at the peak"
            if len(graph.memory)
            else ", memory not recorded"
        )
    ]
    if len(operators) > _ROWS:
        remainder = sum(operator.busy_ns for operator in operators[_ROWS:])
        notes.append(f"{len(operators) - _ROWS} other operators take {format_duration(remainder)}")
    if waited:
        notes.append(f"{format_duration(waited)} are Python, dispatch and waiting")
    notes += [f"edited: {edit.technique}, {edit.what}" for edit in graph.edits]
    return Table(columns, rows, title, notes).to_html()
