"""How long `slipstream advise` keeps a person waiting, as a command of its own."""

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
# Before the first step; said every few seconds.
_BUILDING = ("advising: importing ", "advising: running ")


@dataclass(frozen=True)
class AdviceTimes:
    """What a person waits for who has never asked on this machine.

    Attributes:
        building_s: seconds of wall time until the workload was last heard to be built, at most a
            few before its first step.
        first_s, final_s: to the first and to the final table.
        cpu_s: processor seconds of the command and all that it started.
        step: what advise says of the step as it is.
    """

    building_s: float
    first_s: float
    final_s: float
    cpu_s: float
    step: str


def time_advice(target: str, folder: str, *options: str) -> AdviceTimes:
    """Time ``slipstream advise TARGET`` in `folder`, with nothing cached.

    Raises:
        MeasurementError: it failed.
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
        building, first, step, said = 0.0, float("nan"), "", ""
        with process:
            for line in process.stderr or ():
                # Behind the error stands what to do.
                said = said if said.startswith(_ERROR) else line
                if line.startswith(_BUILDING):
                    building = time.perf_counter() - begin
                elif line.startswith(_FIRST):
                    first = time.perf_counter() - begin
                elif line.startswith(_BASELINE):
                    step = line.removeprefix(_BASELINE).strip()
        if process.returncode or not step:
            raise MeasurementError(f"advise failed: {said.strip()}")
        return AdviceTimes(
            building, first, time.perf_counter() - begin, children_s() - before, step
        )


def children_s() -> float:
    """Return the CPU time of all child processes that have ended, in seconds."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)
