"""Event-driven simulation of schedulers on a virtual clock."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slipstream.engines.trials.cluster_state import ClusterState
from slipstream.engines.trials.trialset import TrialSet

if TYPE_CHECKING:
    from slipstream.engines.trials.schedulers import Scheduler


@dataclass(frozen=True)
class Interval:
    """A trial on its devices between two changes, in seconds of the virtual clock."""

    trial: int
    devices: tuple[int, ...]
    packed: bool
    start_s: float
    end_s: float


@dataclass
class Clock:
    """A cluster whose time advances by events.

    Attributes:
        now_s: current time.
        busy_device_s: total time of devices with trials.
        intervals: placements of trials over time, if `record`.
    """

    state: ClusterState
    scheduler: Scheduler
    record: bool = False
    now_s: float = 0.0
    busy_device_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._since: dict[int, tuple[float, tuple[int, ...], bool]] = {}
        self._changed = True

    def arrive(self, at: list[int]) -> None:
        """Make trials runnable; the scheduler sees them at the next `advance`."""
        self.state.arrive(np.asarray(at, dtype=np.int64))
        self._changed = True

    def decide(self) -> None:
        """Let the scheduler place runnable trials."""
        if self._changed:
            self.scheduler.decide(self.state)
            self._changed = False
            if self.record:
                self._update_intervals()

    def advance(self) -> list[int]:
        """Advance to the next end of a trial, and return the ended trials; empty if idle."""
        self.decide()
        state = self.state
        running = state.running
        if not len(running):
            return []
        state.begun[running] = True
        ends = state.finishes(running)
        step = float(ends.min())
        ended = running[ends <= step * (1 + 1e-12) + 1e-12]
        state.elapse(step)
        self.now_s += step
        self.busy_device_s += step * (state.devices - len(state.free))
        for i in ended.tolist():
            state.leave(i)
        self._changed = True
        if self.record:
            self._update_intervals()
        return list(map(int, ended))

    def _update_intervals(self) -> None:
        """Close the intervals of trials whose devices changed, and open new ones."""
        state = self.state
        now = {int(i): (tuple(state.on[i]), bool(state.packed_on[i] >= 0)) for i in state.running}
        for i, (start, devices, packed) in list(self._since.items()):
            if now.get(i) != (devices, packed):
                self.intervals.append(Interval(i, devices, packed, start, self.now_s))
                del self._since[i]
        for i, (devices, packed) in now.items():
            self._since.setdefault(i, (self.now_s, devices, packed))

    def digest(self) -> str:
        """Return a hash of all intervals."""
        text = repr([(x.trial, x.devices, x.start_s, x.end_s) for x in self.intervals])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def simulate(
    trials: TrialSet, devices: int, scheduler: Scheduler, *,
    restart_s: float = 15.0, max_pack: int = 4, record: bool = False,
) -> Clock:  # fmt: skip
    """Simulate trials that are all runnable from the start, until the last one ends.

    Raises:
        InvalidArgumentError: no devices, or a trial does not fit on one.
    """
    state = ClusterState(trials, devices, restart_s=restart_s, max_pack=max_pack)
    clock = Clock(state, scheduler, record)
    clock.arrive(list(range(len(trials))))
    while clock.advance():
        pass
    return clock


def makespan(
    trials: TrialSet, devices: int, scheduler: Scheduler, *,
    restart_s: float = 15.0, max_pack: int = 4,
) -> float:  # fmt: skip
    """Return the seconds until the last trial ends; see `simulate`."""
    clock = simulate(trials, devices, scheduler, restart_s=restart_s, max_pack=max_pack)
    return clock.now_s
