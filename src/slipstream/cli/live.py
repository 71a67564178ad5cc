"""``slipstream live``: costs, what-ifs and the batch size on a local page, while you edit."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli._workload import (
    Batches,
    Json,
    Runnable,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Techniques,
    Threads,
    Timeout,
    WhatIf,
)


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Listen there, on 127.0.0.1; by default on a free port from 8377 on.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open the page.")
    ] = True,
    technique: Techniques = None,
    what_if: WhatIf = True,
    batches: Batches = True,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "1min",
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Watch a workload while you edit it: every save is analysed, and a local page shows it.

    The page has what a report has, and is alive: costs beside the source lines, switches that
    simulate at once, bars for step time, throughput, memory and batch size that edit the file
    when you confirm. It listens on this machine alone, and only the address that is printed opens
    it. End it with Ctrl-C.

        slipstream live train.py:make_workload
    """
    import contextlib
    import threading
    import webbrowser

    from slipstream.cli._output import emit, note
    from slipstream.cli._workload import live_workload
    from slipstream.live.analysis import Analyst
    from slipstream.live.server import serving
    from slipstream.tables import Column, Table
    from slipstream.technique import need_known
    from slipstream.units import parse_duration_ns

    need_known(technique or ())
    recipe = live_workload(workload, script_arguments, settings)
    analyst = Analyst(
        recipe,
        threads=threads,
        steps=steps,
        timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
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
        import sys

        sys.stdout.flush()
        analyst.listen(_Log(note))
        analyst.watch()
        if browser:
            with contextlib.suppress(webbrowser.Error):
                webbrowser.open(live.address)
        threading.Event().wait()


class _Log:
    """One line on stderr for what became of each save."""

    def __init__(self, note: object) -> None:
        self._note = note
        self._said: tuple[int, str] | None = None

    def __call__(self, analysis: object) -> None:
        from slipstream.live.analysis import Analysis
        from slipstream.units import format_duration

        assert isinstance(analysis, Analysis)
        assert callable(self._note)
        key = analysis.number, analysis.state
        if key == self._said or analysis.state in ("recording", "first"):
            return
        self._said = key
        if analysis.problem is not None:
            where = (
                f"{analysis.problem.path}:{analysis.problem.line}: "
                if (analysis.problem.line)
                else ""
            )
            self._note(f"live: {where}{analysis.problem.what}")
        elif analysis.state == "recorded" and analysis.costs is not None:
            self._note(
                f"live: {format_duration(analysis.costs.step_ns)} per step, "
                f"{analysis.after_s.get('first', 0.0):.1f} s to the first numbers"
            )
