"""Schedulers: first come first served, even shares, Fluid, and the level rule.

Each updates the `ClusterState` on every arrival and end of a trial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.trials.cluster_state import MEMORY, ClusterState
from slipstream.engines.trials.simulator import makespan
from slipstream.engines.trials.trialset import bound_s
from slipstream.errors import UnknownNameError

# Minimum reduction of the last trial's remaining time by a resize, restart included.
_MIN_GAIN = 0.08
# Trials of this utilisation gain nothing from sharing a device, and would hold memory together.
_FULL = 0.95


class Scheduler(ABC):
    """Places trials on devices."""

    name: ClassVar[str]

    @abstractmethod
    def decide(self, state: ClusterState) -> None:
        """Update `state` after trials arrived or ended."""


class Fifo(Scheduler):
    """One device per trial, in order of arrival."""

    name = "fifo"

    def decide(self, state: ClusterState) -> None:
        for i in state.waiting[: len(state.free)]:
            state.spread(int(i), 1)


class Uniform(Scheduler):
    """Even shares: with fewer trials than devices, each gets devices // trials.

    Like Ray Tune's ``DistributeResources``; trials with fewer devices are restarted.
    """

    name = "uniform"

    def decide(self, state: ClusterState) -> None:
        for i in state.waiting[: len(state.free)]:
            state.spread(int(i), 1)
        running = state.running
        if not len(running) or len(state.waiting):
            return
        share = min(max(state.devices // len(running), 1), state.trials.rates.shape[1])
        for i in running:
            extra = share - int(state.width[i])
            if 0 < extra <= len(state.free) and not state.held(int(i)):
                state.spread(int(i), share)


class Fluid(Scheduler):
    """Width in proportion to work, at most `pack` trials per device and `width` devices per trial.

    Source: Yu et al., "Fluid: Resource-Aware Hyperparameter Tuning Engine", MLSys 2021.
    """

    name = "fluid"

    def __init__(self, pack: int = 2, width: int = 4) -> None:
        self.pack, self.max_width = pack, width

    def decide(self, state: ClusterState) -> None:
        waiting, running = state.waiting, state.running
        if not len(waiting):
            widen(state, self.max_width)
            return
        active = np.concatenate([waiting, running])
        total = state.left_s[active].sum()
        share = state.devices * state.left_s / max(total, 1e-12)
        pack = min(self.pack, state.max_pack)
        for i in waiting[np.argsort(-state.left_s[waiting], kind="stable")]:
            width = min(int(share[i]), self.max_width, state.trials.rates.shape[1], len(state.free))
            if width >= 1:
                state.spread(int(i), width)
            elif share[i] < 1:
                fits = (state.count > 0) & (state.count < pack)
                fits &= state.memory + state.trials.memory[i] <= MEMORY
                # Fill free devices first, then share them, which pairs long with short trials.
                if len(state.free):
                    state.pack(int(i))
                elif fits.any():
                    state.pack(int(i), int(np.flatnonzero(fits)[0]))
                else:
                    return


class Level(Scheduler):
    """Let all devices end at the same time, by the rule that ends first in simulation.

    A group that fits at once is planned as a whole: find the smallest T for which every trial can
    end by T, at its smallest sufficient width or packed with others. A larger group is packed,
    longest trials first. Devices that idle at the end go to the trial that ends last, if that is
    worth its restart. The candidates include several packings and the simpler rules. If a trial
    arrives while wide trials hold all devices, it gets one of theirs, provided that this saves more
    waiting than the restart costs.

    Attributes:
        chosen: the rule for the last group.
    """

    name = "level"

    def __init__(self) -> None:
        self.chosen: Scheduler | None = None
        self._backlog = np.zeros(0, dtype=np.int64)

    def decide(self, state: ClusterState) -> None:
        waiting = state.waiting
        if self.chosen is None or (len(waiting) > 1 and not len(state.running)):
            self.chosen = self._best(state)
        make_room(state, len(np.setdiff1d(waiting, self._backlog, assume_unique=True)))
        self.chosen.decide(state)
        self._backlog = state.waiting

    def _best(self, state: ClusterState) -> Scheduler:
        m, n = len(state.waiting), state.devices
        # For large groups, simulations take longer and the rules differ less.
        fillings = (1.0, 1.15, 1.3, 1.6) if m <= 1000 else (1.0, 1.3)
        rules: list[Scheduler] = [Filling(load) for load in fillings]
        if m <= 3 * n:
            rules += [PlanningScheduler(slack) for slack in ((1.0, 1.1) if m <= 1000 else (1.0,))]
        waiting = state.trials.rows(state.waiting)
        if m <= 1000:
            rules += [Uniform(), Fifo()]
            if (waiting.utilisation < _FULL).any():
                rules += [Fluid(), Fluid(4, 8)]
        ends = [
            makespan(waiting, n, rule, restart_s=state.restart_s, max_pack=state.max_pack)
            for rule in rules
        ]
        return rules[int(np.argmin(ends))]


class Filling(Scheduler):
    """Longest trials first, onto free devices, then onto shared ones; idle devices widen trials.

    Args:
        max_load: maximum sum of utilisations on a device; above 1, its trials slow each other down
            and the device never idles.
    """

    name = "filling"

    def __init__(self, max_load: float = 1.0) -> None:
        self.max_load = max_load
        self._level_s = 0.0

    def decide(self, state: ClusterState) -> None:
        waiting = state.waiting
        if len(waiting):
            if not len(state.running):
                self._level_s = bound_s(state.trials.rows(waiting), state.devices)
            self._fill(state, waiting)
        widen(state, state.trials.rates.shape[1])

    def _fill(self, state: ClusterState, waiting: NDArray[np.int64]) -> None:
        failed = np.inf
        for i in waiting[np.argsort(-state.left_s[waiting], kind="stable")].tolist():
            level = self._level_s
            if state.free and level and state.left_s[i] > level:
                times = state.left_s[i] / state.trials.rates[i]
                sufficient = np.flatnonzero(times <= 1.1 * level)
                width = int(sufficient[0]) + 1 if len(sufficient) else int(np.argmin(times)) + 1
                if width > 1 and width <= len(state.free):
                    state.spread(i, width)
                    continue
            if state.free:
                state.pack(i)
                continue
            if state.trials.utilisation[i] >= failed:
                continue
            device = state.fullest_device(i, self.max_load)
            if device >= 0:
                state.pack(i, device)
            elif not state.memory.any():
                # If no trial declares memory, trials of higher utilisation do not fit either.
                failed = float(state.trials.utilisation[i])
                if failed <= 0.05:
                    return


class PlanningScheduler(Scheduler):
    """Place all waiting trials at once, with the earliest common end; idle devices widen trials.

    Args:
        slack: factor of the common end by which packed trials may end.
    """

    name = "plan"

    def __init__(self, slack: float = 1.0) -> None:
        self.slack = slack

    def decide(self, state: ClusterState) -> None:
        waiting, n = state.waiting, len(state.free)
        if len(waiting) and n:
            plan = self._earliest(state, waiting, n)
            if plan is None:
                Filling(1.3).decide(state)
                return
            for i, width in plan[0].items():
                state.spread(i, width)
            for members in plan[1]:
                state.pack(members[0])
                for i in members[1:]:
                    state.pack(i, int(state.packed_on[members[0]]))
        widen(state, state.trials.rates.shape[1])

    def _earliest(
        self, state: ClusterState, waiting: NDArray[np.int64], n: int
    ) -> tuple[dict[int, int], list[list[int]]] | None:
        low = bound_s(state.trials.rows(waiting), n) * 0.999
        best, high = None, 2.0 * low
        for _ in range(6):
            best = self._fits(state, waiting, n, high)
            if best is not None:
                break
            high *= 2.0
        if best is None:
            return None
        for _ in range(10):
            middle = 0.5 * (low + high)
            fit = self._fits(state, waiting, n, middle)
            if fit is None:
                low = middle
            else:
                best, high = fit, middle
        return best

    def _fits(
        self, state: ClusterState, waiting: NDArray[np.int64], n: int, end_s: float
    ) -> tuple[dict[int, int], list[list[int]]] | None:
        """Return widths, and members of shared devices, so that all end by `end_s`; or None."""
        trials = state.trials
        work, u, memory = state.left_s, trials.utilisation, trials.memory
        wide: dict[int, int] = {}
        narrow: list[int] = []
        for i in waiting[np.argsort(-work[waiting], kind="stable")].tolist():
            if work[i] <= end_s:
                narrow.append(i)
                continue
            sufficient = np.flatnonzero(work[i] <= end_s * trials.rates[i])
            if not len(sufficient):
                return None
            wide[i] = int(sufficient[0]) + 1
            n -= wide[i]
            if n < 0:
                return None
        if n >= len(narrow):
            return wide, [[i] for i in narrow]
        shared: list[list[int]] = []
        loads: list[float] = []
        filled: list[float] = []
        for i in narrow:
            best, best_load = -1, -1.0
            for at in range(len(shared) - 1, max(-1, len(shared) - 65), -1):
                members = shared[at]
                if len(members) >= state.max_pack or filled[at] + memory[i] > MEMORY:
                    continue
                if u[i] >= _FULL and any(u[member] >= _FULL for member in members):
                    continue
                if loads[at] > best_load and (
                    loads[at] + u[i] <= 1.0 or _ends(work, u, [*members, i]) <= end_s * self.slack
                ):
                    best, best_load = at, loads[at]
            if best < 0:
                shared.append([i])
                loads.append(float(u[i]))
                filled.append(float(memory[i]))
                if len(shared) > n:
                    return None
            else:
                shared[best].append(i)
                loads[best] += float(u[i])
                filled[best] += float(memory[i])
        return wide, shared


def _ends(work: NDArray[np.float64], u: NDArray[np.float64], members: list[int]) -> float:
    """Return when a device has finished `members` that start together."""
    now, done = 0.0, 0.0
    load = float(sum(u[i] for i in members))
    for i in sorted(members, key=lambda member: work[member]):
        now += (work[i] - done) * max(load, 1.0)
        done = float(work[i])
        load -= float(u[i])
    return now


def widen(state: ClusterState, max_width: int) -> None:
    """Give idle devices to the trial that ends last, while that shortens its time by 8 %."""
    while state.free and not len(state.waiting):
        running = state.running
        if not len(running):
            return
        ends = state.finishes(running)
        last = int(np.argmax(ends))
        i, now = int(running[last]), float(ends[last])
        if state.held(i):
            return
        device = int(state.packed_on[i])
        own = int(state.width[i]) if device < 0 or state.count[device] == 1 else 0
        widest = min(len(state.free) + own, max_width, state.trials.rates.shape[1])
        if widest <= own:
            return
        restart_s = state.restart_s if state.begun[i] else 0.0
        times = restart_s + state.left_s[i] / state.trials.rates[i, :widest]
        worthwhile = times < now * (1.0 - _MIN_GAIN)
        if not worthwhile.any():
            return
        # No wider than needed to end with the second-last trial, but always wider than now: of
        # trials that end together, the current width would otherwise suffice.
        second = float(np.partition(ends, -2)[-2]) if len(ends) > 1 else 0.0
        sufficient = np.flatnonzero(worthwhile & (times <= max(second, float(times.min()))))
        state.spread(i, int(sufficient[0]) + 1)


def make_room(state: ClusterState, arrivals: int) -> None:
    """Take devices from wide trials for `arrivals` trials, if that reduces the total waiting time.

    The wide trial ends later, by its restart and its smaller width; the arrivals start now instead
    of when devices become free.
    """
    while arrivals and not state.free:
        running = state.running
        width, left_s = state.width[running], state.left_s[running]
        ends = state.finishes(running)
        waits_s = np.cumsum(np.sort(np.repeat(ends, width))[:arrivals])
        gain_s, at, taken = 0.0, -1, 0
        for k in np.flatnonzero(width > 1).tolist():
            if state.fixed(int(running[k])):
                continue
            limit = min(int(width[k]) - 1, len(waits_s))
            narrower = state.trials.rates[running[k], width[k] - 2 :: -1][:limit]
            gains = waits_s[:limit] - (state.restart_s + left_s[k] / narrower - ends[k])
            if gains.max() > gain_s:
                gain_s, at, taken = float(gains.max()), k, int(np.argmax(gains)) + 1
        if at < 0:
            return
        i = int(running[at])
        state.spread(i, int(width[at]) - taken)
        # The trial computes for at least the time of its restart before it is widened again.
        state.hold_s[i] = state.restart_s
        arrivals -= taken


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    kind.name: kind for kind in (Level, Fifo, Uniform, Fluid)
}


def scheduler_by_name(name: str) -> Scheduler:
    """Create a scheduler by name.

    Raises:
        UnknownNameError: there is no such scheduler.
    """
    if name not in SCHEDULERS:
        raise UnknownNameError("scheduler", name, SCHEDULERS)
    return SCHEDULERS[name]()
