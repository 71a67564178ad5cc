"""Record the user's step for a live analysis: first numbers early, the whole a little later.

Everything here runs in a child process that ends with the recording.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from slipstream.capture import CaptureSettings, capture
from slipstream.child import channel, is_user_file
from slipstream.graph import Graph, save
from slipstream.live.costs import costs
from slipstream.verbs.children import run_program
from slipstream.verbs.children import say as tell


def record(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    steps: int,
    root: str,
    first: str,
    whole: str,
) -> dict[str, Any]:
    """Record one step of the workload: the user's ``files`` that took part, and its ``costs``.

    The same of one step is sent as soon as it is known, and ``{"first": ...}`` when its recording
    is written.

    Args:
        root: the folder that lines are named from.
        first, whole: where the recordings go.
    """
    brief = CaptureSettings.first_look(threads)
    full = CaptureSettings(0, steps, threads)

    def found(graph: Graph) -> dict[str, Any]:
        return {"files": _users_files(), "costs": costs(graph, Path(root)).to_json()}

    def program(built: Any) -> Generator[None, Any, Any]:
        if steps > 1:
            graph = yield from capture(brief)(built)
            channel().send(found(graph))
            save(graph, Path(first))
            channel().send({"first": first})
        graph = yield from capture(full, tell)(built)
        save(graph, Path(whole))
        return found(graph)

    answer: dict[str, Any] = run_program(workload, keep_in, program)
    return answer


def _users_files() -> list[str]:
    """Absolute paths of the user's modules."""
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return sorted(
        {
            str(Path(path).resolve())
            for path in paths
            if isinstance(path, str) and path.endswith(".py") and is_user_file(path)
        }
    )
