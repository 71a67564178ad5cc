"""``slipstream diff``: what made a step slower or faster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit_result, note, progress
from slipstream.errors import UsageError

_Before = Annotated[Path, typer.Argument(metavar="BEFORE.SLIPGRAPH", help="The step as it was.")]
_After = Annotated[Path, typer.Argument(metavar="AFTER.SLIPGRAPH", help="The step as it is.")]


def command(
    before: _Before,
    after: _After,
    fail_over: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Leave with exit code 1 when the step is certainly slower by more, such as 5%.",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="GROUP", help="operator, module or line.")
    ] = "operator",
    top: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
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
    from slipstream.graph import difference, load
    from slipstream.verbs.explaining.change import Change
    from slipstream.verbs.request import load_recording

    limit = None if fail_over is None else _fraction(fail_over)
    if by not in ("operator", "module", "line"):
        raise UsageError(f"'{by}' is no group", remedy="operator, module or line")
    with progress("comparing"):
        change = Change(difference(load(before), load_recording(after, note)), limit)
    emit_result(change, change.table(by, top), as_json=as_json)
    over, doubt = change.judged
    if doubt:
        note(doubt if over else f"warning: {doubt}")
    if over:
        raise typer.Exit(1)


def _fraction(text: str) -> float:
    """0.05 from "5%"; a number without a sign is a percentage too."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"'{text}' is no percentage", remedy="--fail-over 5%")
    return value / 100
