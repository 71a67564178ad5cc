"""``slipstream explain``: what a step's time consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import GraphPath, Json
from slipstream.cli._output import emit, note, progress
from slipstream.errors import UsageError


def command(
    run: GraphPath,
    critical_path: Annotated[
        bool,
        typer.Option(
            "--critical-path", help="List the tasks of the path, and what each waits for."
        ),
    ] = False,
    by: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="operator, module, line, phase, lane or kind: what times are summed by.",
        ),
    ] = "operator",
    causal: Annotated[
        bool,
        typer.Option("--causal", help="What the step would gain if one group were faster."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="The most memory the step holds, and what lives then."),
    ] = False,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Your source, each line with its time and memory."),
    ] = False,
    statistics: Annotated[
        bool,
        typer.Option(
            "--statistics",
            help="What `profile --record` kept of the values: ids, spectra, gradients, zeros.",
        ),
    ] = False,
    movement: Annotated[
        bool,
        typer.Option(
            "--movement",
            help="Bytes moved, bytes that had to move, and how far from this machine's limits.",
        ),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Explain what a step's time consists of.

    A step is as long as its critical path: the chain of tasks in which each waits for the one
    before. What is not on the path can be made faster without gaining anything. Times on the
    path, with the waiting before each task, add up to the step.

        slipstream explain run.slipgraph --by module

        slipstream explain run.slipgraph --critical-path --top 50

        slipstream explain run.slipgraph --memory

        slipstream explain run.slipgraph --lines

        slipstream explain run.slipgraph --movement --by line
    """
    from slipstream.graph import replay
    from slipstream.verbs.explaining.lines import lines_report
    from slipstream.verbs.explaining.memory import memory_report
    from slipstream.verbs.explaining.movement import movement_report
    from slipstream.verbs.explaining.path import Shown, path_report
    from slipstream.verbs.explaining.statistics import statistics_report
    from slipstream.verbs.request import load_recording

    _refuse_code(run)
    with progress("explaining"):
        graph = load_recording(run, note)
        if statistics:
            tables, payload = statistics_report(graph, str(run), top)
        elif memory:
            tables, payload = memory_report(replay(graph), top)
        elif movement:
            tables, payload = movement_report(graph, by, top, note)
        elif lines:
            tables, payload = lines_report(replay(graph), top)
        else:
            show: Shown = "path" if critical_path else "causal" if causal else "groups"
            tables, payload = path_report(replay(graph), by, top, show)
    emit(tables, payload, as_json=as_json)


def _refuse_code(run: Path) -> None:
    """Say what to do first with a workload that was not recorded yet.

    Raises:
        UsageError: `run` names Python code.
    """
    from slipstream.workload.recipe import workload_functions

    target = str(run)
    if ".py:" in target:
        what = f"'{run}' is a workload"
    elif run.suffix != ".py":
        return
    else:
        what = f"'{run}' is a script"
        functions = workload_functions(run)
        target += f":{functions[0]}" if functions else ""
    raise UsageError(
        f"{what}, and explain reads a recording of one",
        remedy=f"profile it first: slipstream profile {target} -o run.slipgraph",
    )
