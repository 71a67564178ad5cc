"""Real ranks in a network lab, for ``slipstream bench priority``: one launch per cell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.ranks import Netlab
from slipstream_bench.lab import on_ranks
from slipstream_bench.systems.priority import rank
from slipstream_bench.systems.priority.workloads import named

_LIMIT_S, _TIMEOUT_S = 3600.0, 300.0
# Ethernet, IP and TCP headers with timestamps, for 1448 bytes of a full packet.
_PAYLOAD = 1448 / 1514
BUCKETS = ("ddp:25", "ddp:4", "ddp:1")


def run(
    ranks: int, bytes_per_s: float, function: Callable[..., Any], limit_s: float = _LIMIT_S,
    **arguments: Any,
) -> list[Any]:  # fmt: skip
    """Return the result of ``function(**arguments)`` on every rank.

    Raises:
        ClusterError: a rank failed, or all took longer than `limit_s`.
    """
    with Netlab(ranks, bytes_per_s) as lab:
        return on_ranks(lab, function, limit_s=limit_s, timeout_s=_TIMEOUT_S, **arguments)


@dataclass(frozen=True)
class Cell:
    """A workload on a link.

    Attributes:
        compute_s, communicate_s: time of a step's parts alone; bytes are sent at full packets'
            rate.
        measured_s: time of a step, by method.
        predicted_s: predicted time of a step, by method, if predicted.
        chosen: the method that `auto` has chosen.
        sampled: bytes received and sent, and seconds, while gradients were in transit, by method.
    """

    compute_s: float
    communicate_s: float
    measured_s: dict[str, float]
    predicted_s: dict[str, float]
    chosen: str
    sampled: dict[str, tuple[list[int], float]]

    @property
    def ddp_s(self) -> float:
        """Step time of DistributedDataParallel with its best bucket size."""
        return min(s for how, s in self.measured_s.items() if how.startswith("ddp:"))

    @property
    def predicted_ddp_s(self) -> float:
        """Predicted step time of DistributedDataParallel with its best bucket size."""
        return min(s for how, s in self.predicted_s.items() if how.startswith("ddp:"))

    @property
    def bound_s(self) -> float:
        """Lower bound of any order: all of the computation, or all of the bytes."""
        return max(self.compute_s, self.communicate_s)

    def errors(self) -> list[float]:
        """Return relative errors of all predictions that were measured."""
        return [
            abs(self.predicted_s[how] / s - 1.0)
            for how, s in self.measured_s.items()
            if how in self.predicted_s
        ]


def rate_for(workload: str, compute_s: float, ratio: float) -> float:
    """Return bytes per second of a link on which communication takes `ratio` times computation."""
    numbers = sum(layer.numel for layer in named(workload, compute_s))
    return 4 * numbers / (ratio * compute_s) / _PAYLOAD


@functools.cache
def cell(
    workload: str, bytes_per_s: float, compute_s: float, methods: tuple[str, ...], steps: int
) -> Cell:
    """Measure methods, and `auto`, on two ranks with a link."""
    answers = run(
        2, bytes_per_s, rank.steps, workload=workload, compute_s=compute_s,
        methods=["auto", *methods], count=steps,
    )[0]  # fmt: skip
    found = {result["how"]: result for result in answers}
    measured = {how: result["median_s"] for how, result in found.items()}
    automatic = found["auto"]
    chosen = automatic["chosen"]
    numbers = sum(layer.numel for layer in named(workload, compute_s))
    # `auto` has the prediction of the method that it chose.
    predicted = {**automatic["predicted"], "auto": automatic["predicted"][chosen]}
    return Cell(
        compute_s, 4 * numbers / (bytes_per_s * _PAYLOAD), measured, predicted, chosen,
        {how: result["sampled"] for how, result in found.items()},
    )  # fmt: skip
