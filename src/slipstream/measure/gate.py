"""Classify whether the machine is fit for measurements: green, amber or red, with reasons.

Uses Linux counters since the previous reading: CPU pressure (time in which tasks waited for a
core), load, involuntary context switches of this process, time stolen by a hypervisor, cgroup
throttling and, if available, clock frequency and temperature. `Reading.unreadable` lists values
that could not be read.

Red does not stop a run. Paired blocks hold their level on a busy machine, but take longer.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Level(StrEnum):
    """Fitness for measurements: fit, disturbed, or hardly usable."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"


@dataclass(frozen=True)
class Reading:
    """One reading of the machine's state.

    Attributes:
        reasons: One line per value that is not green.
        values: Values by name, in the unit that the name ends with.
        unreadable: Names of values that this system does not provide.
    """

    level: Level
    reasons: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Limit:
    """Thresholds for amber and red, and the message.

    The thresholds separate states measured on a two-core virtual machine: idle, with an editor and
    a browser (amber), and with one other busy process per core (red).
    """

    amber: float
    red: float
    text: str


_LIMITS = {
    "pressure_percent": _Limit(15, 50, "tasks waited for a core {0:.0f} % of the last 10 s"),
    "load_per_core": _Limit(1.5, 3, "load average is {0:.1f} per core"),
    "preemptions_per_s": _Limit(50, 250, "this process lost its core {0:.0f} times per second"),
    "steal_percent": _Limit(1, 5, "the hypervisor took {0:.1f} % of the cores' time"),
    "throttled_percent": _Limit(0.1, 5, "the cgroup's quota throttled {0:.1f} % of periods"),
    "slowed_percent": _Limit(15, 40, "cores run {0:.0f} % below their maximum frequency"),
    "heat_percent": _Limit(92, 98, "a sensor is at {0:.0f} % of its critical temperature"),
}


class Gate:
    """Reader of the machine's state; each reading covers the time since the previous one."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._cgroup = _cgroup_stat()
        self._before: dict[str, float] = {}
        self._sample_counters()

    def read(self) -> Reading:
        """Read and classify the machine's state; takes about 0.2 ms."""
        values: dict[str, float] = {}
        sources: dict[str, Callable[[], float | None]] = {
            "pressure_percent": _pressure,
            "load_per_core": lambda: os.getloadavg()[0] / (os.cpu_count() or 1),
            "slowed_percent": _slowed,
            "heat_percent": _heat,
        }
        for name, source in sources.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if (value := source()) is not None:
                    values[name] = value
        unreadable = sorted(sources.keys() - values.keys())
        rates, missing = self._rates()
        values |= rates
        unreadable += missing
        level, reasons = Level.GREEN, []
        for name, limit in _LIMITS.items():
            value = values.get(name, -math.inf)
            if value < limit.amber:
                continue
            reasons.append(limit.text.format(value))
            level = Level.RED if value >= limit.red or level is Level.RED else Level.AMBER
        return Reading(level, tuple(reasons), values, tuple(sorted(unreadable)))

    def _sample_counters(self) -> dict[str, float]:
        now = {"time": time.monotonic()}
        for counters in (_preemptions, _processor_ticks, self._throttling):
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError, ImportError):
                now |= counters()
        before, self._before = self._before, now
        return before

    def _throttling(self) -> dict[str, float]:
        if self._cgroup is None:
            return {}
        rows = dict(line.split()[:2] for line in self._cgroup.read_text().splitlines())
        return {"periods": float(rows["nr_periods"]), "throttled": float(rows["nr_throttled"])}

    def _rates(self) -> tuple[dict[str, float], list[str]]:
        before = self._sample_counters()
        now = self._before
        rates: dict[str, float] = {}
        spans = {
            "preemptions_per_s": ("preemptions", "time", 1.0),
            "steal_percent": ("steal", "ticks", 100.0),
            "throttled_percent": ("throttled", "periods", 100.0),
        }
        for name, (count, per, scale) in spans.items():
            if {count, per} <= before.keys() & now.keys():
                passed = now[per] - before[per]
                rates[name] = scale * (now[count] - before[count]) / passed if passed > 0 else 0.0
        return rates, sorted(spans.keys() - rates.keys())


