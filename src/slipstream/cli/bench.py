"""``slipstream bench``: does slipstream hold its own bars, here and now?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from types import ModuleType

    from slipstream.tables import Table
    from slipstream_bench.rows import Bar


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
        emit(
            _listing(known), [{"bench": n, "purpose": p} for n, p in known.items()], as_json=as_json
        )
        return
    names = list(known) if name == [_ALL] else name
    tables, payload = [], []
    for one in names:
        bars = []
        with progress(f"bench {one}") as say:
            for bar in benches.bench(one, full=full, only=only, progress=say):
                bars.append(bar)
                value = "-" if bar.value is None else f"{bar.value:.4g} {bar.unit}"
                say(f"{bar.bar}: {value} (target {bar.target})")
        tables.append(_table(one, bars))
        payload += [{"bench": one, **asdict(bar), "standing": bar.standing} for bar in bars]
    emit(tables, payload, as_json=as_json)


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


def _listing(known: dict[str, str]) -> Table:
    from slipstream.tables import Column, Table

    return Table(
        [Column("bench"), Column("measures")],
        list(known.items()),
        title="slipstream's own bars",
        notes=[
            "slipstream bench NAME takes at most three minutes; all of them: slipstream bench "
            f"{_ALL}, at most {3 * len(known)} minutes",
            "with --full it is everything, which takes far longer and goes on where it was stopped",
        ],
    )


def _table(name: str, bars: list[Bar]) -> Table:
    from slipstream.tables import Column, Table

    rows = [
        (
            bar.bar,
            "-" if bar.value is None else f"{bar.value:.4g} {bar.unit}",
            bar.target,
            "FALLS SHORT" if bar.standing == "falls short" else bar.standing,
            bar.n,
            bar.source if bar.source == "now" else f"{bar.date} {bar.commit[:7]}",
            bar.detail,
        )
        for bar in bars
    ]
    counts = Counter(bar.standing for bar in bars)
    return Table(
        [
            Column("bar"),
            Column("measured", "right"),
            Column("target", "right"),
            Column(""),
            Column("n", "right", optional=True),
            Column("when", optional=True),
            Column("detail", optional=True),
        ],
        rows,
        title=f"bench {name}",
        notes=[
            f"{counts['holds']} hold, {counts['at the bar']} are at the bar within their noise, "
            f"{counts['falls short']} fall short, {counts['not judged']} not judged"
        ],
    )
