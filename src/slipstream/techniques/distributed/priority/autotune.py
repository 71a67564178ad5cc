"""Timing of training steps with several plans, to confirm the choice of a simulation.

A plan depends on a brief measurement of the link, which may be disturbed. So the best plans and
DistributedDataParallel each train for some steps, and the fastest continues.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.techniques.distributed.priority.plan import CLEAR, SlicePlan

# DDP rebuilds its buckets in its second step.
_WARM_UP, _MIN_TIMED = 2, 4
# Target time per plan, so that a brief disturbance affects only some of its steps.
_TURN_S, _MAX_TIMED = 0.3, 40


@dataclass
class Autotune:
    """Current plan, and step times of the plans that have trained.

    Attributes:
        plans: plans in the order of training; the last wins unless another is clearly faster.
        step_s: approximate time of a step, the same on all ranks.
    """

    plans: Sequence[SlicePlan]
    step_s: float
    _stamps: list[float] = field(default_factory=list)
    _medians_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self._stamps.append(time.perf_counter())

    @property
    def turn_over(self) -> bool:
        """Whether the current plan has run its steps; the end of the last step is not recorded."""
        timed = max(_MIN_TIMED, min(_MAX_TIMED, round(_TURN_S / max(self.step_s, 1e-9))))
        return len(self._stamps) > _WARM_UP + timed

    @property
    def over(self) -> bool:
        return len(self._medians_s) == len(self.plans)

    def next(self) -> None:
        """Record the current plan's step time, and proceed to the next plan."""
        lengths = [b - a for a, b in itertools.pairwise(self._stamps)]
        self._medians_s.append(statistics.median(lengths[_WARM_UP:]))
        self._stamps = []

    @property
    def current(self) -> SlicePlan:
        return self.plans[len(self._medians_s)]

    @property
    def measured_s(self) -> dict[str, float]:
        """Median seconds per step, by `SlicePlan.name`."""
        return {plan.name: s for plan, s in zip(self.plans, self._medians_s, strict=False)}

    def fastest(self) -> SlicePlan:
        """Return the fastest plan, or the last if no other is clearly faster."""
        step_s = self._medians_s
        best = min(range(len(step_s)), key=lambda n: step_s[n])
        return self.plans[best if step_s[best] < CLEAR * step_s[-1] else -1]
