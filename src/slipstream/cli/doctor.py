"""What works here: the machine, what is installed, what can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json


def command(
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look at this results store instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what works here: the machine, what is installed, what can be measured.

    Every line was tried just now. `no` is not an error: it says what you would gain and how. The
    exit code is 1 only when the core does not work: Python or torch, or an unusable store.
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.verbs.doctor import examine

    with progress("doctor") as report:
        diagnosis = examine(store, report)
    emit_result(diagnosis, *diagnosis.tables(), as_json=as_json)
    if not diagnosis.core_works:
        raise typer.Exit(1)
