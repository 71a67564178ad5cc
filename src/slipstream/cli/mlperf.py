"""Under MLPerf rules: serving under load."""

from __future__ import annotations

import typer

from slipstream.cli import mlperf_serve

app = typer.Typer(
    no_args_is_help=True,
    help="Under MLPerf rules: what a model serves under load, with the accuracy it has.",
)
mlperf_serve.register(app)
