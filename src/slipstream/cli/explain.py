"""``slipstream explain``: break down the time of a step."""

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
            "--critical-path", help="List the tasks of the critical path, and what each waits for."
        ),
    ] = False,
    by: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="Group times by operator, module, line, phase, lane or kind.",
        ),
    ] = "operator",
    causal: Annotated[
        bool,
        typer.Option("--causal", help="Show the gain of the step if one group were faster."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show peak memory and the tensors alive at the peak."),
    ] = False,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Show your source with the time and memory of each line."),
    ] = False,
    statistics: Annotated[
        bool,
        typer.Option(
            "--statistics",
            help="Show statistics from `profile --record`: ids, spectra, gradients, zeros.",
        ),
    ] = False,
    movement: Annotated[
        bool,
        typer.Option(
            "--movement",
            help="Show bytes moved, the minimum that must move, and distance from hardware limits.",
        ),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Number of rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Break down the time of a step by its critical path.

    A step is as long as its critical path: the chain of tasks in which each waits for the previous
    one. Speeding up a task off the path gains nothing. Times on the path, including the waiting
    before each task, add up to the step time.

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

    _need_recording(run)
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


def _need_recording(run: Path) -> None:
    """Raise a UsageError that suggests `profile` if `run` names Python code."""
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
        f"{what}, but explain reads a recorded step",
        remedy=f"profile it first: slipstream profile {target} -o run.slipgraph",
    )
