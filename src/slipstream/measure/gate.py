"""Is this machine fit to measure on right now: green, amber or red, with reasons.

Read from Linux's counters since the previous reading: pressure (time somebody waited for a
core), load, involuntary context switches of this process, time stolen by a hypervisor, cgroup
throttling, and, where there are sensors, clock frequency and temperature. What cannot be read is
named in `Reading.unreadable`, never guessed.

Red does not stop a run. Paired blocks hold their level on a busy machine; they only need more
time. The colour says why.
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
    """Fit, disturbed, or hardly usable."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"


@dataclass(frozen=True)
class Reading:
    """One look at the machine.

    Attributes:
        reasons: one line for each thing that is not green.
        values: what was read, by name, in the unit the name ends with.
        unreadable: names of what this system does not tell.
    """

    level: Level
    reasons: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Limit:
    """From which value on something is amber, from which red, and how to say it.

    The thresholds separate what was measured on a two-core virtual machine: at rest, with an
    editor and a browser (amber), and with one busy process a core beside the arms (red).
    """

    amber: float
    red: float
    text: str


_LIMITS = {
    "pressure_percent": _Limit(15, 50, "somebody waited for a core {0:.0f} % of the last 10 s"),
    "load_per_core": _Limit(1.5, 3, "load average is {0:.1f} a core"),
    "preemptions_per_s": _Limit(50, 250, "this process lost its core {0:.0f} times a second"),
    "steal_percent": _Limit(1, 5, "the hypervisor took {0:.1f} % of the cores' time"),
    "throttled_percent": _Limit(0.1, 5, "the cgroup's quota throttled {0:.1f} % of periods"),
    "slowed_percent": _Limit(15, 40, "cores run {0:.0f} % below their highest frequency"),
    "heat_percent": _Limit(92, 98, "a sensor is at {0:.0f} % of its critical temperature"),
}


class Gate:
    """Reads the machine; each reading covers the time since the one before."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._cgroup = _cgroup_stat()
        self._before: dict[str, float] = {}
        self._sample_counters()

    def read(self) -> Reading:
        """Judge the machine now. Costs about 0.2 ms."""
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
    """How busy this machine has been for the last seconds; empty unless it is red.

    Of what needs no time between two readings: pressure, or the load where that is not told.
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
    # user nice system idle iowait irq softirq steal; guest time is inside user already.
    ticks = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return {"steal": ticks[7], "ticks": sum(ticks)}


def _cgroup_stat() -> Path | None:
    """The file with our cgroup's throttling counters, version 2 or 1."""
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
    """By how much the slowest core is below its highest frequency, in percent."""
    worst = None
    for core in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        now = float((core / "scaling_cur_freq").read_text())
        highest = float((core / "cpuinfo_max_freq").read_text())
        worst = max(worst or 0.0, 100 * (1 - now / highest))
    return worst


def _heat() -> float | None:
    """The hottest zone's temperature as a percentage of its critical trip point."""
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
    """What this machine can tell apart now.

    Attributes:
        reading: the gate while the probe ran.
        seconds: the budget `wall` and `cpu` are meant for.
        wall, cpu: smallest relative difference found 80 % of the time within `seconds`.
        blocks: paired blocks of 10 ms samples the budget holds.
    """

    reading: Reading
    seconds: float
    wall: float
    cpu: float
    blocks: int


def detectable(seconds: float = 60.0, *, probe_s: float = 2.0, level: float = 0.95) -> Fitness:
    """Compare a fixed piece of single-threaded work with itself, and extrapolate to `seconds`.

    The spread of the paired ratios gives the width that as many blocks as fit would reach; a
    robust spread, because that is what the interval of the median depends on.
    """
    import numpy as np

    from slipstream.measure.arms import REPEATED_SAMPLE_NS, time_calls
    from slipstream.measure.sequential import nominal_error
    from slipstream.measure.statistics import critical_value, detectable_difference

    gate = Gate()
    inner, taken = 1, 0
    while taken < REPEATED_SAMPLE_NS:
        inner *= 2
        taken = time_calls(_probe, inner).wall
    rows: list[tuple[int, int, int, int]] = []
    began = time.monotonic()
    # Eight blocks at least, so that a very slow machine still gives a spread.
    while time.monotonic() - began < probe_s or len(rows) < 8:
        a, b = time_calls(_probe, inner), time_calls(_probe, inner)
        rows.append((a.wall, a.cpu, b.wall, b.cpu))
    block_s = (time.monotonic() - began) / len(rows)
    values = np.log(np.asarray(rows, np.float64))
    blocks = max(8, round(seconds / block_s))
    looks = tuple(10 * 2**k for k in range(8))
    error = nominal_error(blocks, looks, 1 - level, at_planned_look=False)
    detectable_in = {}
    for name, first in (("wall", 0), ("cpu", 1)):
        ratio = values[:, first] - values[:, first + 2]
        low, high = np.quantile(ratio, [0.25, 0.75])
        # Normal noise: deviation = IQR / 1.349; the median's is 1.2533 / sqrt(n) of that.
        deviation = float(high - low) / 1.349 * 1.2533 / math.sqrt(blocks)
        half = deviation * critical_value(1 - error)
        detectable_in[name] = detectable_difference(half, 1 - error)
    return Fitness(gate.read(), seconds, **detectable_in, blocks=blocks)


def _probe() -> int:
    total = 0
    for i in range(2000):
        total += i * i
    return total
