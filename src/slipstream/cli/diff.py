"""``slipstream diff``: explain why a step became slower or faster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit_result, note, progress
from slipstream.errors import UsageError

_Before = Annotated[Path, typer.Argument(metavar="BEFORE.SLIPGRAPH", help="Earlier recording.")]
_After = Annotated[Path, typer.Argument(metavar="AFTER.SLIPGRAPH", help="Later recording.")]


def command(
    before: _Before,
    after: _After,
    fail_over: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with code 1 if the step is slower by more than this, such as 5%.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="GROUP", help="operator, module or line.")
    ] = "operator",
    top: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Explain why a step became slower or faster.

    The changes are those of the critical path, so they add up to the change of the step, which has
    a 90 % interval: the difference between two recordings of one program, wider on a busy machine
    and narrower with more --steps. Page faults differ between launches of one program: they have a
    separate row and count neither for the interval nor for --fail-over. In continuous integration,
    compare with the graph of the last release:

        slipstream diff release.slipgraph now.slipgraph --fail-over 5%

    It fails if even the lower end of the interval exceeds the limit, and warns if the recordings
    are inconclusive.
    """
    from slipstream.graph import difference, load
    from slipstream.verbs.explaining.change import Change
    from slipstream.verbs.request import load_recording

    limit = None if fail_over is None else _fraction(fail_over)
    if by not in ("operator", "module", "line"):
        raise UsageError(f"--by: '{by}' is not a group", remedy="pass operator, module or line")
    with progress("comparing"):
        change = Change(difference(load(before), load_recording(after, note)), limit)
    emit_result(change, change.table(by, top), as_json=as_json)
    over, doubt = change.judged
    if doubt:
        note(doubt if over else f"warning: {doubt}")
    if over:
        raise typer.Exit(1)


def _fraction(text: str) -> float:
    """Return 0.05 for "5%" and for "5"."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"--fail-over: '{text}' is not a percentage", remedy="for example 5%")
    return value / 100
