"""Steps of several plans, timed in turn: what a simulation chose has to hold when it is done.

A plan rests on a link that was measured in a moment, perhaps a bad one. So what was chosen, what
is nearly as good, and DistributedDataParallel all train for some steps; what is slower is left.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.techniques.distributed.priority.plan import CLEAR, SlicePlan

# DDP rebuilds its buckets in its second step.
_WARM, _TIMED = 2, 4
# A turn takes so long, that what holds up the machine for a moment holds up few of its steps.
_TURN_S, _MOST_TIMED = 0.3, 40


@dataclass
class Autotune:
    """Which plan trains now, and how long steps of each took.

    Attributes:
        plans: in the order in which they train; the last stays unless another is clearly faster.
        step_s: about what a step takes, the same on all ranks.
    """

    plans: Sequence[SlicePlan]
    step_s: float
    _stamps: list[float] = field(default_factory=list)
    _taken_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self._stamps.append(time.perf_counter())

    @property
    def turn_over(self) -> bool:
        """Whether the plan that trains has had its steps; of the last one the end is not seen."""
        timed = max(_TIMED, min(_MOST_TIMED, round(_TURN_S / max(self.step_s, 1e-9))))
        return len(self._stamps) > _WARM + timed

    @property
    def over(self) -> bool:
        return len(self._taken_s) == len(self.plans)

    def next(self) -> None:
        """The turn of the plan that trains is over."""
        lengths = [b - a for a, b in itertools.pairwise(self._stamps)]
        self._taken_s.append(statistics.median(lengths[_WARM:]))
        self._stamps = []

    @property
    def current(self) -> SlicePlan:
        return self.plans[len(self._taken_s)]

    @property
    def measured_s(self) -> dict[str, float]:
        """Seconds of a step, by `SlicePlan.name`."""
        return {plan.name: s for plan, s in zip(self.plans, self._taken_s, strict=False)}

    def fastest(self) -> SlicePlan:
        """The fastest plan; the last one where the fastest is not clearly so."""
        step_s = self._taken_s
        best = min(range(len(step_s)), key=lambda n: step_s[n])
        return self.plans[best if step_s[best] < CLEAR * step_s[-1] else -1]
