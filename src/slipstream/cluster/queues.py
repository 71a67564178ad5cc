"""What queues hold, for simulations in which transfers travel as packets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from slipstream.cluster.topology import Topology
from slipstream.errors import InvalidArgumentError
from slipstream.native import Packets


@dataclass(frozen=True)
class Queues:
    """The same at the head of every link; see `slipstream.native.Packets`.

    Attributes:
        nbytes: room for packets that wait, headers included.
        mark_bytes: packets that wait beyond this are marked (ECN); infinite: none.
        payload_bytes, header_bytes: of a packet.
        first_window, max_window: packets that a transfer has under way.
        timeout_ns: without an acknowledgement for so long, a sender begins again.
    """

    nbytes: float = 1e6
    mark_bytes: float = math.inf
    payload_bytes: float = 1448.0
    header_bytes: float = 90.0
    first_window: int = 10
    max_window: int = 1024
    timeout_ns: float = 10e6

    def __post_init__(self) -> None:
        for name in ("nbytes", "mark_bytes"):
            if not getattr(self, name) >= 0.0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not a size")

    def on(self, topology: Topology) -> Packets:
        """The engine's model; capacities of links count payload and headers alike."""
        settings = asdict(self)
        queue, mark = (
            np.full(topology.links, settings.pop(name)) for name in ("nbytes", "mark_bytes")
        )
        return Packets(topology.latency_ns, queue, mark, **settings)
