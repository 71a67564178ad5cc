"""A whole training run from one measured step: what its time goes to, on any number of chips.

A run is blocks of steps, each followed by an evaluation; before the first one a program is
compiled, after the last one hosts may still be computing a metric. The steps are predicted: a
chip's time per sample from one measured step, the all-reduce from the cluster. How many steps there
are is a matter of convergence and given; what hosts take is given too, or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Pace:
    """How fast a chip computes, from one measured step.

    Attributes:
        sample_ns: a chip's time per sample, forward, backward and update.
        gradient_bytes: what is all-reduced in a step, after it.
    """

    sample_ns: float
    gradient_bytes: float

    @classmethod
    def of(cls, cluster: Cluster, step_ns: float, global_batch: int, gradient_bytes: float) -> Pace:
        """From the step of a run on all of `cluster`.

        Raises:
            InvalidArgumentError: the step is shorter than its all-reduce, or without samples.
        """
        if global_batch < 1:
            raise InvalidArgumentError("global_batch", f"{global_batch} is less than 1")
        compute = step_ns - _all_reduce_ns(cluster, gradient_bytes)
        if not compute > 0.0:
            raise InvalidArgumentError(
                "step_ns", f"{step_ns:g} is less than the all-reduce takes on {cluster.name}"
            )
        return cls(compute * cluster.devices / global_batch, gradient_bytes)

    def step(
        self, cluster: Cluster, global_batch: int, chips_per_sample: int = 1
    ) -> dict[str, float]:
        """What a step on all of `cluster` goes to, nanoseconds by name.

        Args:
            chips_per_sample: how many may share one; what passes between them is not in it.

        Raises:
            InvalidArgumentError: too few samples for the chips.
        """
        if chips_per_sample < 1:
            raise InvalidArgumentError("chips_per_sample", f"{chips_per_sample} is less than 1")
        if global_batch * chips_per_sample < cluster.devices:
            raise InvalidArgumentError(
                "global_batch",
                f"{global_batch} samples do not reach {cluster.devices} chips",
                remedy="share each sample among several chips, or take fewer",
            )
        compute = self.sample_ns * global_batch / cluster.devices
        return {
            "compute": compute,
            "all-reduce": _all_reduce_ns(cluster, self.gradient_bytes),
        }


@dataclass(frozen=True)
class Run:
    """What a run's time goes to.

    Attributes:
        parts: nanoseconds by name: the parts of its steps, ``first block`` (what it takes longer
            than others), ``evaluation tail`` (after the last step) and whatever else is given.
    """

    parts: Mapping[str, float]

    @classmethod
    def of(cls, step: Mapping[str, float], steps: float, **host_ns: float) -> Run:
        """`steps` steps, and what hosts take besides, with ``_`` for a space in its name.

        Raises:
            InvalidArgumentError: a part that is negative or not a number.
        """
        parts = {name: ns * steps for name, ns in step.items()}
        parts |= {name.replace("_", " "): ns for name, ns in host_ns.items()}
        for name, ns in parts.items():
            if not 0.0 <= ns < float("inf"):
                raise InvalidArgumentError(name, f"{ns} is not a time")
        return cls(parts)

    @property
    def total_ns(self) -> float:
        return sum(self.parts.values())

    @property
    def wall(self) -> str:
        """What most of the time goes to."""
        return max(self.parts, key=lambda name: self.parts[name])


def _all_reduce_ns(cluster: Cluster, nbytes: float) -> float:
    if cluster.devices < 2:
        return 0.0
    return cluster.cost(Collective("all_reduce", nbytes, cluster.all())).duration_ns
