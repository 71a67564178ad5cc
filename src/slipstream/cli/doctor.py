"""What works here: the machine, what is installed, what can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.cli._checks import Check
    from slipstream.tables import Table

_TITLES = {
    "machine": "This machine",
    "software": "Software",
    "extras": "Extras",
    "measuring": "What can be measured here",
    "store": "Results store",
}


def command(
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="FILE", help="Look at this results store instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result.")] = False,
) -> None:
    """Say what works here: the machine, what is installed, what can be measured.

    Every line was tried just now. `no` is not an error: it says what you would gain and how. The
    exit code is 1 only when the core does not work: Python or torch, or an unusable store.
    """
    from dataclasses import asdict

    from slipstream.cli import _checks
    from slipstream.cli._output import emit, progress

    with progress("doctor") as say:
        say("software")
        found = _checks.software()
        say("machine")
        found = _checks.machine() + found
        say("extras")
        found += _checks.extras()
        say("measuring")
        found += _checks.measuring()
        found.append(_checks.store(store))
    emit(_tables(found), [asdict(check) for check in found], as_json=as_json)
    core = ("Python", "torch", "results")
    if any(check.ok is False for check in found if check.name in core):
        raise typer.Exit(1)


def _tables(checks: list[Check]) -> list[Table]:
    from slipstream.tables import Column, Table

    tables = []
    for group, title in _TITLES.items():
        inside = [check for check in checks if check.group == group]
        judged = any(check.ok is not None for check in inside)
        useful = any(check.unlocks for check in inside)
        columns = [Column("what"), *([Column("works")] if judged else []), Column("found")]
        columns += [Column("good for", optional=True)] if useful else []
        rows = [
            (
                check.name,
                *([{True: "yes", False: "no", None: ""}[check.ok]] if judged else []),
                check.found,
                *([check.unlocks] if useful else []),
            )
            for check in inside
        ]
        notes = [
            f"{check.name} ({check.unlocks or 'needed'}): {check.remedy}"
            for check in inside
            if check.remedy
        ]
        tables.append(Table(columns, rows, title, notes))
    return tables
