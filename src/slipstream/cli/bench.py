"""``slipstream bench``: check whether slipstream meets its own targets on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from types import ModuleType


_ALL = "all"


def command(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Benches to run, or all; without one, list them."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="At most three minutes per bench (the default).")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Run everything; resumes an interrupted run.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only bars whose name contains TEXT.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure slipstream's own bars: value, target, whether it is met, and how it was measured.

    Speeds are ratios to a reference measured in the same run. Full runs of a commit on main are
    recorded in benchmarks/results and shown next to quick ones.

        slipstream bench engine --quick

        slipstream bench all
    """
    from dataclasses import asdict

    from slipstream.cli._output import emit, progress
    from slipstream.errors import UsageError

    if quick and full:
        raise UsageError("--quick and --full exclude each other", remedy="pass one of them")
    benches = _benches()
    purposes = benches.purposes()
    if not name:
        if quick or full or only:
            raise UsageError("no bench is named", remedy=f"all, or some of {', '.join(purposes)}")
        payload = [{"bench": name, "purpose": purpose} for name, purpose in purposes.items()]
        emit(benches.listing(), payload, as_json=as_json)
        return
    names = list(purposes) if name == [_ALL] else name
    tables, rows = [], []
    for bench in names:
        bars = []
        with progress(f"bench {bench}") as report:
            for bar in benches.bench(bench, full=full, only=only, progress=report):
                bars.append(bar)
                report(f"{bar.bar}: {bar.measured} (target {bar.target})")
        tables.append(benches.table(bench, bars))
        rows += [{"bench": bench, **asdict(bar), "standing": bar.standing} for bar in bars]
    if only and not rows:
        raise UsageError(
            f"no bar of {', '.join(names)} has '{only}' in its name",
            remedy="omit --only to list the bars",
        )
    emit(tables, rows, as_json=as_json)


def more_help() -> tuple[str, list[tuple[str, str]]]:
    """Return the title and rows of the list of benches that ends the command's help."""
    from slipstream.errors import SlipstreamError

    try:
        return "Benches", list(_benches().purposes().items())
    except SlipstreamError as error:
        return "Benches", [("none", f"{error.what}; {error.remedy}")]


def _benches() -> ModuleType:
    """Import the bench runner, a separate distribution that slipstream's wheel does not include."""
    from slipstream.errors import SlipstreamError

    try:
        from slipstream_bench import running
    except ModuleNotFoundError as error:
        if error.name != "slipstream_bench":
            raise
        raise SlipstreamError(
            "slipstream's benches are not installed",
            remedy="in a clone of slipstream: make install, or pip install -e benchmarks",
        ) from error
    return running
