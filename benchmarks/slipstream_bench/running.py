"""Run a bench, record full runs, and show both."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UnknownNameError
from slipstream.tables import Field, Table
from slipstream_bench import records
from slipstream_bench.records import Origin
from slipstream_bench.rows import Bar, Bench, BenchOptions, not_judged

GROUP = "slipstream.benches"
QUICK_S = 170.0
"""Seconds after which a quick run begins no further row, to end within three minutes."""
_TIME_IS_UP = "no time left in a quick run; --full measures it"


def benches() -> dict[str, Any]:
    """Return entry points of every bench by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def purposes() -> dict[str, str]:
    """Return the purpose of each bench: the first line of its module, read without an import."""
    return {name: _purpose(str(point.value)) for name, point in benches().items()}


def listing() -> Table:
    """Return a table of every bench and what it measures."""
    descriptions = purposes()
    fields: tuple[Field[tuple[str, str]], ...] = (
        Field.of("bench", lambda row: row[0]),
        Field.of("measures", lambda row: row[1]),
    )
    notes = [
        "slipstream bench NAME takes at most three minutes; all of them: slipstream bench all, at "
        f"most {3 * len(descriptions)} minutes",
        "--full measures everything, which takes far longer, and resumes where it was stopped",
    ]
    return Table.of(descriptions.items(), fields, "slipstream's own bars", notes)


_FIELDS: tuple[Field[Bar], ...] = (
    Field.of("bar", lambda bar: bar.bar),
    Field.number("measured", lambda bar: bar.measured),
    Field.number("target", lambda bar: bar.target),
    Field.of("", lambda bar: "FALLS SHORT" if bar.standing == "falls short" else bar.standing),
    Field.number("n", lambda bar: bar.n, optional=True),
    Field.of("when", lambda bar: bar.when, optional=True),
    Field.of("detail", lambda bar: bar.detail, optional=True),
)


def table(name: str, bars: Sequence[Bar]) -> Table:
    """Return the rows of a bench, and how many hold."""
    counts = Counter(bar.standing for bar in bars)
    note = (
        f"{counts['holds']} hold, {counts['at the bar']} are at the bar within their noise, "
        f"{counts['falls short']} fall short, {counts['not judged']} not judged"
    )
    return Table.of(bars, _FIELDS, f"bench {name}", [note])


def _purpose(entry: str) -> str:
    """Return the purpose of ``package.folder.module:function``; empty if its file is not found."""
    package, _, rest = entry.partition(":")[0].partition(".")
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, *rest.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
                return re.sub(r"^``[^`]*``: ", "", text.partition("\n")[0]).rstrip(".")
    return ""


def bench(
    name: str,
    *,
    full: bool = False,
    only: str = "",
    results: Path = records.RESULTS,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Bar]:
    """Measure the rows of a bench and yield each when it is measured.

    A full run is appended to ``results/NAME.jsonl`` row by row and resumes after being killed (for
    the same commit and processor). It is not recorded unless what it measures is a commit on main.
    A quick run begins no row after `QUICK_S` seconds, lists the rows that it left out, and shows
    recorded ones.

    Raises:
        UnknownNameError: there is no such bench; the nearest is suggested.
        SlipstreamError: the bench cannot be loaded.
    """
    points = benches()
    if name not in points:
        raise UnknownNameError("bench", name, points)
    try:
        run: Bench = points[name].load()
    except ImportError as error:
        raise SlipstreamError(
            f"the bench '{name}' cannot be loaded: {error}", where=points[name].value
        ) from error
    path = results / f"{name}.jsonl"
    origin = records.origin(str(points[name].value))
    recorded = records.read(path)
    if full:
        yield from _full(run, path, recorded, origin, only, progress)
        return
    options = BenchOptions(only=only, progress=progress, budget_s=QUICK_S)
    for bar in run(options):
        yield origin.of(bar)
    rows = records.nearest((bar for bar in recorded if only in bar.bar), origin.processor)
    for bar in rows.values():
        notes = [bar.detail] if bar.detail else []
        if bar.bar in options.left_out:
            notes.append(f"not measured now: {_TIME_IS_UP}")
        if bar.processor != origin.processor:
            notes.append(f"on {bar.processor}")
        if bar.sources != origin.sources:
            notes.append("STALE: the sources have changed since")
        yield replace(bar, source="recorded", detail="; ".join(notes))
    for left in options.left_out.keys() - rows.keys():
        yield origin.of(not_judged(left, "", "", _TIME_IS_UP))


def _full(
    run: Bench,
    path: Path,
    recorded: Sequence[Bar],
    origin: Origin,
    only: str,
    progress: Callable[[str], None],
) -> Iterator[Bar]:
    """Yield the rows of a full run; append each to the records if it can be reproduced."""
    here = [bar for bar in recorded if bar.processor == origin.processor]
    before = {bar.bar: bar for bar in here}
    done = {} if only else {n: bar for n, bar in before.items() if bar.commit == origin.commit}
    yield from (replace(bar, source="recorded") for bar in done.values())
    if unrecordable := records.why_not_recordable():
        progress(f"nothing of this run is recorded: {unrecordable}")
    rests_on = before if only else dict(done)
    options = BenchOptions(full=True, only=only, done=done, recorded=rests_on, progress=progress)
    for bar in map(origin.of, run(options)):
        if unrecordable:
            notes = (bar.detail, f"NOT RECORDED: {unrecordable}")
            yield replace(bar, detail="; ".join(filter(None, notes)))
        else:
            records.append(path, bar)
            yield bar
