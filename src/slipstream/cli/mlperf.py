"""Under MLPerf rules: serving under load, and training until a quality is reached."""

from __future__ import annotations

import typer

from slipstream.cli import mlperf_serve, mlperf_train

app = typer.Typer(
    no_args_is_help=True,
    help="Under MLPerf rules: what a model serves under load with the accuracy it has, and how "
    "long a training takes until its quality is reached.",
)
mlperf_serve.register(app)
mlperf_train.register(app)
