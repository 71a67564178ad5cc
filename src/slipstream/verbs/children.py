"""User code runs here: how a verb starts a child for a workload, and what runs inside it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.child import Child, Message, channel, end_descendants, leave
from slipstream.durations.durations import one_pool
from slipstream.measure.facts_machine import memory_limit
from slipstream.workload import Built, Workload, drive, file_backups

DEFAULT_TIMEOUT_S = 300.0
_MEMORY_SHARE = 0.95


@contextlib.contextmanager
def workload_child(workload: Workload, threads: int) -> Iterator[tuple[Child, Path]]:
    """A child to build `workload` in, and a folder for its `keep_in`.

    However the child ends, what the user's code wrote is as before.
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
    say: Callable[[str], None] = lambda line: None,
    **arguments: Any,
) -> Any:
    """Call ``function(workload=..., keep_in=..., **arguments)`` in a fresh child.

    Args:
        function: ``module:name``, of what the child can import.
        until: of `time.monotonic`, when the child is killed.

    Raises:
        WorkloadError: the user's code failed; names its file and line.
        ChildError: it died, was silent for `timeout_s`, or was not done at `until`.
    """
    with workload_child(workload, threads) as (child, keep_in):
        return child.call(
            function,
            timeout_s=timeout_s,
            until=until,
            on_message=lambda message: say(str(message.get("say", ""))),
            workload=workload.to_json(),
            keep_in=str(keep_in),
            **arguments,
        )


def memory_limit_bytes() -> int | None:
    """What a child may allocate: most of what is free now. None where a GPU maps memory too."""
    import psutil

    if os.path.exists("/dev/nvidiactl"):
        return None
    return int(psutil.virtual_memory().available * _MEMORY_SHARE)


def room_bytes(mapped_bytes: int = 0) -> int | None:
    """Private memory that a child can have: `memory_limit_bytes`, or less under a limit of ours.

    Limits of this process are its children's, too.

    Args:
        mapped_bytes: address space that a child takes for its libraries; a limit on all of it
            (``RLIMIT_AS``) leaves that much less.
    """
    import resource

    limits = [memory_limit_bytes()]
    for limit, taken in ((resource.RLIMIT_DATA, 0), (resource.RLIMIT_AS, mapped_bytes)):
        soft, _ = resource.getrlimit(limit)
        limits.append(None if soft == resource.RLIM_INFINITY else max(soft - taken, 1))
    group = memory_limit()
    limits.append(None if group is None else int(group * _MEMORY_SHARE))
    return min((one for one in limits if one is not None), default=None)


# What follows runs in the child.


def run_program(
    workload: dict[str, Any],
    keep_in: str,
    program: Callable[[Built], Generator[None, Any, Any]],
    seed: int = 0,
    *,
    repeats: bool = False,
) -> Any:
    """Build the workload of this JSON and run `program` over it; the result must be JSON.

    Args:
        repeats: whether a short script may run again, see `slipstream.workload.script.run_script`.
    """
    recipe = workload_of(workload)
    say(f"running {recipe.name}" + " up to its second step" * (recipe.function is None))
    return drive(recipe, program, leave, keep_in=Path(keep_in), seed=seed, repeats=repeats)


def workload_of(value: dict[str, Any]) -> Workload:
    """The workload that `Workload.to_json` described."""
    techniques = tuple(one for text in value["techniques"] for one in technique.parse(text))
    return Workload(
        value["target"], value["arguments"], tuple(value["script_arguments"]), techniques
    )


def say(line: str) -> None:
    """Tell the person how far the child is."""
    channel().send({"say": line})


def calls() -> Iterator[Message]:
    """What the coordinator asks for; when it is gone, this process ends and all it started."""
    while True:
        try:
            message = channel().receive()
        except EOFError:
            end_descendants()
            os._exit(0)
        assert message is not None
        yield message
