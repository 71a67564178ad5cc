"""``slipstream export``: convert a recorded step for other tools."""

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
            help="perfetto (for ui.perfetto.dev), chakra (for ASTRA-sim), or csv; required.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file; by default the name of the run with .json, .et or .csv.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a recorded step for other tools.

    perfetto shows the simulated timeline with the critical path; chakra is lossless and can be read
    back with `slipstream import`; csv has one task per line.

        slipstream export run.slipgraph --to perfetto -o run.json
    """
    from slipstream.verbs.exporting import SUFFIXES, export
    from slipstream.verbs.request import load_recording

    if to not in SUFFIXES:
        raise UsageError(
            f"--to: '{to}' is not a format" if to else "the format is missing",
            remedy="pass --to perfetto, chakra or csv",
        )
    with progress("exporting"):
        graph = load_recording(run, note)
        target = export(graph, output or run.with_suffix(SUFFIXES[to]), to)
    size = target.stat().st_size
    payload = {"file": str(target), "format": to, "tasks": len(graph), "bytes": size}
    columns = [Column("file"), Column("format"), Column("tasks", "right"), Column("size", "right")]
    emit(Table(columns, [(target, to, len(graph), format_bytes(size))]), payload, as_json=as_json)
