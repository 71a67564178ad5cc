"""profile: run the user's step a few times and record its graph."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.capture import MIN_STEPS, STATISTICS, CaptureSettings, capture
from slipstream.errors import (
    GraphError,
    InvalidArgumentError,
    SlipstreamError,
    UnknownNameError,
    WorkloadError,
)
from slipstream.files import temporary_folder
from slipstream.graph import Graph, load, replay, save
from slipstream.graph.origin import describe_source
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent
from slipstream.verbs._chatter import without_chatter
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.verbs.children import say as tell
from slipstream.verbs.page_faults import launches_in_words, watch_launches
from slipstream.workload import Workload, run_steps
from slipstream.workload.script import ScriptEndedError

_LEAST_FREE_BYTES = 1 << 20
# Operators that a summary names.
_TOP = 10


def profile(
    workload: Workload | str,
    *,
    warmup: int = 3,
    steps: int = 24,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    needs: Collection[str] = (),
    launches: bool = True,
    longest_s: float = CaptureSettings.longest_s,
    say: Callable[[str], None] = lambda line: None,
) -> Graph:
    """Record the dependency graph of one step of `workload`.

    The workload runs in a child process (one of live objects runs here). Its techniques are
    applied first, so that a transformed step can be profiled too.

    Args:
        workload: a `Workload`, or what `Workload.parse` takes.
        warmup: steps before anything is recorded.
        steps: profiled steps; each task keeps its minimum over them.
        threads: intra-op threads, 0 for what the workload sets.
        timeout_s: the child is stopped when it is silent for this long.
        needs: statistics to record besides, such as "regions" (see `Technique.needs`).
        launches: whether other launches of the program are watched for their page faults, see
            `slipstream.verbs.page_faults`.
        longest_s: how long `steps` may take, profiled and plain ones beside them; a slow step is
            recorded less often.
        say: called with a short line whenever there is progress.

    Raises:
        UnknownNameError: a statistic that cannot be recorded.
        WorkloadError: the user's code failed; names its file and line.
        ChildError: it hung, died, or ran out of memory.
        GraphError: its steps differ too much to be aligned.
    """
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("threads", threads, 0)):
        if value < least:
            raise InvalidArgumentError(name, f"{value} is less than {least}")
    for name in needs:
        if name not in STATISTICS:
            raise UnknownNameError("statistic", name, STATISTICS)
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    settings = CaptureSettings(
        warmup, steps, threads, tuple(sorted(set(needs))), longest_s=longest_s
    )
    if workload.live is not None:
        # Its heap is the caller's own, too.
        here = replace(settings, own_process=False)
        with without_chatter():
            return run_steps(workload.build(), capture(here, say))
    # As it was before the run: what changes meanwhile may not be what ran.
    source = describe_source(workload.path)
    with temporary_folder("graph") as folder:
        path = folder / "run.slipgraph"
        say(f"importing torch and {workload.path.name}")

        def record(settings: CaptureSettings) -> None:
            call_in_child(
                workload,
                "slipstream.verbs.profiling:profile_in_child",
                threads=threads,
                timeout_s=timeout_s,
                say=say,
                settings=asdict(settings),
                path=str(path),
            )

        try:
            record(settings)
        except ScriptEndedError as end:
            fewer = settings.within(end.available)
            if fewer is None:
                end.remedy = f"{end.remedy}: recording needs at least {MIN_STEPS + 3} steps"
                raise
            say(f"{end.ended}; running it again to record fewer steps")
            record(fewer)
        graph = load(path)
    if launches:
        graph = watch_launches(graph, workload, threads=threads, timeout_s=timeout_s, say=say)
    return replace(
        graph, meta={**graph.meta, "recipe": _recipe(workload, threads), "source": source}
    )


def _recipe(workload: Workload, threads: int) -> dict[str, Any] | None:
    """What was asked for, so that it can be asked for again; None with techniques on top."""
    if workload.techniques:
        return None
    return {
        "target": workload.target,
        "arguments": dict(workload.arguments),
        "script_arguments": list(workload.script_arguments),
        "threads": threads,
    }


def _by_operator(graph: Graph) -> list[tuple[str, str, int, float]]:
    """(phase, operator, how often, ns), the costliest first."""
    durations: dict[tuple[str, str], list[float]] = {}
    for number in range(len(graph)):
        task = graph.task(number)
        durations.setdefault((task.phase.name.lower(), task.name), []).append(task.duration_ns)
    rows = [(phase, name, len(times), sum(times)) for (phase, name), times in durations.items()]
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
    step_ns = replay(graph).step_ns
    operators = _by_operator(graph)
    rows: list[tuple[str, str, int | str, float]] = [
        (name.removeprefix("aten::"), phase, count, ns)
        for phase, name, count, ns in operators[:_TOP]
        if ns
    ]
    if rest := [row for row in operators[_TOP:] if row[3]]:
        calls, ns = sum(row[2] for row in rest), sum(row[3] for row in rest)
        rows.append((f"{len(rest)} others", "", calls, ns))
    rows.append(("Python, dispatch", "", "", float(graph.tasks.gap_ns.sum())))
    fields: tuple[Field[tuple[str, str, int | str, float]], ...] = (
        Field.of("operator", lambda row: row[0]),
        Field.of("phase", lambda row: row[1]),
        Field.number("calls", lambda row: row[2], optional=True),
        Field.number("time", lambda row: format_duration(row[3])),
        Field.number("share", lambda row: format_percent(row[3] / step_ns)),
    )
    title = f"{graph.meta['workload']}: {format_duration(step_ns)} per step" + (
        f" of {graph.samples} samples" if graph.samples else ""
    )
    return Table.of(rows, fields, title, _recorded(graph))


def _recorded(graph: Graph) -> list[str]:
    """How the step was recorded, and what is to be known of it; a line each."""
    meta: Any = graph.meta
    threads, cost_ns = meta["threads"], round(meta["profiler_ns_per_event"])
    notes = [
        f"{len(graph) - 1} operators, {threads} thread{'s' * (threads != 1)}, minimum over "
        f"{meta['aligned_steps']} step{'s' * (meta['aligned_steps'] != 1)}"
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
    if launches := launches_in_words(graph):
        notes.append(launches)
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
    return notes


def summary_json(graph: Graph, output: Path) -> dict[str, Any]:
    """The same for programs; times in nanoseconds."""
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


def _explained(error: GraphError) -> SlipstreamError:
    """The error; or that the disk was full, where a trace that torch wrote is cut for that."""
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free > _LEAST_FREE_BYTES:
        return error
    return WorkloadError(
        "the disk is full: what the profiler wrote is cut",
        where=folder,
        remedy="free some space, or name another folder for temporary files in TMPDIR",
    )


def profile_in_child(
    workload: dict[str, Any], keep_in: str, settings: dict[str, Any], path: str
) -> Any:
    """Capture the workload's step and write its graph to `path`. Runs in the child."""
    record = capture(CaptureSettings(**settings), tell)

    def program(built: Any) -> Any:
        try:
            graph = yield from record(built)
        except GraphError as error:
            raise _explained(error) from error
        save(graph, Path(path))
        return {"tasks": len(graph)}

    return run_program(workload, keep_in, program)
