"""Processes that a process started, and theirs: found, inspected and ended."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def end_group(pid: int) -> None:
    """Kill the process and its group; it must be the leader, and not collected yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> list[Any]:
    """Every living process that `pid` started, and theirs."""
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def end(processes: list[Any]) -> None:
    """Kill them; one that is gone already is none."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def is_suspended(pid: int) -> bool:
    """Whether the process is suspended by SIGSTOP or its like, and not by a debugger."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
