"""profile: run the user's step a few times and record its graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.capture import STATISTICS, CaptureSettings, capture
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Graph, load, save
from slipstream.verbs._children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.verbs._children import say as tell
from slipstream.workload import Workload, drive


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
    if isinstance(workload, str):
        workload = Workload.parse(workload)
    settings = CaptureSettings(warmup, steps, threads, tuple(sorted(set(needs))))
    if workload.live is not None:
        return drive(workload, capture(settings, say), _never, keep_in=Path())
    with tempfile.TemporaryDirectory(prefix="slipstream-graph-") as folder:
        path = Path(folder) / "run.slipgraph"
        say("importing")
        call_in_child(
            workload,
            "_profile:profile_in_child",
            threads=threads,
            timeout_s=timeout_s,
            say=say,
            settings=asdict(settings),
            path=str(path),
        )
        return load(path)


def _never(graph: Graph) -> Any:
    raise WorkloadError("a workload of live objects does not end its process")


def profile_in_child(
    workload: dict[str, Any], keep_in: str, settings: dict[str, Any], path: str
) -> Any:
    """Capture the workload's step and write its graph to `path`. Runs in the child."""
    record = capture(CaptureSettings(**settings), tell)

    def program(built: Any) -> Any:
        graph = yield from record(built)
        save(graph, Path(path))
        return {"tasks": len(graph)}

    return run_program(workload, keep_in, program)
