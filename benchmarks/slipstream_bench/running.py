"""bench: measure the bars, record the full runs, show both."""

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
"""Seconds after which a quick run begins no further row, so that it ends within three minutes."""
_TIME_IS_UP = "the time of a quick run was used up; --full measures it"


def benches() -> dict[str, Any]:
    """Entry points of every bench by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def purposes() -> dict[str, str]:
    """What each bench is for: the first line of its module, which is read and not imported."""
    return {name: _purpose(str(point.value)) for name, point in benches().items()}


def listing() -> Table:
    """Every bench and what it measures."""
    known = purposes()
    fields: tuple[Field[tuple[str, str]], ...] = (
        Field.of("bench", lambda row: row[0]),
        Field.of("measures", lambda row: row[1]),
    )
    notes = [
        "slipstream bench NAME takes at most three minutes; all of them: slipstream bench all, at "
        f"most {3 * len(known)} minutes",
        "with --full it is everything, which takes far longer and goes on where it was stopped",
    ]
    return Table.of(known.items(), fields, "slipstream's own bars", notes)


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
    """The rows of one bench, and how many hold."""
    counts = Counter(bar.standing for bar in bars)
    note = (
        f"{counts['holds']} hold, {counts['at the bar']} are at the bar within their noise, "
        f"{counts['falls short']} fall short, {counts['not judged']} not judged"
    )
    return Table.of(bars, _FIELDS, f"bench {name}", [note])


def _purpose(entry: str) -> str:
    """Empty where the module of ``package.room.module:function`` is not found as a file."""
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
    """Measure the rows of one bench, each yielded when it is known.

    A full run is appended to ``results/NAME.jsonl`` row by row and goes on where it was killed
    (for the same commit and processor); it is not recorded where what it measures is not a commit
    on main. A quick run begins no row after `QUICK_S` seconds, says which it left out, and shows
    what is recorded.

    Raises:
        UnknownNameError: no such bench; the nearest is suggested.
        SlipstreamError: the bench cannot be loaded.
    """
    known = benches()
    if name not in known:
        raise UnknownNameError("bench", name, known)
    try:
        run: Bench = known[name].load()
    except ImportError as error:
        raise SlipstreamError(
            f"the bench '{name}' cannot be loaded: {error}", where=known[name].value
        ) from error
    path = results / f"{name}.jsonl"
    origin = records.origin(str(known[name].value))
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
            notes.append("STALE: what it rests on has changed since")
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
    """Rows of a full run, each appended to the records where it can be measured again."""
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
