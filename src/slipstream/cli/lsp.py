"""``slipstream lsp``: a language server that shows costs next to the source lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from slipstream.live.analysis import Analyst


def command(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="file.py:function; without it, nothing runs until you start it in the editor.",
        ),
    ] = None,
    tcp: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port on 127.0.0.1, instead of stdin and stdout; the editor must send the printed "
            "key.",
        ),
    ] = None,
    stdio: Annotated[
        bool,
        typer.Option("--stdio", help="Use stdin and stdout, the default; some editors pass it."),
    ] = False,
    technique: options.Techniques = None,
    what_if: options.WhatIf = True,
    batches: options.Batches = True,
    threads: options.Threads = 0,
    steps: options.Steps = 24,
    timeout: options.Timeout = "1min",
    store: options.StorePath = None,
) -> None:
    """Serve an editor with the cost of each line, function and module, and edits that reduce it.

    A language server, which editors start themselves. docs/editors.md shows the settings for
    Neovim, Helix, Emacs and VS Code. Only the protocol goes to stdout.

        slipstream lsp train.py:make_workload
    """
    from slipstream.technique import need_installed
    from slipstream.units import parse_duration_ns

    need_installed(technique or ())
    if stdio and tcp is not None:
        raise UsageError("--stdio and --tcp exclude each other", remedy="pass one of them")
    timeout_s = parse_duration_ns(timeout, "--timeout") / 1e9
    try:
        from slipstream.live.editor import serve_stdio, serve_tcp
    except ModuleNotFoundError as error:
        raise MissingExtraError("slipstream lsp", error.name or "pygls", "live") from error

    def make(target: str) -> Analyst:
        from slipstream.live.analysis import Analyst

        return Analyst(
            target,
            threads=threads,
            steps=steps,
            timeout_s=timeout_s,
            techniques=(technique or ()) if what_if else None,
            batches=batches,
            store=store,
        )

    if tcp is None:
        serve_stdio(make, workload)
    else:
        serve_tcp(make, tcp, workload)
