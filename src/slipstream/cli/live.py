"""``slipstream live``: a local page with costs, what-ifs and the batch size while you edit."""

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
            help="Port on 127.0.0.1; by default the first free port from 8377 on.",
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
    """Watch a workload while you edit it: analyse every save and show it on a local page.

    The page is a live report: costs next to the source lines, switches that simulate techniques
    immediately, and bars for step time, throughput, memory and batch size that edit the file when
    you confirm. It is served on this machine only, at the printed address, which contains the key.
    Stop it with Ctrl-C.

        slipstream live train.py:make_workload
    """
    import webbrowser

    from slipstream.live.analysis import Analyst, parse_workload
    from slipstream.live.server import serving
    from slipstream.technique import need_installed

    need_installed(technique or ())
    # A file that does not parse now may parse at the next save.
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
            notes=["stop it with Ctrl-C; the address contains the key of this session"],
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
    """Listener that prints a line on stderr for each save."""

    def __init__(self) -> None:
        self._reported: tuple[int, str] | None = None

    def __call__(self, analysis: Analysis) -> None:
        key = analysis.number, analysis.state
        if key == self._reported or analysis.state in ("recording", "first"):
            return
        self._reported = key
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
