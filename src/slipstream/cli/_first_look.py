"""The first table of ``slipstream advise``: on stderr, while operators are being measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.tables import Table
    from slipstream.verbs.outlooks import Outlook

_LARGEST_BOUND = 10.0


def show_first_look(graph: Graph) -> Callable[[Sequence[Outlook]], None]:
    """A function that prints the table, above whatever progress is shown."""

    def show(outlooks: Sequence[Outlook]) -> None:
        import sys

        first_look_table(graph, outlooks).print(sys.stderr)
        sys.stderr.write("\n")
        sys.stderr.flush()

    return show


def first_look_table(graph: Graph, outlooks: Sequence[Outlook]) -> Table:
    """One row for each technique that applies, the largest possible gain first."""
    from slipstream.cli._workload import as_it_is, memory_change
    from slipstream.tables import Column, Table
    from slipstream.units import format_percent

    applying = [one for one in outlooks if one.prediction.why_not is None]
    rows = [
        (
            one.prediction.technique,
            _gain(one),
            format_percent(one.share) if one.share else "-",
            memory_change(one.prediction),
            one.prediction.quality.kind.value if one.prediction.quality else "-",
            _state(one),
        )
        for one in sorted(applying, key=_promise)
    ]
    left = len(outlooks) - len(applying)
    notes = [
        as_it_is(graph, [one.prediction for one in outlooks]),
        "at most: if operators that were not measured yet cost nothing; with more threads, if they "
        "share all of it evenly",
        "operators are measured now, old and new in turns; the final table follows",
    ]
    if left:
        notes.insert(1, f"{left} techniques do not apply here; the final table says why")
    return Table(
        [
            Column("technique"),
            Column("speed-up", "right"),
            Column("of the step", "right"),
            Column("memory", "right"),
            Column("numbers", optional=True),
            Column("state"),
        ],
        rows,
        title=f"first look at {graph.meta.get('workload', 'this step')}",
        notes=notes,
    )


def _promise(one: Outlook) -> tuple[float, float]:
    if not one.missing:
        return -one.prediction.speedup, 0.0
    return (-one.most if one.most is not None else -1.0), -one.share


def _gain(one: Outlook) -> str:
    if not one.missing:
        return f"{one.prediction.speedup:.2f}x"
    if one.most is None:
        return "not known yet"
    if one.most > _LARGEST_BOUND:
        return f"> {_LARGEST_BOUND:.0f}x at most"
    return f"{one.most:.2f}x at most"


def _state(one: Outlook) -> str:
    if not one.missing:
        return "known"
    if one.decided:
        return "not worth it here"
    return f"measuring {one.missing} operator{'s' if one.missing > 1 else ''}"
