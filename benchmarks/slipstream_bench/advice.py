"""Time of `slipstream advise`, run as a separate command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import psutil

from slipstream.errors import MeasurementError

SLIPSTREAM = [sys.executable, "-c", "from slipstream.cli import main; main()"]
_FIRST, _BASELINE, _ERROR = "first look at ", "baseline: ", "error: "
# Printed every few seconds until the first step.
_BUILDING = ("advising: importing ", "advising: running ")


@dataclass(frozen=True)
class AdviceTimes:
    """Times of an advise command with empty caches.

    Attributes:
        building_s: wall time until the last message that the workload is being built, at most a
            few seconds before its first step.
        first_s, final_s: wall time until the first and the final table.
        cpu_s: CPU time of the command and its child processes.
        step: what advise prints about the unchanged step.
    """

    building_s: float
    first_s: float
    final_s: float
    cpu_s: float
    step: str


def time_advice(target: str, folder: str, *options: str) -> AdviceTimes:
    """Time ``slipstream advise TARGET`` in `folder`, with nothing cached.

    Raises:
        MeasurementError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as cache:
        before, begin = children_s(), time.perf_counter()
        process = subprocess.Popen(
            [*SLIPSTREAM, "advise", target, *options],
            cwd=folder,
            env={**os.environ, "XDG_CACHE_HOME": cache, "COLUMNS": "200"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        building, first, step, message = 0.0, float("nan"), "", ""
        with process:
            for line in process.stderr or ():
                # The line after the error is the remedy.
                message = message if message.startswith(_ERROR) else line
                if line.startswith(_BUILDING):
                    building = time.perf_counter() - begin
                elif line.startswith(_FIRST):
                    first = time.perf_counter() - begin
                elif line.startswith(_BASELINE):
                    step = line.removeprefix(_BASELINE).strip()
        if process.returncode or not step:
            raise MeasurementError(f"advise failed: {message.strip()}")
        return AdviceTimes(
            building, first, time.perf_counter() - begin, children_s() - before, step
        )


def children_s() -> float:
    """Return the CPU time of all child processes that have ended, in seconds."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)
