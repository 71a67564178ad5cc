"""Two recordings of a step beside each other: what changed, and whether that is certain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.graph import Difference
from slipstream.graph.views.diff import LEAST_HALF_WIDTH, Row
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent
from slipstream.verbs.explaining.path import shorten


def _signed(ns: float) -> str:
    return ("+" if ns > 0 else "") + format_duration(ns)


_FIELDS: tuple[Field[Row], ...] = (
    Field.of("", lambda row: row.status, optional=True),
    Field.number("before", lambda row: format_duration(row.before_ns)),
    Field.number("after", lambda row: format_duration(row.after_ns)),
    Field.number(
        "waits", lambda row: format_duration(row.waited_after_ns - row.waited_before_ns), True
    ),
    Field.number("change", lambda row: _signed(row.change_ns)),
    Field.number("calls", lambda row: f"{row.tasks_before} → {row.tasks_after}", True),
)


@dataclass(frozen=True)
class Change:
    """What changed between two recordings of a step.

    Attributes:
        found: the difference.
        limit: relative, from which on the step counts as slower; None for no limit.
    """

    found: Difference
    limit: float | None = None

    @property
    def judged(self) -> tuple[bool, str]:
        """Whether the change is certainly beyond the limit; what to say of it, if anything."""
        if self.limit is None:
            return False, ""
        found, percent = self.found, format_percent(self.limit)
        low, high = found.interval
        if low > self.limit:
            return True, (
                f"{self}: beyond the {percent} of --fail-over, and at least {format_percent(low)}"
            )
        if high <= self.limit:
            return False, ""
        if self.limit < LEAST_HALF_WIDTH:
            return False, (
                f"no two recordings can show {percent}: those of one program differ by up to "
                f"{format_percent(LEAST_HALF_WIDTH)} on a quiet machine; this is {self}"
            )
        if found.half_width > self.limit:
            return False, (
                f"these recordings cannot show {percent}: record both with more --steps on a "
                f"quieter machine; this is {self}"
            )
        if found.work_change > self.limit:
            return False, (
                f"{self}: beyond the {percent} of --fail-over, but not by more than its "
                "interval; record both with more --steps to be sure"
            )
        return False, ""

    def __str__(self) -> str:
        """As "slower by 7.0 % ± 5.1 %", or "+2.0 % ± 5.1 %, within noise"."""
        found = self.found
        half = f"± {format_percent(found.half_width)}"
        if found.verdict == "within noise":
            return f"{format_percent(found.work_change, signed=True)} {half}, within noise"
        return f"{found.verdict} by {format_percent(abs(found.work_change))} {half}"

    def to_json(self) -> Mapping[str, Any]:
        """As results are printed; times in nanoseconds."""
        found, (over, doubt) = self.found, self.judged
        return {
            "before_ns": found.before_ns,
            "after_ns": found.after_ns,
            "change_ns": found.change_ns,
            "change": found.change,
            "page_faults_before_ns": found.faults_before_ns,
            "page_faults_after_ns": found.faults_after_ns,
            "change_without_page_faults": found.work_change,
            "interval": list(found.interval),
            "interval_level": 0.9,
            "verdict": found.verdict,
            "different": found.unlike or None,
            "failed": over,
            "fail_over": doubt or None,
            "provenance": "simulated",
            "rows": {
                group: [
                    asdict(row) | {"change_ns": row.change_ns, "status": row.status} for row in rows
                ]
                for group, rows in found.rows.items()
            },
            "gaps_before_ns": {kind.name.lower(): ns for kind, ns in found.gaps_before_ns.items()},
            "gaps_after_ns": {kind.name.lower(): ns for kind, ns in found.gaps_after_ns.items()},
        }

    def table(self, by: str, top: int) -> Table:
        """The `top` rows that change the step most, of "operator", "module" or "line"."""
        found = self.found
        changed = [row for row in found.rows[by] if row.change_ns or row.status]
        left = sum(row.change_ns for row in changed[top:])
        gaps = sum(found.gaps_after_ns.values()) - sum(found.gaps_before_ns.values())
        faults = found.faults_before_ns or found.faults_after_ns
        notes = [
            f"{len(changed) - top} more rows change it by {_signed(left)}." if left else "",
            f"Gaps and delays on the path changed by {_signed(gaps)}, counted in the rows.",
            "The first line and --fail-over leave page faults out, which differ between launches "
            "of one program (`allocator` is rid of them); the rows have them. With them, as "
            f"`profile` says it: {format_duration(found.before_ns)} → "
            f"{format_duration(found.after_ns)}."
            if faults
            else "",
            "± is the 90 % interval of what recordings of one program differ by.",
            "Simulated from recorded durations; rows count what is on the critical path.",
        ]
        title = (
            (f"two different workloads ({found.unlike}): " if found.unlike else "")
            + f"{format_duration(found.before_ns - found.faults_before_ns)} → "
            f"{format_duration(found.after_ns - found.faults_after_ns)} per step"
            + (" without page faults" if faults else "")
            + f": {self}"
        )
        name: Field[Row] = Field.of(by, lambda row: shorten(row.name))
        return Table.of(changed[:top], (name, *_FIELDS), title, notes)
