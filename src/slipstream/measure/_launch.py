"""Run one command in a fresh process and measure its resources, from a small launcher process.

A process inherits the peak memory of the process that forked it, which is large with NumPy
imported. This module does not import NumPy, so that `wait4` reports the command's own peak.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from textwrap import indent
from typing import IO, Any

from slipstream.errors import MeasurementError

_TAIL_BYTES = 2000
_output: IO[bytes] | None = None


def run(words: list[str], directory: str | None, environment: dict[str, str]) -> dict[str, Any]:
    """Return wall, CPU (with children) and run-queue delay in ns, and peak memory in bytes.

    Raises:
        MeasurementError: The command was not found or did not exit with status 0.
    """
    global _output
    if _output is None:
        _output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process exits
    _output.seek(0)
    _output.truncate()
    start_ns = time.perf_counter_ns()
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=_output,
            stderr=_output,
            cwd=directory,
            env={**os.environ, **environment},
        )
    except OSError as error:
        raise MeasurementError(
            f"'{words[0]}' could not be started: {error.strerror}",
            remedy="check the spelling and PATH; run the command alone in this directory first",
        ) from None
    delay_ns = None
    if hasattr(os, "waitid"):
        # Wait without reaping, so that the run-queue delay can still be read.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        wall_ns = time.perf_counter_ns() - start_ns
        delay_ns = _run_delay_ns(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
    else:
        _, status, usage = os.wait4(process.pid, 0)
        wall_ns = time.perf_counter_ns() - start_ns
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise MeasurementError(
            f"the command exited with status {process.returncode}" + _tail(_output),
            remedy="make it succeed outside the comparison first: " + " ".join(words),
        )
    sample: dict[str, Any] = {
        "wall": wall_ns,
        "cpu": round((usage.ru_utime + usage.ru_stime) * 1e9),
        "peak_memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    if delay_ns is not None:
        sample["run_delay"] = delay_ns
    return sample


def _run_delay_ns(pid: int) -> int | None:
    with (
        contextlib.suppress(OSError, IndexError, ValueError),
        open(f"/proc/{pid}/schedstat") as file,
    ):
        return int(file.read().split()[1])
    return None


def _tail(output: IO[bytes]) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return "; its last output was:\n" + indent("\n".join(lines[-15:]), "    ") if lines else ""
