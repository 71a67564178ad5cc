"""Real ranks in a network lab, for ``slipstream bench priority``: one cell, one launch."""

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
# Ethernet, IP and TCP with time stamps, on 1448 bytes of a full packet.
_PAYLOAD = 1448 / 1514
BUCKETS = ("ddp:25", "ddp:4", "ddp:1")


def run(
    ranks: int, bytes_per_s: float, function: Callable[..., Any], limit_s: float = _LIMIT_S,
    **arguments: Any,
) -> list[Any]:  # fmt: skip
    """What ``function(**arguments)`` answers on every rank.

    Raises:
        ClusterError: one failed, or all took longer than `limit_s`.
    """
    with Netlab(ranks, bytes_per_s) as lab:
        return on_ranks(lab, function, limit_s=limit_s, timeout_s=_TIMEOUT_S, **arguments)


@dataclass(frozen=True)
class Cell:
    """A workload on a link.

    Attributes:
        compute_s, communicate_s: of a step, alone; what is sent at the rate of full packets.
        measured_s: of a step, by method.
        predicted_s: the same, where it was predicted.
        chosen: the method that `auto` took.
        sampled: by method: bytes received and sent, and seconds, while something was on its way.
    """

    compute_s: float
    communicate_s: float
    measured_s: dict[str, float]
    predicted_s: dict[str, float]
    chosen: str
    sampled: dict[str, tuple[list[int], float]]

    @property
    def ddp_s(self) -> float:
        """DistributedDataParallel with the best of its buckets."""
        return min(s for how, s in self.measured_s.items() if how.startswith("ddp:"))

    @property
    def predicted_ddp_s(self) -> float:
        """The same, as predicted."""
        return min(s for how, s in self.predicted_s.items() if how.startswith("ddp:"))

    @property
    def bound_s(self) -> float:
        """What no order can beat: all of the computation, or all of the bytes."""
        return max(self.compute_s, self.communicate_s)

    def errors(self) -> list[float]:
        """Of every prediction that was measured, relative."""
        return [
            abs(self.predicted_s[how] / s - 1.0)
            for how, s in self.measured_s.items()
            if how in self.predicted_s
        ]


def rate_for(workload: str, compute_s: float, ratio: float) -> float:
    """Bytes a second of a link on which communication takes `ratio` times computation."""
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
    found = {one["how"]: one for one in answers}
    measured = {how: one["median_s"] for how, one in found.items()}
    automatic = found["auto"]
    chosen = automatic["chosen"]
    numbers = sum(layer.numel for layer in named(workload, compute_s))
    # What auto chose is predicted as that.
    predicted = {**automatic["predicted"], "auto": automatic["predicted"][chosen]}
    return Cell(
        compute_s, 4 * numbers / (bytes_per_s * _PAYLOAD), measured, predicted, chosen,
        {how: one["sampled"] for how, one in found.items()},
    )  # fmt: skip
