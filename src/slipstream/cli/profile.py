"""``slipstream profile``: record one step of a workload as a graph."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, need_place, note, progress


@options.asks(options.Runnable, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.slipgraph", help="Output file.")
    ] = Path("run.slipgraph"),
    record: options.Record = None,
    as_json: options.Json = False,
) -> None:
    """Record one training step or inference as a graph of what ran.

    The workload runs in a separate process; files that it writes, removes or renames are restored
    afterwards. A plain script runs until it has taken enough optimizer steps.

        slipstream profile train.py:make_workload --set batch_size=64

        slipstream profile train.py -- --epochs 1

    The function returns (model, batch, loss, optimizer), (model, batch) for inference, or a
    function that runs one step.
    """
    from slipstream.graph import save
    from slipstream.verbs.profiling import summary, summary_json

    need_place(output, ".slipgraph")
    recipe = request.workload()
    for option, value in pairwise(request.script_arguments):
        if option in ("-o", "--output") and value.endswith(".slipgraph"):
            note(f"'{option} {value}' is after -- and is passed to the script; writing {output}")
    with progress(f"profiling {recipe.name}") as report:
        graph = request.graph(report, options.statistics_of(record), note)
        save(graph, output)
    emit(summary(graph), summary_json(graph, output), as_json=as_json)
    quoted = shlex.quote(str(output))
    note(f"wrote {output}; next: slipstream advise {quoted}")
    if graph.statistics.recorded:
        note(f"recorded statistics: slipstream explain {quoted} --statistics")
