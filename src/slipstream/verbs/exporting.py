"""Export a recorded step for other tools."""

from __future__ import annotations

import csv
from pathlib import Path

from slipstream.errors import GraphError, UnknownNameError
from slipstream.files import replacing
from slipstream.graph import (
    PROVENANCES,
    Graph,
    Kind,
    StepPhase,
    Timeline,
    find_critical_path,
    replay,
    write_chakra,
    write_perfetto,
)

SUFFIXES = {"perfetto": ".json", "chakra": ".et", "csv": ".csv"}
"""File suffix of each format."""


def export(graph: Graph, path: str | Path, to: str = "") -> Path:
    """Write a recorded step to `path` atomically, and return the path.

    Args:
        to: ``perfetto`` (the simulated timeline with the critical path), ``chakra`` (the whole
            graph) or ``csv`` (a line per task, times in ns); by default chosen by the suffix.
    Raises:
        UnknownNameError: unknown format.
        GraphError: the graph has a cycle, or the file cannot be written.
    """
    path = Path(path)
    form = to or next((name for name, end in SUFFIXES.items() if path.suffix == end), path.suffix)
    if form not in SUFFIXES:
        raise UnknownNameError("format", form, SUFFIXES)
    if form == "chakra":
        write_chakra(graph, path)
    elif form == "perfetto":
        write_perfetto(replay(graph), path)
    else:
        _write_csv(replay(graph), path)
    return path


def _write_csv(timeline: Timeline, path: Path) -> None:
    graph, tasks = timeline.graph, timeline.graph.tasks
    critical = find_critical_path(timeline)
    on_path = set(critical.task.tolist())
    columns = {name: column.tolist() for name, column in tasks.columns().items()}
    start, slack = timeline.start_ns.tolist(), critical.slack_ns.tolist()
    try:
        with replacing(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
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
