"""A simulated clock for tests of numbers rather than of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.measure import arms


class KnownClock:
    """Wall and CPU time that pass only when a function works or waits on them."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0.0
        self._rng = np.random.default_rng(0)

    def work(self, nanoseconds: float) -> None:
        """Compute for about this long, with one per cent of noise."""
        elapsed = nanoseconds * self._rng.lognormal(0, 0.01)
        self.wall_ns += elapsed
        self.cpu_ns += elapsed

    def wait(self, nanoseconds: float) -> None:
        """Sleep for about this long."""
        self.wall_ns += nanoseconds * self._rng.lognormal(0, 0.01)


def install(patch: pytest.MonkeyPatch) -> KnownClock:
    """Make this clock the one that times functions in this process, without contention."""
    clock, time_calls = KnownClock(), arms.time_calls

    def timed(function: Any, inner: int, *ignored: object, **clocks: object) -> arms.Times:
        return time_calls(
            function, inner, wall=lambda: int(clock.wall_ns), cpu=lambda: int(clock.cpu_ns)
        )

    patch.setattr(arms, "time_calls", timed)
    return clock
