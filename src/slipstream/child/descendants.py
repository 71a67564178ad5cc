"""Find, inspect and kill the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def end_group(pid: int) -> None:
    """Kill the process group that `pid` leads; the process must not have been waited for yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> list[Any]:
    """Return the running descendants of `pid`."""
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def end(processes: list[Any]) -> None:
    """Kill the processes; those that have exited are ignored."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def is_suspended(pid: int) -> bool:
    """Whether the process is suspended, for instance by SIGSTOP, and not by a debugger."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
