"""What ``slipstream explain --memory`` shows: the peak, and what lives then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.graph import Timeline
    from slipstream.tables import Table


def memory_report(timeline: Timeline, top: int) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON; sizes in bytes, times in nanoseconds.

    Raises:
        GraphError: memory was not recorded.
    """
    from slipstream.graph import find_peak
    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes, format_duration, format_percent

    graph = timeline.graph
    peak = find_peak(timeline)
    tasks = graph.tasks
    name, module, source = (
        graph.string(int(column[peak.task])) for column in (tasks.name, tasks.module, tasks.source)
    )
    payload: dict[str, Any] = {
        "peak_bytes": peak.nbytes,
        "at_ns": peak.at_ns,
        "task": {"index": peak.task, "name": name, "module": module, "source": source},
        "lasting_bytes": peak.before_bytes,
        "by_role": [{"role": r.name.lower(), "bytes": n} for r, n in peak.by_role],
        "by_module": [{"module": m, "bytes": n} for m, n in peak.by_module[:top]],
    }

    def table(kind: str, found: list[tuple[str, int]], **texts: Any) -> Table:
        columns = [Column(kind), Column("bytes", "right"), Column("share of peak", "right")]
        rows = [(what, format_bytes(n), format_percent(n / peak.nbytes)) for what, n in found]
        return Table(columns, rows, **texts)

    where = " ".join(filter(None, (name, f"in {module}" if module else "", source)))
    notes = [
        f"reached after {format_duration(peak.at_ns)} of {format_duration(timeline.step_ns)}, "
        f"by {where}",
        f"{format_bytes(peak.before_bytes)} live before the step and after it",
    ]
    left = len(peak.by_module) - top
    return [
        table(
            "role",
            [(role.name.lower(), n) for role, n in peak.by_role],
            title=f"{graph.meta.get('workload', 'this step')}: {format_bytes(peak.nbytes)} at most",
            notes=notes,
        ),
        table(
            "module",
            list(peak.by_module[:top]),
            notes=[f"{left} smaller ones are left out"] if left > 0 else (),
        ),
    ], payload
