"""``slipstream bench``: does slipstream hold its own bars, here and now?"""

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
        typer.Argument(metavar="[NAME]...", help="Which to run, or all; none: list them."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="At most three minutes a name (the default).")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Everything; goes on where a killed run stopped.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only bars whose name contains this.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure slipstream's own bars: value, target, whether it holds, and how it was measured.

    Speeds are ratios to a reference measured in the same run. Full runs of a commit on main are
    recorded in benchmarks/results and shown beside quick ones.

        slipstream bench engine --quick

        slipstream bench all
    """
    from dataclasses import asdict

    from slipstream.cli._output import emit, progress
    from slipstream.errors import UsageError

    if quick and full:
        raise UsageError("--quick and --full are two different runs", remedy="give one of them")
    benches = _benches()
    known = benches.purposes()
    if not name:
        if quick or full or only:
            raise UsageError("no bench is named", remedy=f"all, or some of {', '.join(known)}")
        payload = [{"bench": name, "purpose": purpose} for name, purpose in known.items()]
        emit(benches.listing(), payload, as_json=as_json)
        return
    names = list(known) if name == [_ALL] else name
    tables, rows = [], []
    for one in names:
        bars = []
        with progress(f"bench {one}") as report:
            for bar in benches.bench(one, full=full, only=only, progress=report):
                bars.append(bar)
                report(f"{bar.bar}: {bar.measured} (target {bar.target})")
        tables.append(benches.table(one, bars))
        rows += [{"bench": one, **asdict(bar), "standing": bar.standing} for bar in bars]
    if only and not rows:
        raise UsageError(
            f"no bar of {', '.join(names)} has '{only}' in its name",
            remedy="leave out --only to see which bars there are",
        )
    emit(tables, rows, as_json=as_json)


def more_help() -> tuple[str, list[tuple[str, str]]]:
    """What stands at the end of the command's help: its benches."""
    from slipstream.errors import SlipstreamError

    try:
        return "Benches", list(_benches().purposes().items())
    except SlipstreamError as error:
        return "Benches", [("none", f"{error.what}; {error.remedy}")]


def _benches() -> ModuleType:
    """What runs benches: a distribution of its own, which a wheel of slipstream does not carry."""
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
