"""``slipstream report``: write a self-contained HTML page about a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, need_place, note, progress
from slipstream.errors import UsageError
from slipstream.tables import Column, Table
from slipstream.units import format_bytes


@options.asks(options.Target, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file; by default the recording's name with .html, or report.html.",
        ),
    ] = None,
    technique: options.Techniques = None,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Whether to simulate techniques.")
    ] = True,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Remove paths and the names of hosts and users."),
    ] = False,
    record: options.Record = None,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Write a self-contained HTML page about a step, to open in any browser or to send.

    It shows when every operator runs, where time and memory go, what techniques would gain alone
    and combined, and how accurate past predictions were. It loads no other files.

        slipstream report run.slipgraph -o run.html

        slipstream report train.py:make_workload --technique amp:bf16 --redact
    """
    from slipstream.report import write_report

    default = Path(request.target).with_suffix(".html") if request.recorded else Path("report.html")
    target = output or default
    need_place(target, ".html", ".htm")
    if technique and not what_if:
        raise UsageError(
            "--technique and --no-what-if exclude each other",
            remedy="pass one of them",
        )
    needs = options.needs_of(technique or ()) | set(options.statistics_of(record))
    with progress("reporting") as report:
        graph = request.graph(report, needs, note)
        write_report(
            graph, target, techniques=technique or (), what_if=what_if, redact=redact,
            store=store, report=report,
        )  # fmt: skip
    size = target.stat().st_size
    table = Table(
        [Column("file"), Column("tasks", "right"), Column("size", "right")],
        [(target, len(graph), format_bytes(size))],
        notes=["open it in a browser; it is one self-contained file"],
    )
    payload = {"file": str(target), "tasks": len(graph), "bytes": size, "redacted": redact}
    emit(table, payload, as_json=as_json)
