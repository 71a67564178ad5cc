"""Other work on the devices that layers of a burst leave idle."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child, channel
from slipstream.errors import InvalidArgumentError

_LOWEST = 19
_LIMIT_S = 60.0


@dataclass
class BackgroundWork:
    """Number and time of calls in the background; zero until the block ends.

    Attributes:
        calls: number of calls that ended.
        elapsed_s: from the first call to the end of the last one.
    """

    calls: int = 0
    elapsed_s: float = 0.0


@contextlib.contextmanager
def background(function: str, **arguments: Any) -> Iterator[BackgroundWork]:
    """Call a function again and again in the block, in a process that only gets idle cores.

    A first call ends before the block begins, so that it can load what the others use.

    The process may use the cores of this one, on one thread. Linux runs it only while no other
    process wants the core; elsewhere it has the lowest priority. It shares caches and memory
    bandwidth, so calls should be short of memory traffic.

    Args:
        function: an importable ``module:function``.
        arguments: of each call, as JSON.

    Raises:
        InvalidArgumentError: `function` is not ``module:function``, or an argument is not JSON.
        SlipstreamError: the function raised an error; after the first call, at the end.
    """
    if not all(function.partition(":")):
        raise InvalidArgumentError(
            "function", f"'{function}' is not a module and a function",
            remedy="for example my_package.evaluation:one_batch",
        )  # fmt: skip
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("arguments", f"they are not JSON: {error}") from error
    # The module may be next to the script.
    paths = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    work = BackgroundWork()
    with Child("the background work", environment={"OMP_NUM_THREADS": "1", **paths}) as child:
        child.start_call(f"{__name__}:repeat", called=function, arguments=arguments)
        child.receive()
        yield work
        # While others use its cores, it would not stop.
        _schedule(child.pid, idle=False)
        child.send({"stop": True})
        work.calls, work.elapsed_s = child.finish_call(timeout_s=_LIMIT_S)


def repeat(called: str, arguments: dict[str, Any]) -> tuple[int, float]:
    """Call a function until a message arrives; return the number of calls and their seconds."""
    module, _, name = called.partition(":")
    call = getattr(importlib.import_module(module), name)
    call(**arguments)
    channel().send({"ready": True})
    _schedule(os.getpid(), idle=True)
    calls, began = 0, time.perf_counter()
    while channel().receive(timeout_s=0.0) is None:
        call(**arguments)
        calls += 1
    return calls, time.perf_counter() - began


def _schedule(pid: int, *, idle: bool) -> None:
    """Let a process run only on idle cores, or end that as far as permitted."""
    priority = _LOWEST if idle else 0
    steps = (
        lambda: os.setpriority(os.PRIO_PROCESS, pid, priority),
        # Linux gives every session an equal share otherwise.
        lambda: Path(f"/proc/{pid}/autogroup").write_text(str(priority), encoding="utf-8"),
        lambda: os.sched_setscheduler(
            pid, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0)
        ),
    )
    for step in steps:
        with contextlib.suppress(AttributeError, OSError):
            step()
