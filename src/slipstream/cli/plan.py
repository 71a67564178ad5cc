"""``slipstream plan``: how to pre-train an encoder, for how long and how much money."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, note, progress

Configuration = Annotated[
    Path, typer.Argument(metavar="FILE.toml", help="Workload, phases, cluster and limits.")
]


def command(
    file: Configuration,
    recorded: Annotated[
        Path | None,
        typer.Option(metavar="RUN.slipgraph", help="The workload's step, if it is recorded."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Plan the pre-training of an encoder: techniques, devices, accumulation, time and money.

    The file has at least the workload, a cluster, and tables [[phases]] in order of the training:

    \b
        workload = "train.py:make_workload"   # (model, batch, loss, optimizer)
        cluster = "workers=16,link=10gbit"
        price_per_hour = 0.5                  # dollars per device
        budget = 100.0                        # or deadline = "72 h"
        [[phases]]
        steps = 9000
        global_batch = 1024
        length = 128

    It may set memory, techniques and micro_batch; if not, they are chosen.

        slipstream plan pretrain.toml
    """
    from slipstream.cluster import Cluster
    from slipstream.techniques.pretraining.training import PretrainingConfig
    from slipstream.verbs.pretraining import plan_pretraining
    from slipstream.verbs.profiling import profile
    from slipstream.verbs.request import load_recording

    config = PretrainingConfig.read(file)
    if config.cluster:
        # Fail before the workload runs.
        Cluster.load(config.cluster)
    with progress("plan") as report:
        if recorded is not None:
            graph = load_recording(recorded, note)
        else:
            graph = profile(config.workload, threads=1, report=report)
        plan = plan_pretraining(config, graph, report)
    emit(plan.table(), plan.to_json(), as_json=as_json)
    if plan.chosen is None:
        raise typer.Exit(1)
