"""Transfers between the hosts of a leaf-spine network, on which engines are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.cluster.routing import Int64s
from slipstream.cluster.topology import Float64s
from slipstream.native import Flows, Policy, Program

HOSTS, PER_LEAF, SPINES = 1024, 32, 16
HOST_BYTES_PER_S, UPLINK_BYTES_PER_S = 12.5e9, 25e9


@dataclass(frozen=True, eq=False)
class Trace:
    """Transfers: sender, receiver, size, arrival and spine.

    Attributes:
        arrival_s, nbytes: float64 [transfers].
        src, dst, spine: int64 [transfers].
    """

    arrival_s: Float64s
    nbytes: Float64s
    src: Int64s
    dst: Int64s
    spine: Int64s

    @property
    def capacity_bytes_per_s(self) -> Float64s:
        """Return bytes per second, float64 [links]: host up, host down, leaf-spine, spine-leaf."""
        leaves = HOSTS // PER_LEAF
        capacity = np.full(2 * HOSTS + 2 * leaves * SPINES, UPLINK_BYTES_PER_S)
        capacity[: 2 * HOSTS] = HOST_BYTES_PER_S
        return capacity

    def paths(self) -> tuple[Int64s, Int64s]:
        """Return the number of hops of each transfer, and the concatenated links of all paths."""
        a, b = self.src // PER_LEAF, self.dst // PER_LEAF
        first_down = 2 * HOSTS + HOSTS // PER_LEAF * SPINES
        table = np.stack(
            [
                self.src,
                np.where(a != b, 2 * HOSTS + a * SPINES + self.spine, -1),
                np.where(a != b, first_down + b * SPINES + self.spine, -1),
                HOSTS + self.dst,
            ],
            axis=1,
        )
        return (table >= 0).sum(axis=1), table[table >= 0]

    def program(self) -> Program:
        """Return a program of the event engine: transfers that start at their arrival times."""
        hops, links = self.paths()
        return Program(
            lane=np.zeros(self.nbytes.size, np.int32),
            duration_ns=self.arrival_s * 1e9,
            policies=np.array([Policy.CONCURRENT], np.uint8),
            flows=Flows(
                capacity=self.capacity_bytes_per_s / 1e9,
                path_offset=np.concatenate([[0], np.cumsum(hops)]),
                path_link=links,
                nbytes=self.nbytes,
            ),
        )


def golden(transfers: int, seed: int = 0, load: float = 0.5) -> Trace:
    """Return the trace of the recorded reference results: sizes over five decades.

    Args:
        load: load of the hosts' links.
    """
    rng = np.random.default_rng(seed)
    src = rng.integers(0, HOSTS, transfers)
    dst = (src + rng.integers(1, HOSTS, transfers)) % HOSTS
    nbytes = rng.lognormal(11, 2.2, transfers).clip(1e3, 1e9)
    spine = rng.integers(0, SPINES, transfers)
    rate = load * HOSTS * HOST_BYTES_PER_S / nbytes.mean()
    arrival = np.cumsum(rng.exponential(1.0 / rate, transfers))
    return Trace(arrival, nbytes, src, dst, spine)


def one_route_a_pair(trace: Trace) -> Trace:
    """Return the trace with integer bytes and one spine per pair of hosts, as SimGrid needs."""
    pair = trace.src * HOSTS + trace.dst
    _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    nbytes = np.floor(trace.nbytes)
    return Trace(trace.arrival_s, nbytes, trace.src, trace.dst, trace.spine[first][inverse])
