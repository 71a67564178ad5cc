"""``slipstream doctor``: check the machine, the installation and what can be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json


def command(
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check this results store instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the machine, the installation, and what can be measured here.

    Every line is tested when you run it. `no` is not an error: the line shows what is missing and
    how to get it. The exit code is 1 only if the core does not work: Python, torch or the store.
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.verbs.doctor import examine

    with progress("doctor") as report:
        diagnosis = examine(store, report)
    emit_result(diagnosis, *diagnosis.tables(), as_json=as_json)
    if not diagnosis.core_works:
        raise typer.Exit(1)
