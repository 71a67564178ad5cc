"""``slipstream live``: costs, what-ifs and the batch size on a local page, while you edit."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, note
from slipstream.tables import Column, Table
from slipstream.units import format_duration

if TYPE_CHECKING:
    from slipstream.live.analysis import Analysis


@options.asks(options.Runnable, threads=0, steps=24, timeout="1min")
def command(
    request: options.Request,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Listen there, on 127.0.0.1; by default on a free port from 8377 on.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open the page.")
    ] = True,
    technique: options.Techniques = None,
    what_if: options.WhatIf = True,
    batches: options.Batches = True,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Watch a workload while you edit it: every save is analysed, and a local page shows it.

    The page has what a report has, and is alive: costs beside the source lines, switches that
    simulate at once, bars for step time, throughput, memory and batch size that edit the file
    when you confirm. It listens on this machine alone, and only the address that is printed opens
    it. End it with Ctrl-C.

        slipstream live train.py:make_workload
    """
    import webbrowser

    from slipstream.live.analysis import Analyst, parse_workload
    from slipstream.live.server import serving
    from slipstream.technique import need_known

    need_known(technique or ())
    # A file that does not parse now may do so when it is saved next.
    recipe = parse_workload(request.target, *request.script_arguments, **request.arguments)
    analyst = Analyst(
        recipe,
        threads=request.threads,
        steps=request.steps,
        timeout_s=request.timeout_s,
        techniques=(technique or ()) if what_if else None,
        batches=batches,
        store=store,
    )
    with analyst, serving(analyst, port) as live:
        table = Table(
            [Column("page"), Column("watched")],
            [(live.address, recipe.path)],
            notes=["end it with Ctrl-C; the address holds the key of this session"],
        )
        payload = {"address": live.address, "watched": str(recipe.path)}
        emit(table, payload, as_json=as_json)
        sys.stdout.flush()
        analyst.listen(_Log())
        analyst.watch()
        if browser:
            with contextlib.suppress(webbrowser.Error):
                webbrowser.open(live.address)
        threading.Event().wait()


class _Log:
    """One line on stderr for what became of each save."""

    def __init__(self) -> None:
        self._said: tuple[int, str] | None = None

    def __call__(self, analysis: Analysis) -> None:
        key = analysis.number, analysis.state
        if key == self._said or analysis.state in ("recording", "first"):
            return
        self._said = key
        if analysis.problem is not None:
            where = (
                f"{analysis.problem.path}:{analysis.problem.line}: "
                if analysis.problem.line
                else ""
            )
            note(f"live: {where}{analysis.problem.what}")
        elif analysis.state == "recorded" and analysis.costs is not None:
            note(
                f"live: {format_duration(analysis.costs.step_ns)} per step, "
                f"{analysis.after_s.get('first', 0.0):.1f} s to the first numbers"
            )