def busy_in_words() -> str:
    """Describe how busy this machine was in the last seconds; empty unless red.

    Uses the values that need only one reading: pressure, or else the load.
    """
    values = Gate().read().values
    for name in ("pressure_percent", "load_per_core"):
        if (value := values.get(name)) is not None:
            return _LIMITS[name].text.format(value) if value >= _LIMITS[name].red else ""
    return ""


def _pressure() -> float | None:
    first = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return float(first.split("avg10=")[1].split()[0])


def _preemptions() -> dict[str, float]:
    import resource

    return {"preemptions": float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)}


def _processor_ticks() -> dict[str, float]:
    # user nice system idle iowait irq softirq steal; user includes guest time.
    ticks = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return {"steal": ticks[7], "ticks": sum(ticks)}


def _cgroup_stat() -> Path | None:
    """Return the file with this cgroup's throttling counters, v2 or v1."""
    paths = [Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, group = line.split(":", 2)
            if number == "0":
                paths.insert(0, Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.stat")
    for path in paths:
        with contextlib.suppress(OSError):
            if "nr_throttled" in path.read_text():
                return path
    return None


def _slowed() -> float | None:
    """Return how far the slowest core runs below its maximum frequency, in percent."""
    worst = None
    for core in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        now = float((core / "scaling_cur_freq").read_text())
        maximum = float((core / "cpuinfo_max_freq").read_text())
        worst = max(worst or 0.0, 100 * (1 - now / maximum))
    return worst


def _heat() -> float | None:
    """Return the hottest zone's temperature in percent of its critical trip point."""
    worst = None
    for zone in Path("/sys/class/thermal").glob("thermal_zone*"):
        for trip in zone.glob("trip_point_*_type"):
            if trip.read_text().strip() != "critical":
                continue
            limit = float(trip.with_name(trip.name.replace("_type", "_temp")).read_text())
            if limit > 0:
                worst = max(worst or 0.0, 100 * float((zone / "temp").read_text()) / limit)
    return worst


@dataclass(frozen=True)
class Fitness:
    """Resolution of measurements on this machine in its current state.

    Attributes:
        reading: Gate reading over the probe.
        seconds: Budget that `wall` and `cpu` refer to.
        wall, cpu: Smallest relative difference found with 80 % power within `seconds`.
        blocks: Paired blocks of 10 ms samples that fit the budget.
    """

    reading: Reading
    seconds: float
    wall: float
    cpu: float
    blocks: int


def detectable_change(
    seconds: float = 60.0, *, probe_s: float = 2.0, level: float = 0.95
) -> Fitness:
    """Compare a fixed single-threaded workload with itself, and extrapolate to `seconds`.

    The interquartile range of the paired ratios, which determines the interval of the median,
    gives the width that all blocks of the budget would reach.
    """
    import numpy as np

    from slipstream.measure.arms import REPEATED_SAMPLE_NS, time_calls
    from slipstream.measure.sequential import nominal_error
    from slipstream.measure.statistics import critical_value, detectable_difference

    gate = Gate()
    inner, elapsed_ns = 1, 0
    while elapsed_ns < REPEATED_SAMPLE_NS:
        inner *= 2
        elapsed_ns = time_calls(_probe, inner).wall
    rows: list[tuple[int, int, int, int]] = []
    start = time.monotonic()
    # At least eight blocks, so that the spread can be estimated on a very slow machine.
    while time.monotonic() - start < probe_s or len(rows) < 8:
        a, b = time_calls(_probe, inner), time_calls(_probe, inner)
        rows.append((a.wall, a.cpu, b.wall, b.cpu))
    block_s = (time.monotonic() - start) / len(rows)
    values = np.log(np.asarray(rows, np.float64))
    blocks = max(8, round(seconds / block_s))
    looks = tuple(10 * 2**k for k in range(8))
    error = nominal_error(blocks, looks, 1 - level, at_planned_look=False)
    detectable_in = {}
    for name, first in (("wall", 0), ("cpu", 1)):
        ratio = values[:, first] - values[:, first + 2]
        low, high = np.quantile(ratio, [0.25, 0.75])
        # For normal noise: deviation = IQR / 1.349; the median's is 1.2533 / sqrt(n) of that.
        deviation = float(high - low) / 1.349 * 1.2533 / math.sqrt(blocks)
        half = deviation * critical_value(1 - error)
        detectable_in[name] = detectable_difference(half, 1 - error)
    return Fitness(gate.read(), seconds, **detectable_in, blocks=blocks)


def _probe() -> int:
    total = 0
    for i in range(2000):
        total += i * i
    return total
