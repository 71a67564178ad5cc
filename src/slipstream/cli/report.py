"""``slipstream report``: one page about a step, to open in a browser or to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._workload import (
    Json,
    Record,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Target,
    Techniques,
    Threads,
    Timeout,
)
from slipstream.errors import UsageError


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="By default the recording's name with .html, or report.html.",
        ),
    ] = None,
    technique: Techniques = None,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Whether to simulate techniques.")
    ] = True,
    share: Annotated[
        bool,
        typer.Option("--share", help="Take paths and names of hosts and users out of it."),
    ] = False,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    record: Record = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a step: open it in any browser, or send it.

    It shows when every operator runs, where time and memory go, what techniques would gain
    alone and together, and how past predictions turned out. It loads nothing from anywhere.

        slipstream report run.slipgraph -o run.html

        slipstream report train.py:make_workload --technique amp:bf16 --share
    """
    from slipstream.cli._output import emit, need_place, progress
    from slipstream.cli._workload import graph_of, needs_of, statistics_of
    from slipstream.report import write_report
    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes

    target = output or _beside(workload)
    need_place(target, ".html", ".htm")
    if technique and not what_if:
        raise UsageError(
            "--technique asks for a what-if that --no-what-if leaves out",
            remedy="leave one of them out",
        )
    needs = needs_of(technique or ()) | set(statistics_of(record))
    with progress("reporting") as say:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say, needs=needs,
        )  # fmt: skip
        write_report(
            graph, target, techniques=technique or (), what_if=what_if, share=share,
            store=store, say=say,
        )  # fmt: skip
    size = target.stat().st_size
    table = Table(
        [Column("file"), Column("tasks", "right"), Column("size", "right")],
        [(target, len(graph), format_bytes(size))],
        notes=["open it in a browser; it is one file and loads nothing"],
    )
    payload = {"file": str(target), "tasks": len(graph), "bytes": size, "shared": share}
    emit(table, payload, as_json=as_json)


def _beside(workload: str) -> Path:
    """Where the report of `workload` goes when nobody says: into the current folder."""
    if workload.endswith(".slipgraph"):
        return Path(workload).with_suffix(".html")
    return Path("report.html")
