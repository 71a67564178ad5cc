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
            help="Leave with exit code 1 when the step is slower by more, such as 5%.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="GROUP", help="operator, module or line.")
    ] = "operator",
    top: Annotated[int, typer.Option("--top", min=1, help="Rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Say what made a step slower or faster.

    Changes are those of the critical path, so they add up to the step's. In continuous
    integration, compare with the graph of the last release:

        slipstream diff release.slipgraph now.slipgraph --fail-over 5%
    """
    from slipstream.cli._output import emit, note, progress
    from slipstream.graph import difference, load
    from slipstream.units import format_percent

    limit = None if fail_over is None else _fraction(fail_over)
    if by not in ("operator", "module", "line"):
        raise UsageError(f"'{by}' is no group", remedy="operator, module or line")
    with progress("comparing"):
        found = difference(load(before), load(after))
    over = limit is not None and found.change > limit
    emit(_table(found, by, top), _payload(found, over), as_json=as_json)
    if over:
        note(
            f"slower by {format_percent(found.change)}, more than the {format_percent(limit or 0)} "
            "of --fail-over"
        )
        raise typer.Exit(1)


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


def _payload(found: Difference, over: bool) -> dict[str, Any]:
    return {
        "before_ns": found.before_ns,
        "after_ns": found.after_ns,
        "change_ns": found.change_ns,
        "change": found.change,
        "failed": over,
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
    from slipstream.units import format_duration, format_percent

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
            f"{format_duration(found.before_ns)} → {format_duration(found.after_ns)} per step "
            f"({format_percent(found.change, signed=True)})"
        ),
        notes=notes,
    )


def _signed(ns: float) -> str:
    from slipstream.units import format_duration

    return ("+" if ns > 0 else "") + format_duration(ns)
