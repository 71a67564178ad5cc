"""Compare two recordings of a step: what changed, and with what certainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.graph import Difference
from slipstream.graph.views.diff import MIN_HALF_WIDTH, DiffRow
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent
from slipstream.verbs.explaining.path import shorten


def _signed(ns: float) -> str:
    return ("+" if ns > 0 else "") + format_duration(ns)


_FIELDS: tuple[Field[DiffRow], ...] = (
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
    """The change between two recordings of a step.

    Attributes:
        found: the difference.
        limit: relative change above which the step counts as slower; None for no limit.
    """

    found: Difference
    limit: float | None = None

    @property
    def judged(self) -> tuple[bool, str]:
        """Whether the change certainly exceeds the limit; a remark, or ""."""
        if self.limit is None:
            return False, ""
        diff, percent = self.found, format_percent(self.limit)
        low, high = diff.interval
        if low > self.limit:
            return True, (
                f"{self}: over the {percent} of --fail-over, and at least {format_percent(low)}"
            )
        if high <= self.limit:
            return False, ""
        if self.limit < MIN_HALF_WIDTH:
            return False, (
                f"no two recordings can show {percent}: those of one program differ by up to "
                f"{format_percent(MIN_HALF_WIDTH)} on a quiet machine; here: {self}"
            )
        if diff.half_width > self.limit:
            return False, (
                f"these recordings cannot show {percent}: record both with more --steps on a "
                f"quieter machine; here: {self}"
            )
        if diff.work_change > self.limit:
            return False, (
                f"{self}: over the {percent} of --fail-over, but not by more than its "
                "interval; record both with more --steps to be sure"
            )
        return False, ""

    def __str__(self) -> str:
        """Format as "slower by 7.0 % ± 5.1 %", or "+2.0 % ± 5.1 %, within noise"."""
        diff = self.found
        half = f"± {format_percent(diff.half_width)}"
        if diff.verdict == "within noise":
            return f"{format_percent(diff.work_change, signed=True)} {half}, within noise"
        return f"{diff.verdict} by {format_percent(abs(diff.work_change))} {half}"

    def to_json(self) -> Mapping[str, Any]:
        """Return the JSON payload; times in nanoseconds."""
        diff, (over, doubt) = self.found, self.judged
        return {
            "before_ns": diff.before_ns,
            "after_ns": diff.after_ns,
            "change_ns": diff.change_ns,
            "change": diff.change,
            "page_faults_before_ns": diff.faults_before_ns,
            "page_faults_after_ns": diff.faults_after_ns,
            "change_without_page_faults": diff.work_change,
            "interval": list(diff.interval),
            "confidence_level": 0.9,
            "verdict": diff.verdict,
            "different": diff.unlike or None,
            "failed": over,
            "fail_over": doubt or None,
            "provenance": "simulated",
            "rows": {
                group: [
                    asdict(row) | {"change_ns": row.change_ns, "status": row.status} for row in rows
                ]
                for group, rows in diff.rows.items()
            },
            "gaps_before_ns": {kind.name.lower(): ns for kind, ns in diff.gaps_before_ns.items()},
            "gaps_after_ns": {kind.name.lower(): ns for kind, ns in diff.gaps_after_ns.items()},
        }

    def table(self, by: str, top: int) -> Table:
        """Return a table of the `top` changes, by "operator", "module" or "line"."""
        diff = self.found
        changed = [row for row in diff.rows[by] if row.change_ns or row.status]
        omitted_ns = sum(row.change_ns for row in changed[top:])
        gaps = sum(diff.gaps_after_ns.values()) - sum(diff.gaps_before_ns.values())
        faults = diff.faults_before_ns or diff.faults_after_ns
        notes = [
            f"{len(changed) - top} more rows change it by {_signed(omitted_ns)}."
            if omitted_ns
            else "",
            f"Gaps and delays on the path, included in the rows, changed by {_signed(gaps)}.",
            "The first line and --fail-over exclude page faults, which differ between launches "
            "of one program (`allocator` removes them); the rows include them. With them, "
            f"as in `profile`: {format_duration(diff.before_ns)} → "
            f"{format_duration(diff.after_ns)}."
            if faults
            else "",
            "± is the 90 % interval of the difference between recordings of one program.",
            "Simulated from recorded durations; rows count what is on the critical path.",
        ]
        title = (
            (f"two different workloads ({diff.unlike}): " if diff.unlike else "")
            + f"{format_duration(diff.before_ns - diff.faults_before_ns)} → "
            f"{format_duration(diff.after_ns - diff.faults_after_ns)} per step"
            + (" without page faults" if faults else "")
            + f": {self}"
        )
        name: Field[DiffRow] = Field.of(by, lambda row: shorten(row.name))
        return Table.of(changed[:top], (name, *_FIELDS), title, notes)
