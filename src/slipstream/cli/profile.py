"""``slipstream profile``: record one step of a workload as a graph."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._workload import (
    Json,
    Record,
    Runnable,
    ScriptArguments,
    Set,
    Steps,
    Threads,
    Timeout,
)

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.tables import Table

_TOP = 10


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.slipgraph", help="Where to keep it.")
    ] = Path("run.slipgraph"),
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    record: Record = None,
    as_json: Json = False,
) -> None:
    """Record one training step or inference as a graph of what ran.

    The workload runs in a process of its own; files it writes, removes or renames are as before
    afterwards. A plain script is run until enough optimizer steps were seen, then ended.

        slipstream profile train.py:make_workload --set batch_size=64

        slipstream profile train.py -- --epochs 1

    The function returns (model, batch, loss, optimizer), (model, batch) for inference, or a
    function that runs one step.
    """
    from slipstream.cli._output import emit, need_place, note, progress
    from slipstream.cli._workload import statistics_of, workload_of
    from slipstream.graph import save
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.profiling import profile

    need_place(output, ".slipgraph")
    recipe = workload_of(workload, script_arguments, settings)
    for option, value in pairwise(script_arguments or ()):
        if option in ("-o", "--output") and value.endswith(".slipgraph"):
            note(f"'{option} {value}' stands after -- and goes to the script; keeping {output}")
    with progress(f"profiling {recipe.name}") as say:
        graph = profile(
            recipe,
            steps=steps,
            threads=threads,
            timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
            needs=statistics_of(record),
            say=say,
        )
        save(graph, output)
    emit(summary(graph), summary_json(graph, output), as_json=as_json)
    note(f"kept in {output}; next: slipstream advise {output}")
    if graph.statistics.recorded:
        note(f"what was recorded of its values: slipstream explain {output} --statistics")


def _by_operator(graph: Graph) -> list[tuple[str, str, int, float]]:
    """(phase, operator, how often, ns), the costliest first."""
    from slipstream.graph import StepPhase

    found: dict[tuple[str, str], list[float]] = {}
    tasks = graph.tasks
    for t in range(len(tasks)):
        key = (StepPhase(tasks.phase[t]).name.lower(), graph.string(int(tasks.name[t])))
        found.setdefault(key, []).append(float(tasks.duration_ns[t]))
    rows = [(phase, name, len(times), sum(times)) for (phase, name), times in found.items()]
    return sorted(rows, key=lambda row: -row[3])


def _already(meta: Any) -> str:
    """In words: what of the usual techniques the recorded step has already."""
    baseline = meta.get("baseline") or {}
    parts = []
    if baseline.get("amp"):
        parts.append(f"autocast ({baseline['amp']})")
    if baseline.get("compiled"):
        parts.append("torch.compile, which hides the operators of its regions")
    if distributed := baseline.get("distributed"):
        ranks = distributed["ranks"]
        parts.append(f"{distributed['wrapper']} over {ranks} rank{'s' * (ranks != 1)}")
    return "; ".join(parts)


def _lanes(graph: Graph) -> str:
    """In words: what the step runs on, and how near the simulation comes to the plain step."""
    from slipstream.units import format_percent

    meta: Any = graph.meta
    scale = meta["residual_scale"]
    if meta["lanes_of"] == "cpu":
        return (
            f"it runs on {len(graph.lanes)} threads of its own; with what they hold each other up "
            f"it takes {scale:.2f} times what its operators take undisturbed"
        )
    named = meta.get("device_name", "a CUDA device")
    return (
        f"it runs on {named}: {', '.join(graph.lanes)}; simulated, it takes "
        f"{format_percent(1 / scale)} of the plain step"
    )


def summary(graph: Graph) -> Table:
    """Where the step's time goes, by operator."""
    from slipstream.graph import replay
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent

    step_ns = replay(graph).step_ns
    operators = _by_operator(graph)
    rows: list[tuple[object, ...]] = [
        (
            name.removeprefix("aten::"),
            phase,
            count,
            format_duration(ns),
            format_percent(ns / step_ns),
        )
        for phase, name, count, ns in operators[:_TOP]
        if ns
    ]
    rest = [row for row in operators[_TOP:] if row[3]]
    if rest:
        ns = sum(row[3] for row in rest)
        rows.append(
            (
                f"{len(rest)} others", "", sum(row[2] for row in rest), format_duration(ns),
                format_percent(ns / step_ns),
            )
        )  # fmt: skip
    gaps = float(graph.tasks.gap_ns.sum())
    rows.append(("Python, dispatch", "", "", format_duration(gaps), format_percent(gaps / step_ns)))
    meta: Any = graph.meta
    threads, cost_ns = meta["threads"], round(meta["profiler_ns_per_event"])
    notes = [
        f"{len(graph) - 1} operators, {threads} thread{'s' * (threads != 1)}, least of "
        f"{meta['aligned_steps']} steps each"
        + (f"; profiler's cost of {cost_ns} ns per event taken off" if cost_ns else ""),
    ]
    if "lanes_of" in meta:
        notes.append(_lanes(graph))
    if elsewhere := meta.get("elsewhere"):
        notes.append(
            f"{elsewhere['operators']} operators ran on other threads, "
            f"{format_percent(elsewhere['share'])} of all; they are not in the graph"
        )
    if already := _already(meta):
        notes.append(f"already there: {already}")
    if meta.get("unaligned_share"):
        share = format_percent(meta["unaligned_share"])
        notes.append(f"the steps differ: {share} of their operators are not in all of them")
    if reason := meta.get("memory_reason"):
        notes.append(f"memory was not recorded: {reason}")
    if meta["contended"]:
        # On one thread its own CPU time tells what the step takes undisturbed.
        hint = (
            "; its threads waited for cores, which the times hold: --threads 1 is disturbed less"
            if threads > 1 and meta.get("device", "cpu") == "cpu"
            else ""
        )
        wall = format_duration(meta["step_ns"]["wall_median"])
        notes.append(f"the machine was busy: the median step took {wall} of wall time" + hint)
    return Table(
        [
            Column("operator"),
            Column("phase"),
            Column("calls", "right", optional=True),
            Column("time", "right"),
            Column("share", "right"),
        ],
        rows,
        title=f"{meta['workload']}: {format_duration(step_ns)} per step"
        + (f" of {graph.samples} samples" if graph.samples else ""),
        notes=notes,
    )


def summary_json(graph: Graph, output: Path) -> dict[str, Any]:
    """The same for programs; times in nanoseconds."""
    from slipstream.graph import replay

    return {
        "file": str(output),
        "step_ns": replay(graph).step_ns,
        "samples": graph.samples,
        "tasks": len(graph),
        "meta": dict(graph.meta),
        "operators": [
            {"phase": phase, "name": name, "calls": count, "ns": ns, "provenance": "measured"}
            for phase, name, count, ns in _by_operator(graph)
        ],
    }
