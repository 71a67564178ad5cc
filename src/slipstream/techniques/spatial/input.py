"""Loading of batches on many hosts: how late the slowest one is, and how many loaders hide it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError

_MAX_LOADERS = 1 << 16


@dataclass(frozen=True)
class InputModel:
    """Time to load a batch, from the time to load a sample.

    Attributes:
        samples: per step and host.
        load_ns: mean CPU time to load a sample, in ns.
        spread: standard deviation of that time, relative to its mean.
        loaders: loading processes or threads per host.

    Raises:
        InvalidArgumentError: a value is not possible.
    """

    samples: int
    load_ns: float
    spread: float = 0.0
    loaders: int = 1

    def __post_init__(self) -> None:
        as_integer("samples", self.samples)
        as_integer("loaders", self.loaders)
        for name, value in (("load_ns", self.load_ns), ("spread", self.spread)):
            if not 0.0 <= value < math.inf:
                raise InvalidArgumentError(name, f"{value} is not a finite number of at least 0")

    @classmethod
    def measured(
        cls, load: Callable[[int], Any], count: int, *, samples: int, loaders: int = 1
    ) -> InputModel:
        """Time ``load(0)`` to ``load(count - 1)``, for example a data set's ``__getitem__``.

        Args:
            count: number of samples to load, at least 2.
        """
        as_integer("count", count, 2)
        stamps = np.zeros(count + 1)
        for index in range(count):
            stamps[index] = time.thread_time_ns()
            load(index)
        stamps[count] = time.thread_time_ns()
        each = np.diff(stamps)
        mean = float(each.mean())
        return cls(samples, mean, float(each.std(ddof=1)) / max(mean, 1.0), loaders)

    def slowest_ns(self, hosts: int) -> float:
        """Return the expected time of a batch on the slowest of `hosts` hosts, in ns.

        Times of samples are independent, so that of a batch is normal; the expected maximum is
        Blom's approximation. Source: Blom, Statistical estimates and transformed beta-variables,
        1958.
        """
        as_integer("hosts", hosts)
        from scipy.special import ndtri  # slow to import

        latest = float(ndtri((hosts - 0.375) / (hosts + 0.25))) if hosts > 1 else 0.0
        deviation = self.load_ns * self.spread * math.sqrt(self.samples)
        return (self.samples * self.load_ns + latest * deviation) / self.loaders

    def waiting_ns(self, hosts: int, step_ns: float) -> float:
        """Return how long a step of `step_ns` waits for prefetched batches, in ns."""
        return max(0.0, self.slowest_ns(hosts) - step_ns)

    def loaders_for(self, hosts: int, step_ns: float) -> int:
        """Return the smallest number of loaders per host with which no step waits.

        Raises:
            InvalidArgumentError: the step takes no time, or more than 65,536 loaders are needed.
        """
        alone = replace(self, loaders=1).slowest_ns(hosts)
        if not step_ns > 0.0 or alone / step_ns > _MAX_LOADERS:
            raise InvalidArgumentError(
                "step_ns", f"{step_ns:g} ns is too short for {_MAX_LOADERS:,} loaders",
                remedy="store decoded samples, so that loading takes less time",
            )  # fmt: skip
        return max(1, math.ceil(alone / step_ns))
