"""``slipstream explain``: what a step's time consists of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._workload import Json
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.graph import CriticalPath, Timeline
    from slipstream.tables import Table

GraphPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.SLIPGRAPH",
        help="A recorded step: `slipstream profile` and `slipstream import` write them.",
    ),
]


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
            "--by",
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
    top: Annotated[int, typer.Option("--top", min=1, help="Rows to show.")] = 20,
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
    """
    from slipstream.cli._lines import lines_report
    from slipstream.cli._memory import memory_report
    from slipstream.cli._output import emit, progress
    from slipstream.cli._statistics import statistics_report
    from slipstream.cli._workload import load_recording
    from slipstream.graph import communication, find_critical_path, replay
    from slipstream.graph import lanes as lanes_of

    _refuse_code(run)
    with progress("explaining"):
        graph = load_recording(run)
        if statistics:
            emit(*statistics_report(graph, str(run), top), as_json=as_json)
            return
        timeline = replay(graph)
        if memory:
            emit(*memory_report(timeline, top), as_json=as_json)
            return
        if lines:
            emit(*lines_report(timeline, top), as_json=as_json)
            return
        path = find_critical_path(timeline)
        groups = [group for group in path.by(by) if group.total_ns]
        payload: dict[str, Any] = {
            "step_ns": timeline.step_ns,
            "by": by,
            "contributions": [
                {
                    "name": c.name, "busy_ns": c.busy_ns, "waited_ns": c.waited_ns,
                    "tasks": c.tasks, "share": _share(c.total_ns, timeline),
                }
                for c in groups[:top]
            ],
            "waiting_ns": {kind.name.lower(): ns for kind, ns in path.by_dependency().items()},
            "lanes": lanes_of(timeline),
            "machine": timeline.graph.meta.get("machine"),
            "communication": communication(timeline),
            "duration_share": _provenances(timeline),
        }  # fmt: skip
        if critical_path:
            payload["critical_path"] = _entries(path, top)
            tables = [_path_table(path, payload["critical_path"])]
        elif causal:
            curves = _curves(timeline, by, top)
            payload["virtual_speedups"] = curves
            tables = [_causal_table(curves, by)]
        else:
            tables = [_group_table(path, payload, by)]
        tables.append(_lane_table(timeline))
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


def _share(ns: float, timeline: Timeline) -> float:
    return ns / timeline.step_ns if timeline.step_ns else 0.0


def _provenances(timeline: Timeline) -> dict[str, float]:
    """Share of all durations by where they come from."""
    import numpy as np

    from slipstream.graph import PROVENANCES

    tasks = timeline.graph.tasks
    sums = np.bincount(tasks.provenance, tasks.duration_ns, minlength=len(PROVENANCES))
    total = float(sums.sum())
    return {
        str(provenance): float(part) / total
        for provenance, part in zip(PROVENANCES, sums.tolist(), strict=True)
        if part
    }


_NO_LINE = (
    "No source line: what no module of the model, backward() or optimizer.step() of yours ran, and "
    "the loop that is slipstream's own where a function returns (model, batch, loss, optimizer)."
)


def _group_table(path: CriticalPath, payload: dict[str, Any], by: str) -> Table:
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent

    rows = [
        (
            shorten(row["name"]),
            format_percent(row["share"]),
            format_duration(row["busy_ns"]),
            format_duration(row["waited_ns"]),
            row["tasks"],
        )
        for row in payload["contributions"]
    ]
    return Table(
        [
            Column(by),
            Column("share of step", "right"),
            Column("runs", "right"),
            Column("waits before", "right"),
            Column("tasks", "right", optional=True),
        ],
        rows,
        title=f"{_workload(path.timeline)}: {format_duration(path.step_ns)} per step",
        notes=[
            *_notes(path, payload),
            *(
                [_NO_LINE]
                if any(row["name"] == "(no source line)" for row in payload["contributions"])
                else []
            ),
            'Only what is on the critical path is counted; "waits before" is the time before tasks '
            "in which nothing of the path ran: Python, dispatch, delays.",
        ],
    )


def _notes(path: CriticalPath, payload: dict[str, Any]) -> list[str]:
    from slipstream.units import format_duration, format_percent

    origins = ", ".join(
        f"{format_percent(share)} {name}" for name, share in payload["duration_share"].items()
    )
    lines = [f"Durations: {origins or 'none'}; the timeline is simulated from them."]
    lines += _recorded_on(path.timeline)
    waiting = {name: ns for name, ns in payload["waiting_ns"].items() if ns}
    if waiting:
        parts = [f"{name.replace('_', ' ')} {format_duration(ns)}" for name, ns in waiting.items()]
        lines.append("Waiting on the path, by what is waited for: " + ", ".join(parts) + ".")
    talk = payload["communication"]
    if talk.total_ns:
        lines.append(
            f"Communication takes {format_duration(talk.total_ns)}; "
            f"{format_duration(talk.exposed_ns)} of it are hidden behind no computation."
        )
    return lines


