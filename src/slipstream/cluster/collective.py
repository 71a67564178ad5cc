"""Collective operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.cluster.groups import Group
from slipstream.errors import InvalidArgumentError, UnknownNameError

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "p2p", "halo",
    "reshard",
)  # fmt: skip
"""Names as in torch.distributed. `halo`: each rank to both neighbours in a line. `reshard`: rows
that are dealt out in turn to the group are dealt out to `servers` instead."""


@dataclass(frozen=True)
class Collective:
    """One communication operation of a group.

    Attributes:
        kind: one of `KINDS`.
        nbytes: S, as torch counts: size of the tensor on every rank (all_reduce, broadcast, p2p),
            of one message (halo), or of the whole tensor that a rank scatters, gathers or
            exchanges, or whose rows are dealt out (reshard).
        group: the participants; None for all devices (of the cluster, or of its job).
        algo: ``"auto"`` is the cheapest by closed form. Otherwise one of `patterns.ALGORITHMS`:
            ``"ring"``, ``"tree"``, ``"halving_doubling"``, ..., or one per dimension of the group,
            slowest first: ``"line*ring2"``; ``"2d"`` chooses among the latter.
        chunks: pieces of a pipelined tree; with more, the first piece arrives earlier.
        priority: priority of its transfers; smaller goes first, strictly.
        weight: share of its transfers when they compete.
        servers: devices that hold the shards of a parameter server (``algo="ps"``), or that
            receive (reshard); those of the smaller set are the first ones of the larger set.
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
                "nbytes",
                f"{self.nbytes} is not a size",
                remedy="pass a finite number of at least 0",
            )
        if self.chunks < 1:
            raise InvalidArgumentError("chunks", f"{self.chunks} is less than 1")
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise InvalidArgumentError("weight", f"{self.weight} is not a positive number")
