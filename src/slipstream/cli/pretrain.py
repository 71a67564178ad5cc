"""``slipstream pretrain``: train an encoder on this machine's ranks, with checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, note, progress
from slipstream.cli.plan import Configuration


def command(
    file: Configuration,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint of the output folder.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Pre-train an encoder on a sharded corpus; ranks that die are left out.

    The file is that of `slipstream plan`, without a cluster and with a corpus:

    \b
        workload = "train.py:make_workload"   # (model, batch, loss, optimizer)
        corpus = "corpus"                     # from ss.pretraining.write_shards
        output = "run"                        # checkpoint and losses
        mask_token = 4
        ranks = 2
        [[phases]]
        steps = 9000
        global_batch = 1024

        slipstream pretrain pretrain.toml --resume
    """
    from slipstream.tables import Column, Table
    from slipstream.techniques.pretraining.training import PretrainingConfig, pretrain

    config = PretrainingConfig.read(file)
    try:
        with progress("pretrain") as report:
            losses = pretrain(config, resume=resume, report=report)
    except KeyboardInterrupt:
        note(f"--resume continues from the last checkpoint in {config.output}, if there is one")
        raise
    names = ["updates", "first loss", "last loss", "output"]
    row = [str(len(losses)), f"{losses[0]:.4f}", f"{losses[-1]:.4f}", config.output]
    table = Table([Column(name, "right") for name in names], [row])
    emit(table, {"losses": losses, "output": config.output}, as_json=as_json)
