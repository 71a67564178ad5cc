"""profile: run the user's step a few times and record its graph."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.capture import STATISTICS, CaptureSettings, capture
from slipstream.errors import (
    GraphError,
    InvalidArgumentError,
    SlipstreamError,
    UnknownNameError,
    WorkloadError,
)
from slipstream.graph import Graph, load, save
from slipstream.graph.origin import describe_source
from slipstream.verbs._chatter import without_chatter
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.verbs.children import say as tell
from slipstream.workload import Workload, drive

_LEAST_FREE_BYTES = 1 << 20


def profile(
    workload: Workload | str,
    *,
    warmup: int = 3,
    steps: int = 24,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    needs: Collection[str] = (),
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
    settings = CaptureSettings(warmup, steps, threads, tuple(sorted(set(needs))))
    if workload.live is not None:
        # Its heap is the caller's own, too.
        here = replace(settings, own_process=False)
        with without_chatter():
            return drive(workload, capture(here, say), _never, keep_in=Path())
    # As it was before the run: what changes meanwhile may not be what ran.
    source = describe_source(workload.path)
    with tempfile.TemporaryDirectory(prefix="slipstream-graph-") as folder:
        path = Path(folder) / "run.slipgraph"
        say(f"importing torch and {workload.path.name}")
        call_in_child(
            workload,
            "profiling:profile_in_child",
            threads=threads,
            timeout_s=timeout_s,
            say=say,
            settings=asdict(settings),
            path=str(path),
        )
        graph = load(path)
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


def _never(graph: Graph) -> Any:
    raise WorkloadError("a workload of live objects does not end its process")


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
