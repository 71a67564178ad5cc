"""``slipstream export``: a recorded step for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import GraphPath, Json
from slipstream.cli._output import emit, note, progress
from slipstream.errors import UsageError
from slipstream.tables import Column, Table
from slipstream.units import format_bytes


def command(
    run: GraphPath,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            show_default=False,
            help="perfetto (open it at ui.perfetto.dev), chakra (ASTRA-sim reads it), or csv; "
            "one is needed.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="By default the run's name with .json, .et, .csv.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a recorded step for other tools.

    perfetto is the simulated timeline with the critical path, for the eye; chakra keeps all that
    the graph holds and comes back with `slipstream import`; csv has one task a line.

        slipstream export run.slipgraph --to perfetto -o run.json
    """
    from slipstream.verbs.exporting import SUFFIXES, export
    from slipstream.verbs.request import load_recording

    if to not in SUFFIXES:
        raise UsageError(
            f"'{to}' is no format" if to else "no format is named",
            remedy="--to and one of perfetto, chakra or csv",
        )
    with progress("exporting"):
        graph = load_recording(run, note)
        target = export(graph, output or run.with_suffix(SUFFIXES[to]), to)
    size = target.stat().st_size
    payload = {"file": str(target), "format": to, "tasks": len(graph), "bytes": size}
    columns = [Column("file"), Column("format"), Column("tasks", "right"), Column("size", "right")]
    emit(Table(columns, [(target, to, len(graph), format_bytes(size))]), payload, as_json=as_json)
