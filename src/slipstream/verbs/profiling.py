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
from slipstream.graph.origin import describe_source, evaluation_note, long_steps_note, loop_note
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent
from slipstream.verbs._chatter import without_chatter
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, report_progress, run_program
from slipstream.verbs.page_faults import launches_in_words, watch_launches
from slipstream.workload import Workload, run_steps
from slipstream.workload.script import ScriptEndedError

_MIN_FREE_BYTES = 1 << 20
# Maximum operators in a summary.
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
    time_limit_s: float = CaptureSettings.time_limit_s,
    report: Callable[[str], None] = lambda line: None,
) -> Graph:
    """Record the dependency graph of one step of `workload`.

    The workload runs in a child process, except one of live objects, which runs in this process.
    Its techniques are applied first, so a transformed step can be profiled too.

    Args:
        workload: a `Workload`, or a target as for `Workload.parse`.
        warmup: steps before recording starts.
        steps: profiled steps; each task keeps its minimum over them.
        threads: intra-op threads, 0 for the workload's setting.
        timeout_s: the child is stopped after this many seconds of silence.
        needs: additional statistics to record, such as "regions" (see `Technique.needs`).
        launches: whether to watch other launches of the program for page faults, see
            `slipstream.verbs.page_faults`.
        time_limit_s: time limit in seconds of the profiled steps and the plain ones run with them;
            fewer steps of a slow workload are recorded.
        report: called with a short line of progress.

    Raises:
        UnknownNameError: a statistic that cannot be recorded.
        WorkloadError: the user's code failed; names its file and line.
        ChildError: the child hung, died or ran out of memory.
        GraphError: the steps differ too much to be aligned.
    """
    for name, value, minimum in (
        ("steps", steps, 1),
        ("warmup", warmup, 0),
        ("threads", threads, 0),
    ):
        if value < minimum:
            raise InvalidArgumentError(name, f"{value} is less than {minimum}")
    for name in needs:
        if name not in STATISTICS:
            raise UnknownNameError("statistic", name, STATISTICS)
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    settings = CaptureSettings(
        warmup, steps, threads, tuple(sorted(set(needs))), time_limit_s=time_limit_s
    )
    if workload.live is not None:
        # Its heap is the caller's own, so launches cannot be compared.
        in_process = replace(settings, own_process=False)
        with without_chatter():
            return run_steps(workload.build(), capture(in_process, report))
    # Described before the run: a file that changes during it is not the one that ran.
    source = describe_source(workload.path)
    with temporary_folder("graph") as folder:
        path = folder / "run.slipgraph"
        report(f"importing torch and {workload.path.name}")

        def record(settings: CaptureSettings) -> None:
            call_in_child(
                workload,
                "slipstream.verbs.profiling:profile_in_child",
                threads=threads,
                timeout_s=timeout_s,
                report=report,
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
            report(f"{end.ended}; running it again to record fewer steps")
            record(fewer)
        graph = load(path)
    if launches:
        graph = watch_launches(graph, workload, threads=threads, timeout_s=timeout_s, report=report)
    return replace(
        graph, meta={**graph.meta, "recipe": _recipe(workload, threads), "source": source}
    )


def _recipe(workload: Workload, threads: int) -> dict[str, Any] | None:
    """Return the request that recorded the workload; None with techniques applied."""
    if workload.techniques:
        return None
    return {
        "target": workload.target,
        "arguments": dict(workload.arguments),
        "script_arguments": list(workload.script_arguments),
        "threads": threads,
    }


def _by_operator(graph: Graph) -> list[tuple[str, str, int, float]]:
    """Return (phase, operator, calls, ns) rows, the costliest first."""
    durations: dict[tuple[str, str], list[float]] = {}
    for number in range(len(graph)):
        task = graph.task(number)
        durations.setdefault((task.phase.name.lower(), task.name), []).append(task.duration_ns)
    rows = [(phase, name, len(times), sum(times)) for (phase, name), times in durations.items()]
    return sorted(rows, key=lambda row: -row[3])


def _already(meta: Any) -> str:
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
    """Describe what the step runs on and how close the simulation is to the plain step."""
    meta: Any = graph.meta
    scale = meta["residual_scale"]
    if meta["lanes_of"] == "cpu":
        return (
            f"it runs on {len(graph.lanes)} threads; with contention among them it takes "
            f"{scale:.2f} times what its operators take undisturbed"
        )
    device = meta.get("device_name", "a CUDA device")
    return (
        f"it runs on {device}: {', '.join(graph.lanes)}; the simulation takes "
        f"{format_percent(1 / scale)} of the plain step's time"
    )


def summary(graph: Graph) -> Table:
    step_ns = replay(graph).step_ns
    operators = _by_operator(graph)
    rows: list[tuple[str, str, int | str, float]] = [
        (name.removeprefix("aten::"), phase, count, ns)
        for phase, name, count, ns in operators[:_TOP]
        if ns
    ]
    if others := [row for row in operators[_TOP:] if row[3]]:
        calls, ns = sum(row[2] for row in others), sum(row[3] for row in others)
        rows.append((f"{len(others)} others", "", calls, ns))
    rows.append(("Python, dispatch", "", "", float(graph.tasks.gap_ns.sum())))
    fields: tuple[Field[tuple[str, str, int | str, float]], ...] = (
        Field.of("operator", lambda row: row[0]),
        Field.of("phase", lambda row: row[1]),
        Field.number("calls", lambda row: row[2], optional=True),
        Field.number("time", lambda row: format_duration(row[3])),
        Field.number("share", lambda row: format_percent(row[3] / step_ns)),
    )
    title = f"{graph.meta['workload']}: {format_duration(step_ns)} per step" + (
        f" of {graph.samples} sample{'s' * (graph.samples > 1)}" if graph.samples else ""
    )
    return Table.of(rows, fields, title, _recorded(graph))


def _recorded(graph: Graph) -> list[str]:
    """Describe how the step was recorded and what limits the recording; a line each."""
    meta: Any = graph.meta
    threads, cost_ns = meta["threads"], round(meta["profiler_ns_per_event"])
    notes = [
        f"{len(graph) - 1} operators, {threads} thread{'s' * (threads != 1)}, minimum over "
        f"{meta['aligned_steps']} step{'s' * (meta['aligned_steps'] != 1)}"
        + (f"; {cost_ns} ns per event subtracted for the profiler" if cost_ns else ""),
    ]
    if "lanes_of" in meta:
        notes.append(_lanes(graph))
    if off_thread := meta.get("elsewhere"):
        notes.append(
            f"{off_thread['operators']} operators ran on other threads, "
            f"{format_percent(off_thread['share'])} of all; they are not in the graph"
        )
    notes += filter(None, (evaluation_note(graph), loop_note(graph), long_steps_note(graph)))
    if reads := meta.get("reads"):
        notes.append(
            f"loading a batch waits {format_duration(reads['waiting_ns'])} for "
            f"{_files(reads['per_batch'])}, "
            + (f"in {reads['workers']} workers" if reads["workers"] else "in the step's process")
        )
    if already := _already(meta):
        notes.append(f"already in use: {already}")
    if meta.get("unaligned_share"):
        share = format_percent(meta["unaligned_share"])
        notes.append(f"the steps differ: {share} of their operators do not occur in every step")
    if launches := launches_in_words(graph):
        notes.append(launches)
    if reason := meta.get("memory_reason"):
        notes.append(f"memory was not recorded: {reason}")
    if meta["contended"]:
        # On one thread, CPU time shows what the step takes undisturbed.
        hint = (
            "; its threads waited for cores, which the times include: --threads 1 is affected less"
            if threads > 1 and meta.get("device", "cpu") == "cpu"
            else ""
        )
        wall = format_duration(meta["step_ns"]["wall_median"])
        notes.append(f"the machine was busy: the median step took {wall} of wall time" + hint)
    return notes


def _files(per_batch: float) -> str:
    """Describe how many files a batch opens, such as "4 files"."""
    if per_batch < 1:
        return f"files, one per {1 / per_batch:.3g} batches"
    return f"{per_batch:.3g} file{'s' * (per_batch != 1)}"


def summary_json(graph: Graph, output: Path) -> dict[str, Any]:
    """Return the JSON payload; times in nanoseconds."""
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
    """Return the error, or a full disk as its cause, which truncates torch's trace."""
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free > _MIN_FREE_BYTES:
        return error
    return WorkloadError(
        "the disk is full, so the profiler's trace is truncated",
        where=folder,
        remedy="free some space, or set TMPDIR to another folder for temporary files",
    )


def profile_in_child(
    workload: dict[str, Any], keep_in: str, settings: dict[str, Any], path: str
) -> Any:
    """Capture the workload's step and write its graph to `path`. Runs in the child."""
    from slipstream.engines.storage.reading import FetchLog, with_reads

    record = capture(CaptureSettings(**settings), report_progress)
    log = Path(path).with_suffix(".fetches")
    FetchLog(log)

    def program(built: Any) -> Any:
        try:
            graph = with_reads((yield from record(built)), log)
        except GraphError as error:
            raise _explained(error) from error
        save(graph, Path(path))
        return {"tasks": len(graph)}

    return run_program(workload, keep_in, program)
