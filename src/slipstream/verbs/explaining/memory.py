"""Show the memory peak and what is live at it, for ``slipstream explain --memory``."""

from __future__ import annotations

from typing import Any

from slipstream.graph import Timeline, find_peak
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent
from slipstream.verbs.results import named


def memory_report(timeline: Timeline, top: int) -> tuple[list[Table], dict[str, Any]]:
    """Return tables and JSON; sizes in bytes, times in nanoseconds."""
    graph = timeline.graph
    peak = find_peak(timeline)
    task = graph.task(peak.task)
    name, module, source = task.name, task.module, task.source
    payload: dict[str, Any] = {
        "peak_bytes": peak.nbytes,
        "at_ns": peak.at_ns,
        "task": {"index": peak.task, "name": name, "module": module, "source": source},
        "lasting_bytes": peak.before_bytes,
        "by_role": [{"role": r.name.lower(), "bytes": n} for r, n in peak.by_role],
        "by_module": [{"module": m, "bytes": n} for m, n in peak.by_module[:top]],
    }

    def table(kind: str, held: list[tuple[str, int]], title: str, notes: list[str]) -> Table:
        fields: tuple[Field[tuple[str, int]], ...] = (
            Field.of(kind, lambda row: row[0]),
            Field.number("bytes", lambda row: format_bytes(row[1])),
            Field.number("share of peak", lambda row: format_percent(row[1] / peak.nbytes)),
        )
        return Table.of(held, fields, title, notes)

    where = " ".join(filter(None, (name, f"in {module}" if module else "", source)))
    notes = [
        f"reached after {format_duration(peak.at_ns)} of {format_duration(timeline.step_ns)}, "
        f"by {where}",
        f"{format_bytes(peak.before_bytes)} live before the step and after it",
    ]
    omitted = len(peak.by_module) - top
    roles = [(role.name.lower(), nbytes) for role, nbytes in peak.by_role]
    title = f"{named(graph)}: {format_bytes(peak.nbytes)} peak"
    smaller = f"{omitted} smaller ones omitted" if omitted > 0 else ""
    return [
        table("role", roles, title, notes),
        table("module", list(peak.by_module[:top]), "", [smaller]),
    ], payload
