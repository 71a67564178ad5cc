"""What is communicated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.cluster.groups import Group
from slipstream.errors import InvalidArgumentError, UnknownNameError

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "p2p", "halo",
)  # fmt: skip
"""Collectives by the names of torch.distributed. `halo`: each rank to both neighbours in line."""


@dataclass(frozen=True)
class Collective:
    """One communication of a group.

    Attributes:
        kind: one of `KINDS`.
        nbytes: S, as torch counts: of the tensor every rank holds (all_reduce, broadcast, p2p,
            halo: of one message), or of the whole that is scattered, gathered or exchanged by a
            rank.
        group: who takes part; None for all devices (of the cluster, or of the job it is in).
        algo: ``"auto"`` is the cheapest by closed form. Else one of `patterns.ALGORITHMS`:
            ``"ring"``, ``"tree"``, ``"halving_doubling"``, ..., or one per dimension of the group,
            slowest first: ``"line*ring2"``; ``"2d"`` chooses among those.
        chunks: pieces of a pipelined tree; more means less to wait for the first piece.
        priority: of its transfers; smaller goes first, strictly.
        weight: of its transfers where they compete.
        servers: devices that hold the shards of a parameter server (``algo="ps"``).
    """

    kind: str
    nbytes: float
    group: Group | None = None
    algo: str = "auto"
    chunks: int = 16
    priority: int = 0
    weight: float = 1.0
    servers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("collective", self.kind, KINDS)
        if not (math.isfinite(self.nbytes) and self.nbytes >= 0.0):
            raise InvalidArgumentError(
                "nbytes", f"{self.nbytes} is not a size", remedy="a finite number of at least 0"
            )
        if self.chunks < 1:
            raise InvalidArgumentError("chunks", f"{self.chunks} is less than 1")
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise InvalidArgumentError("weight", f"{self.weight} is not a positive number")
