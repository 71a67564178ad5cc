"""The steps of a training run on any number of chips, from one measured step.

A chip's time per sample is that of the measured step, the all-reduce that of the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Pace:
    """Speed of a chip, from one measured step.

    Attributes:
        sample_ns: a chip's time per sample, forward, backward and update.
        gradient_bytes: bytes all-reduced after each step.
    """

    sample_ns: float
    gradient_bytes: float

    @classmethod
    def of(cls, cluster: Cluster, step_ns: float, global_batch: int, gradient_bytes: float) -> Pace:
        """Return the pace from the step of a run on all of `cluster`.

        Raises:
            InvalidArgumentError: the step is shorter than its all-reduce, or has no samples.
        """
        if global_batch < 1:
            raise InvalidArgumentError("global_batch", f"{global_batch} is less than 1")
        compute = step_ns - _all_reduce_ns(cluster, gradient_bytes)
        if not compute > 0.0:
            raise InvalidArgumentError(
                "step_ns", f"{step_ns:g} is less than the time of the all-reduce on {cluster.name}"
            )
        return cls(compute * cluster.devices / global_batch, gradient_bytes)

    def step(
        self, cluster: Cluster, global_batch: int, chips_per_sample: int = 1
    ) -> dict[str, float]:
        """Return the parts of a step on all of `cluster`, nanoseconds by name.

        Args:
            chips_per_sample: number of chips that share a sample; excludes their communication.

        Raises:
            InvalidArgumentError: there are too few samples for the chips.
        """
        if chips_per_sample < 1:
            raise InvalidArgumentError("chips_per_sample", f"{chips_per_sample} is less than 1")
        if global_batch * chips_per_sample < cluster.devices:
            raise InvalidArgumentError(
                "global_batch",
                f"{global_batch} samples are too few for {cluster.devices} chips",
                remedy="share each sample among several chips, or use fewer chips",
            )
        compute = self.sample_ns * global_batch / cluster.devices
        return {
            "compute": compute,
            "all-reduce": _all_reduce_ns(cluster, self.gradient_bytes),
        }


@dataclass(frozen=True)
class RunTime:
    """Parts of a run's time.

    Attributes:
        parts: nanoseconds by name: the parts of its steps, ``first block`` (its surplus over the
            others), ``evaluation tail`` (after the last step), and others.
    """

    parts: Mapping[str, float]

    @classmethod
    def of(cls, step: Mapping[str, float], steps: float, **others_ns: float) -> RunTime:
        """Return a run of `steps` steps and other parts, with ``_`` for spaces in their names.

        Raises:
            InvalidArgumentError: a part is negative or not a number.
        """
        parts = {name: ns * steps for name, ns in step.items()}
        parts |= {name.replace("_", " "): ns for name, ns in others_ns.items()}
        for name, ns in parts.items():
            if not 0.0 <= ns < float("inf"):
                raise InvalidArgumentError(name, f"{ns} is not a time")
        return cls(parts)

    @property
    def total_ns(self) -> float:
        return sum(self.parts.values())

    @property
    def wall(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def _all_reduce_ns(cluster: Cluster, nbytes: float) -> float:
    if cluster.devices < 2:
        return 0.0
    return cluster.cost(Collective("all_reduce", nbytes, cluster.all())).duration_ns
