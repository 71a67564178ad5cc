"""The assignment of trials to devices, shared by the simulator and the real executor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.trials.trialset import Floats, TrialSet
from slipstream.errors import InvalidArgumentError

# Usable share of a device's memory, since predictions of memory are not exact.
MEMORY = 0.92


class ClusterState:
    """Devices and trials.

    Args:
        trials: all trials, which may arrive later.
        devices: number of devices.
        restart_s: cost of resizing a running trial: checkpoint, restart, rendezvous.
        max_pack: maximum number of trials per device.
        resizable: whether a started trial may be moved to other devices.

    Attributes:
        left_s: remaining work in seconds of one device, float64 [m].
        width: number of devices; 1 if packed, 0 if not running, int64 [m].
        packed_on: shared device, or -1, int64 [m].
        pause_s: time until the trial computes again, float64 [m].
        hold_s: computing time before the trial may be widened again, float64 [m].
        begun: whether the trial has computed, so that a resize costs a restart, bool [m].
        here: whether the trial has arrived and not ended, bool [m].
        load, count, memory: utilisation, number and memory of packed trials, [devices].
    """

    def __init__(
        self, trials: TrialSet, devices: int, *, restart_s: float = 15.0, max_pack: int = 4,
        resizable: bool = True,
    ) -> None:  # fmt: skip
        if devices < 1:
            raise InvalidArgumentError("devices", f"{devices} is less than 1")
        _need_fitting(trials)
        m = self._rows = len(trials)
        self.trials, self.devices = trials, devices
        self.restart_s, self.max_pack, self.resizable = restart_s, max_pack, resizable
        self.left_s = trials.work_s.copy()
        self.width = np.zeros(m, dtype=np.int64)
        self.packed_on = np.full(m, -1, dtype=np.int64)
        self.pause_s = np.zeros(m)
        self.hold_s = np.zeros(m)
        self.begun = np.zeros(m, dtype=np.bool_)
        self.here = np.zeros(m, dtype=np.bool_)
        self.load = np.zeros(devices)
        self.count = np.zeros(devices, dtype=np.int64)
        self.memory = np.zeros(devices)
        self.on: list[list[int]] = [[] for _ in range(m)]
        """Devices of each trial."""
        self.free = list(range(devices - 1, -1, -1))
        self.restarts = 0

    @property
    def waiting(self) -> NDArray[np.int64]:
        """Trials that have arrived and have no device."""
        return np.flatnonzero(self.here & (self.width == 0))

    @property
    def running(self) -> NDArray[np.int64]:
        """Trials that have devices."""
        return np.flatnonzero(self.width > 0)

    def fixed(self, i: int) -> bool:
        """Whether trial `i` must keep its devices."""
        return not self.resizable and bool(self.begun[i])

    def held(self, i: int) -> bool:
        """Whether trial `i` must not be widened now."""
        return self.fixed(i) or bool(self.hold_s[i] > 0)

    def rates(self, at: NDArray[np.int64]) -> Floats:
        """Return the speed-ups of trials `at` over one device each, ignoring pauses."""
        packed = self.packed_on[at]
        wide = self.trials.rates[at, np.maximum(self.width[at], 1) - 1]
        shared = 1.0 / np.maximum(self.load[packed], 1.0)
        return np.where(packed >= 0, shared, wide)

    def finishes(self, at: NDArray[np.int64]) -> Floats:
        """Return the seconds until each of the trials `at` ends, if nothing changes."""
        return self.pause_s[at] + self.left_s[at] / self.rates(at)

    def elapse(self, seconds: float) -> None:
        """Advance running trials by `seconds`, first through their pauses, then their work."""
        running = self.running
        pause = self.pause_s[running]
        computed = np.maximum(seconds - pause, 0.0)
        self.left_s[running] = np.maximum(
            self.left_s[running] - computed * self.rates(running), 0.0
        )
        self.hold_s[running] = np.maximum(self.hold_s[running] - computed, 0.0)
        self.pause_s[running] = np.maximum(pause - seconds, 0.0)

    def add(self, work_s: float, rates: Floats, utilisation: float, memory: float) -> int:
        """Add a trial that has not arrived yet, and return its row.

        Args:
            rates: speed-ups at width 1, 2, ..., up to the same width as the other trials'.

        Raises:
            InvalidArgumentError: the trial does not fit on a device, or a value is invalid.
        """
        _need_fitting(TrialSet(
            np.array([work_s]), rates[None, :], np.array([utilisation]), np.array([memory])
        ))  # fmt: skip
        if self._rows == len(self.trials):
            self._grow(max(64, self._rows))
        i = self._rows
        self._rows += 1
        trials = self.trials
        trials.work_s[i] = self.left_s[i] = work_s
        trials.rates[i], trials.utilisation[i], trials.memory[i] = rates, utilisation, memory
        return i

    def _grow(self, by: int) -> None:
        old, ones = self.trials, np.ones(by)
        self.trials = TrialSet(
            np.append(old.work_s, ones), np.vstack([old.rates, np.ones((by, old.rates.shape[1]))]),
            np.append(old.utilisation, ones), np.append(old.memory, 0.0 * ones),
        )  # fmt: skip
        self.left_s = np.append(self.left_s, ones)
        self.width = np.append(self.width, np.zeros(by, dtype=np.int64))
        self.packed_on = np.append(self.packed_on, np.full(by, -1, dtype=np.int64))
        self.pause_s = np.append(self.pause_s, 0.0 * ones)
        self.hold_s = np.append(self.hold_s, 0.0 * ones)
        self.begun = np.append(self.begun, np.zeros(by, dtype=np.bool_))
        self.here = np.append(self.here, np.zeros(by, dtype=np.bool_))
        self.on += [[] for _ in range(by)]

    def arrive(self, at: NDArray[np.int64]) -> None:
        """Mark trials as runnable."""
        self.here[at] = True

    def spread(self, i: int, width: int) -> None:
        """Give trial `i` `width` whole devices."""
        self._stop(i)
        self.on[i] = [self.free.pop() for _ in range(width)]
        self.width[i] = width

    def pack(self, i: int, device: int | None = None) -> None:
        """Put trial `i` on a shared device, or on a free one if `device` is None."""
        self._stop(i)
        device = self.free.pop() if device is None else device
        self.width[i], self.packed_on[i], self.on[i] = 1, device, [device]
        self.load[device] += self.trials.utilisation[i]
        self.count[device] += 1
        self.memory[device] += self.trials.memory[i]

    def fullest_device(self, i: int, max_load: float) -> int:
        """Return the fullest shared device that fits trial `i` up to `max_load`, or -1."""
        u, memory = self.trials.utilisation[i], self.trials.memory[i]
        fits = (self.count > 0) & (self.count < self.max_pack) & (self.load + u <= max_load + 1e-9)
        fits &= self.memory + memory <= MEMORY
        if not fits.any():
            return -1
        return int(np.argmax(np.where(fits, self.load, -1.0)))

    def leave(self, i: int) -> None:
        """Remove the ended trial `i`."""
        self._release(i)
        self.here[i] = False
        self.left_s[i] = 0.0

    def _stop(self, i: int) -> None:
        if self.width[i]:
            self._release(i)
        if self.begun[i]:
            self.pause_s[i] = self.restart_s
            self.restarts += 1

    def _release(self, i: int) -> None:
        device = int(self.packed_on[i])
        if device >= 0:
            self.count[device] -= 1
            empty = self.count[device] == 0
            # Exactly 0 for an empty device, in spite of rounding.
            self.load[device] = 0.0 if empty else self.load[device] - self.trials.utilisation[i]
            self.memory[device] = 0.0 if empty else self.memory[device] - self.trials.memory[i]
            if empty:
                self.free.append(device)
        else:
            self.free.extend(self.on[i])
        self.width[i], self.packed_on[i], self.on[i] = 0, -1, []


def _need_fitting(trials: TrialSet) -> None:
    over = np.flatnonzero(trials.memory > MEMORY)
    if len(over):
        at = int(over[0])
        name = trials.names[at] if len(trials.names) else str(at)
        raise InvalidArgumentError(
            "trials", f"trial {name} needs {trials.memory[at]:.2f} of a device's memory, but only "
            f"{MEMORY} is usable",
        )  # fmt: skip
