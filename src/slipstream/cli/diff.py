"""``slipstream diff``: what made a step slower or faster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._workload import Json
from slipstream.cli.explain import shorten
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.graph import Difference
    from slipstream.tables import Table

_Before = Annotated[Path, typer.Argument(metavar="BEFORE.SLIPGRAPH", help="The step as it was.")]
_After = Annotated[Path, typer.Argument(metavar="AFTER.SLIPGRAPH", help="The step as it is.")]


def command(
    before: _Before,
    after: _After,
    fail_over: Annotated[
        str | None,
        typer.Option(
            "--fail-over",
            metavar="PERCENT",
            help="Leave with exit code 1 when the step is certainly slower by more, such as 5%.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="GROUP", help="operator, module or line.")
    ] = "operator",
    top: Annotated[int, typer.Option("--top", min=1, help="Rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Say what made a step slower or faster.

    Changes are those of the critical path, so they add up to the step's. The step's change has a
    90 % interval: what two recordings of one program differ by, more on a busy machine, less with
    more --steps. Page faults differ between launches of one program: they are a row of their own
    and count neither for the interval nor for --fail-over. In continuous integration, compare with
    the graph of the last release:

        slipstream diff release.slipgraph now.slipgraph --fail-over 5%

    It fails when even the interval's lower end is beyond the limit, and warns when the recordings
    cannot tell.
    """
    from slipstream.cli._output import emit, note, progress
    from slipstream.cli._workload import load_recording
    from slipstream.graph import difference, load

    limit = None if fail_over is None else _fraction(fail_over)
    if by not in ("operator", "module", "line"):
        raise UsageError(f"'{by}' is no group", remedy="operator, module or line")
    with progress("comparing"):
        found = difference(load(before), load_recording(after))
    over, said = (False, "") if limit is None else _judge(found, limit)
    emit(_table(found, by, top), _payload(found, over, said), as_json=as_json)
    if said:
        note(said if over else f"warning: {said}")
    if over:
        raise typer.Exit(1)


def _judge(found: Difference, limit: float) -> tuple[bool, str]:
    """Whether the change is certainly beyond the limit; what to say of it, if anything."""
    from slipstream.graph.diff import LEAST_HALF_WIDTH
    from slipstream.units import format_percent

    low, high = found.interval
    percent = format_percent(limit)
    if low > limit:
        return True, (
            f"{_change(found)}: beyond the {percent} of --fail-over, and at least "
            f"{format_percent(low)}"
        )
    if high <= limit:
        return False, ""
    if limit < LEAST_HALF_WIDTH:
        return False, (
            f"no two recordings can show {percent}: those of one program differ by up to "
            f"{format_percent(LEAST_HALF_WIDTH)} on a quiet machine; this is {_change(found)}"
        )
    if found.half_width > limit:
        return False, (
            f"these recordings cannot show {percent}: record both with more --steps on a quieter "
            f"machine; this is {_change(found)}"
        )
    if found.work_change > limit:
        return False, (
            f"{_change(found)}: beyond the {percent} of --fail-over, but not by more than its "
            "interval; record both with more --steps to be sure"
        )
    return False, ""


def _change(found: Difference) -> str:
    """As "slower by 7.0 % ± 5.1 %", or "+2.0 % ± 5.1 %, within noise"."""
    from slipstream.units import format_percent

    half = f"± {format_percent(found.half_width)}"
    if found.verdict == "within noise":
        return f"{format_percent(found.work_change, signed=True)} {half}, within noise"
    return f"{found.verdict} by {format_percent(abs(found.work_change))} {half}"


def _fraction(text: str) -> float:
    """0.05 from "5%"; a number without a sign is a percentage too."""
    import math

    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"'{text}' is no percentage", remedy="--fail-over 5%")
    return value / 100


def _payload(found: Difference, over: bool, said: str) -> dict[str, Any]:
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
        "fail_over": said or None,
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


def _table(found: Difference, by: str, top: int) -> Table:
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration

    changed = [row for row in found.rows[by] if row.change_ns or row.status]
    rows = [
        (
            shorten(row.name),
            row.status,
            format_duration(row.before_ns),
            format_duration(row.after_ns),
            format_duration(row.waited_after_ns - row.waited_before_ns),
            _signed(row.change_ns),
            f"{row.tasks_before} → {row.tasks_after}",
        )
        for row in changed[:top]
    ]
    left = sum(row.change_ns for row in changed[top:])
    notes = [f"{len(changed) - top} more rows change it by {_signed(left)}."] if left else []
    gaps = sum(found.gaps_after_ns.values()) - sum(found.gaps_before_ns.values())
    notes.append(f"Gaps and delays on the path changed by {_signed(gaps)}, counted in the rows.")
    faults = found.faults_before_ns or found.faults_after_ns
    if faults:
        notes.append(
            "The first line and --fail-over leave page faults out, which differ between launches "
            "of one program (`allocator` is rid of them); the rows have them. With them, as "
            f"`profile` says it: {format_duration(found.before_ns)} → "
            f"{format_duration(found.after_ns)}."
        )
    notes.append("± is the 90 % interval of what recordings of one program differ by.")
    notes.append("Simulated from recorded durations; rows count what is on the critical path.")
    return Table(
        [
            Column(by),
            Column("", optional=True),
            Column("before", "right"),
            Column("after", "right"),
            Column("waits", "right", optional=True),
            Column("change", "right"),
            Column("calls", "right", optional=True),
        ],
        rows,
        title=(
            (f"two different workloads ({found.unlike}): " if found.unlike else "")
            + f"{format_duration(found.before_ns - found.faults_before_ns)} → "
            f"{format_duration(found.after_ns - found.faults_after_ns)} per step"
            + (" without page faults" if faults else "")
            + f": {_change(found)}"
        ),
        notes=notes,
    )


def _signed(ns: float) -> str:
    from slipstream.units import format_duration

    return ("+" if ns > 0 else "") + format_duration(ns)
