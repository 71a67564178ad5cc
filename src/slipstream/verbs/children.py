"""Start child processes for workloads, and run user code inside them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.child import Child, Message, channel, end_descendants, exit_with
from slipstream.durations.durations import one_pool
from slipstream.measure.facts_machine import memory_limit
from slipstream.workload import BuiltWorkload, Workload, drive, file_backups

DEFAULT_TIMEOUT_S = 300.0
_MEMORY_SHARE = 0.95


@contextlib.contextmanager
def workload_child(workload: Workload, threads: int) -> Iterator[tuple[Child, Path]]:
    """Yield a child to build `workload` in, and a folder for its `keep_in`.

    Files that the user's code writes are restored however the child ends.
    """
    with (
        file_backups() as keep_in,
        Child(
            workload.name,
            environment=one_pool(threads),
            memory_limit_bytes=memory_limit_bytes(),
        ) as child,
    ):
        yield child, keep_in


def call_in_child(
    workload: Workload,
    function: str,
    *,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    until: float = math.inf,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Any], None] = lambda value: None,
    **arguments: Any,
) -> Any:
    """Call ``function(workload=..., keep_in=..., **arguments)`` in a fresh child.

    Args:
        function: ``module:name``, importable in the child.
        until: time of `time.monotonic` at which the child is killed.
        keep: called with each value that the child passes to `send_to_keep`.

    Raises:
        WorkloadError: the user's code failed; names its file and line.
        ChildError: the child died, was silent for `timeout_s`, or was still running at `until`.
    """
    with workload_child(workload, threads) as (child, keep_in):
        return child.call(
            function,
            timeout_s=timeout_s,
            until=until,
            on_message=lambda message: (
                keep(message["keep"]) if "keep" in message else report(str(message.get("say", "")))
            ),
            workload=workload.to_json(),
            keep_in=str(keep_in),
            **arguments,
        )


def memory_limit_bytes() -> int | None:
    """Return most of the memory available now; None with a GPU, which maps memory too."""
    import psutil

    if os.path.exists("/dev/nvidiactl"):
        return None
    return int(psutil.virtual_memory().available * _MEMORY_SHARE)


def room_bytes(mapped_bytes: int = 0) -> int | None:
    """Return the private memory a child can have, within the limits that it inherits from us.

    Args:
        mapped_bytes: address space that a child maps for its libraries; it counts towards
            ``RLIMIT_AS``.
    """
    import resource

    limits = [memory_limit_bytes()]
    for limit, used in ((resource.RLIMIT_DATA, 0), (resource.RLIMIT_AS, mapped_bytes)):
        soft, _ = resource.getrlimit(limit)
        limits.append(None if soft == resource.RLIM_INFINITY else max(soft - used, 1))
    group = memory_limit()
    limits.append(None if group is None else int(group * _MEMORY_SHARE))
    return min((limit for limit in limits if limit is not None), default=None)


# The functions below run in the child.


def run_program(
    workload: dict[str, Any],
    keep_in: str,
    program: Callable[[BuiltWorkload], Generator[None, Any, Any]],
    seed: int = 0,
    *,
    repeats: bool = False,
) -> Any:
    """Build the workload described by this JSON and run `program`; the result must be JSON.

    Args:
        repeats: whether a short script may run again, see `slipstream.workload.script.run_script`.
    """
    recipe = workload_of(workload)
    report_progress(f"running {recipe.name}" + " up to its second step" * (recipe.function is None))
    return drive(recipe, program, exit_with, keep_in=Path(keep_in), seed=seed, repeats=repeats)


def workload_of(value: dict[str, Any]) -> Workload:
    techniques = tuple(part for text in value["techniques"] for part in technique.parse(text))
    return Workload(
        value["target"], value["arguments"], tuple(value["script_arguments"]), techniques
    )


def report_progress(line: str) -> None:
    channel().send({"say": line})


def send_to_keep(value: Any) -> None:
    """Send a part of the result, as JSON, which the parent has even if this process is killed."""
    channel().send({"keep": value})


def calls() -> Iterator[Message]:
    """Yield the coordinator's requests; once it is gone, end this process and its descendants."""
    while True:
        try:
            message = channel().receive()
        except EOFError:
            end_descendants()
            os._exit(0)
        assert message is not None
        yield message
