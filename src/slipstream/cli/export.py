"""``slipstream export``: a recorded step for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import GraphPath, Json
from slipstream.cli._output import emit, note, progress
from slipstream.errors import GraphError, UsageError
from slipstream.tables import Column, Table
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.graph import Timeline

_SUFFIX = {"perfetto": ".json", "chakra": ".et", "csv": ".csv"}


def command(
    run: GraphPath,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            show_default=False,
            help="perfetto (open it at ui.perfetto.dev), chakra (ASTRA-sim reads it), or csv; "
            "one is needed.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="By default the run's name with .json, .et, .csv.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a recorded step for other tools.

    perfetto is the simulated timeline with the critical path, for the eye; chakra keeps all that
    the graph holds and comes back with `slipstream import`; csv has one task a line.

        slipstream export run.slipgraph --to perfetto -o run.json
    """
    from slipstream.graph import replay, write_chakra, write_perfetto
    from slipstream.verbs.request import load_recording

    if to not in _SUFFIX:
        raise UsageError(
            f"'{to}' is no format" if to else "no format is named",
            remedy="--to and one of perfetto, chakra or csv",
        )
    target = output or run.with_suffix(_SUFFIX[to])
    with progress("exporting"):
        graph = load_recording(run, note)
        if to == "chakra":
            write_chakra(graph, target)
        elif to == "perfetto":
            write_perfetto(replay(graph), target)
        else:
            _write_csv(replay(graph), target)
    size = target.stat().st_size
    payload = {"file": str(target), "format": to, "tasks": len(graph), "bytes": size}
    columns = [Column("file"), Column("format"), Column("tasks", "right"), Column("size", "right")]
    emit(Table(columns, [(target, to, len(graph), format_bytes(size))]), payload, as_json=as_json)


def _write_csv(timeline: Timeline, path: Path) -> None:
    """One task a line: names as text, times in nanoseconds."""
    import csv

    from slipstream.graph import PROVENANCES, Kind, StepPhase, find_critical_path

    graph, tasks = timeline.graph, timeline.graph.tasks
    found = find_critical_path(timeline)
    on_path = set(found.task.tolist())
    columns = {name: column.tolist() for name, column in tasks.columns().items()}
    start, slack = timeline.start_ns.tolist(), found.slack_ns.tolist()
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["task", "name", "kind", "phase", "module", "source", "scope", "lane", "rank",
                 "start_ns", "duration_ns", "gap_ns", "slack_ns", "critical", "provenance"]
            )  # fmt: skip
            for task in range(len(tasks)):
                row = {name: column[task] for name, column in columns.items()}
                text = {
                    key: graph.strings[row[key]] for key in ("name", "module", "source", "scope")
                }
                writer.writerow(
                    [task, text["name"], Kind(row["kind"]).name.lower(),
                     StepPhase(row["phase"]).name.lower(), text["module"], text["source"],
                     text["scope"], graph.lanes[row["lane"]], row["rank"], start[task],
                     row["duration_ns"], row["gap_ns"], slack[task], int(task in on_path),
                     str(PROVENANCES[row["provenance"]])]
                )  # fmt: skip
    except OSError as error:
        raise GraphError(f"cannot be written: {error.strerror}", where=str(path)) from error