def _recorded_on(timeline: Timeline) -> list[str]:
    """The machine in one line; none where the recording does not say."""
    from slipstream.units import format_bytes

    meta = timeline.graph.meta
    machine = meta.get("machine")
    if not isinstance(machine, Mapping):
        return []
    parts = [str(machine["cpu.model"])] if "cpu.model" in machine else []
    if "cpu.logical" in machine:
        parts.append(f"{machine['cpu.logical']} logical cores")
    if "memory.total_mib" in machine:
        parts.append(format_bytes(machine["memory.total_mib"] * 2**20))
    threads = meta.get("threads", 1)
    parts.append(f"torch {meta.get('torch', 'unknown')} on {threads} thread{'s' * (threads != 1)}")
    return [f"Recorded on {', '.join(parts)}."]


def _entries(path: CriticalPath, top: int) -> list[dict[str, Any]]:
    """The path's tasks in order; with more than `top`, those that contribute most."""
    import numpy as np

    from slipstream.graph import Dependency

    graph = path.timeline.graph
    most = np.sort(np.argsort(-(path.busy_ns + path.waited_ns), kind="stable")[:top])
    return [
        {
            "task": int(path.task[i]),
            "name": graph.strings[graph.tasks.name[path.task[i]]],
            "module": graph.strings[graph.tasks.module[path.task[i]]],
            "lane": graph.lanes[graph.tasks.lane[path.task[i]]],
            "start_ns": float(path.start_ns[i] - path.start_ns[0]),
            "busy_ns": float(path.busy_ns[i]),
            "waited_ns": float(path.waited_ns[i]),
            "waits_for": Dependency(path.via[i]).name.lower(),
        }
        for i in most.tolist()
    ]


def _path_table(path: CriticalPath, entries: list[dict[str, Any]]) -> Table:
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration

    rows = [
        (
            format_duration(entry["start_ns"]),
            shorten(entry["name"]),
            entry["module"],
            entry["lane"],
            format_duration(entry["busy_ns"]),
            format_duration(entry["waited_ns"]),
            entry["waits_for"].replace("_", " "),
        )
        for entry in entries
    ]
    return Table(
        [
            Column("at", "right"),
            Column("task"),
            Column("module", optional=True),
            Column("lane"),
            Column("runs", "right"),
            Column("waits before", "right"),
            Column("for"),
        ],
        rows,
        title=f"{_workload(path.timeline)}: {len(path)} tasks make up the step",
        notes=[f"{len(entries)} of {len(path)} shown, those that take longest."]
        if len(entries) < len(path)
        else (),
    )


def _curves(timeline: Timeline, by: str, top: int) -> list[dict[str, Any]]:
    from slipstream.graph import virtual_speedups

    return [
        {
            "name": curve.name,
            "total_ns": curve.total_ns,
            "tasks": curve.tasks,
            "faster": list(curve.faster),
            "gain": list(curve.gains),
        }
        for curve in virtual_speedups(timeline.graph, by, most=top)
    ]


def _causal_table(curves: list[dict[str, Any]], by: str) -> Table:
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent

    shares = curves[0]["faster"] if curves else []
    rows = [
        (
            shorten(curve["name"]),
            format_duration(curve["total_ns"]),
            *(format_percent(gain) for gain in curve["gain"]),
        )
        for curve in curves
    ]
    return Table(
        [
            Column(by),
            Column("takes", "right"),
            *(Column(f"-{share:.0%}", "right") for share in shares),
        ],
        rows,
        title="what the step would gain if one group took less time",
        notes=["Simulated; 100 % less is the most that any technique could gain there."],
    )


def _lane_table(timeline: Timeline) -> Table:
    from slipstream.graph import lanes
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent

    rows = [
        (
            lane.name,
            format_percent(lane.busy),
            format_duration(lane.busy_ns),
            format_duration(lane.gap_ns),
            # Of sums of fractions a little is left.
            format_duration(lane.idle_ns if lane.idle_ns >= 1 else 0),
        )
        for lane in lanes(timeline)
    ]
    return Table(
        [
            Column("lane"),
            Column("busy", "right"),
            Column("runs", "right"),
            Column("gaps", "right"),
            Column("idle", "right"),
        ],
        rows,
    )


def _workload(timeline: Timeline) -> str:
    return str(timeline.graph.meta.get("workload", "this step"))


_LONGEST_NAME = 72


def shorten(name: str) -> str:
    """A name that fits a table: C++ kernels spell out all their template arguments."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
