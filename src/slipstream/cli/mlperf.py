"""MLPerf benchmarks: serving under load, and training to a target quality."""

from __future__ import annotations

import typer

from slipstream.cli import mlperf_serve, mlperf_train

app = typer.Typer(
    no_args_is_help=True,
    help="Benchmark a model by MLPerf rules: throughput and accuracy under load, and training time "
    "to a target quality.",
)
mlperf_serve.register(app)
mlperf_train.register(app)
