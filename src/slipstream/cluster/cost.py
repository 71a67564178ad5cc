"""The closed form on a topology: from the phases of an algorithm to time and bytes.

Every phase takes its latencies, then the bytes of its busiest link over that link's capacity. Both
are linear in the size of the collective, so that an algorithm on a group has two numbers, computed
once; a cost is then a multiplication. It is a lower bound if transfers of one phase have different
bottlenecks; `simulate` shows the difference.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.cluster.aggregation import aggregation_tree
from slipstream.cluster.collective import Collective
from slipstream.cluster.errors import ClusterError
from slipstream.cluster.groups import Group
from slipstream.cluster.patterns import Phase, phases
from slipstream.cluster.regimes import Regime, regime_of, starts_of
from slipstream.cluster.routing import Int32s, Int64s
from slipstream.cluster.topology import Float64s, NodeKind, Topology
from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance


@dataclass(frozen=True)
class Interval:
    """An interval in nanoseconds, from `low_ns` to `high_ns`."""

    low_ns: float
    high_ns: float


@dataclass(frozen=True)
class Cost:
    """Cost of one collective in isolation.

    Attributes:
        duration_ns: time until the last rank has all data.
        latency_ns: the part of it that does not depend on the bytes.
        algo: name of the algorithm.
        bottleneck: name of the link with the longest time; "" if nothing is sent.
        bytes_per_rank: bytes that the busiest rank sends.
        link_bytes: float64 [links]; bytes on each link.
        interval: from the residuals of the calibration; None without one.
        provenance: the weakest provenance of the links' numbers.
    """

    duration_ns: float
    latency_ns: float
    algo: str
    bottleneck: str
    bytes_per_rank: float
    _bytes_per_byte: _Load
    _nbytes: float
    interval: Interval | None
    provenance: Provenance

    @property
    def seconds(self) -> float:
        return self.duration_ns / 1e9

    @property
    def link_bytes(self) -> Float64s:
        dense = np.zeros(self._bytes_per_byte.links)
        dense[self._bytes_per_byte.link] = self._bytes_per_byte.share * self._nbytes
        return dense


@dataclass(frozen=True, eq=False)
class _Load:
    links: int
    link: Int32s
    share: Float64s


@dataclass(frozen=True, eq=False)
class Placed:
    """A phase on a topology: its transfers with their links.

    Attributes:
        counts, links: as `Topology.paths`.
        share: float64 [transfers]; shares of the collective's bytes.
        starts: number of consecutive messages, each with a software latency.
        travel_ns: latency of the links until the last of these arrives.
        delay_ns: the part of it that the links of the longest path take once.
        reduced, fill: as `Phase`.
        message: share of the collective's bytes in one message.
        idle_ns_per_byte: additional time for which senders wait.
    """

    src: Int64s
    counts: Int64s
    links: Int32s
    share: Float64s
    starts: int
    travel_ns: float
    delay_ns: float
    reduced: float
    fill: float
    narrowest: float
    message: float
    idle_ns_per_byte: float = 0.0

    def latency_ns(self, regime: Regime) -> float:
        """Return the time before the first byte of the phase arrives."""
        return self.starts * regime.alpha_ns + self.travel_ns

    def per_byte_ns(self, regime: Regime, reduce_ns_per_byte: float) -> float:
        """Return the time per byte of the collective, except on the busiest link."""
        fill = self.fill * 1e9 / self.narrowest * regime.slowdown if self.fill else 0.0
        return self.reduced * reduce_ns_per_byte + fill + self.idle_ns_per_byte


@dataclass(frozen=True, eq=False)
class Estimate:
    """An algorithm on a group: time is ``latency_ns + nbytes * ns_per_byte``.

    Attributes:
        from_bytes: sizes of the collective from which the values at the same index apply.
        latency_ns, ns_per_byte: see above.
    """

    from_bytes: tuple[float, ...]
    latency_ns: tuple[float, ...]
    ns_per_byte: tuple[float, ...]
    bottleneck: int
    sent_per_byte: float
    load: _Load

    def at(self, nbytes: float) -> tuple[float, float]:
        """Return the latency, and the nanoseconds per byte of a collective of this size."""
        which = bisect.bisect_right(self.from_bytes, nbytes) - 1
        return self.latency_ns[which], self.ns_per_byte[which]


def placed(
    topology: Topology, collective: Collective, group: Group, algo: str, alpha_ns: float
) -> list[Placed]:
    """Return the phases of an algorithm on a topology.

    Args:
        alpha_ns: software latency of a message, for algorithms that wait for a round trip.

    Raises:
        InvalidArgumentError: the cluster lacks a device, or there is no such algorithm.
        ClusterError: two devices are not connected, or only by a link without capacity; or no
            switch aggregates.
    """
    if (collective.kind, algo) == ("all_reduce", "in_network"):
        return in_network(topology, group, alpha_ns)
    servers = collective.servers
    return [
        place(topology, group, phase, servers)
        for phase in phases(collective.kind, algo, group.shape, collective.chunks, len(servers))
    ]


def place(topology: Topology, group: Group, phase: Phase, servers: tuple[int, ...] = ()) -> Placed:
    """Return the phase for every row of the group.

    Raises:
        InvalidArgumentError: the cluster lacks a device.
        ClusterError: two devices are not connected, or only by a link without capacity.
    """
    members = group.members
    if servers:
        held = np.tile(np.asarray(servers, np.int64), (group.rows, 1))
        members = np.concatenate([members, held], axis=1)
    src, dst = members[:, phase.src].reshape(-1), members[:, phase.dst].reshape(-1)
    counts, links = topology.paths(src, dst, np.arange(src.size))
    capacity = topology.capacity[links]
    dead = np.flatnonzero(capacity <= 0.0)
    if dead.size:
        owner = np.repeat(np.arange(src.size), counts)[dead[0]]
        link = int(links[dead[0]])
        raise ClusterError(
            f"link {link} ({topology.link_name(link)}) has no capacity, but is on the path from "
            f"device {src[owner]} to device {dst[owner]}",
            remedy="give the link a capacity, or the pair another route",
        )
    delay = np.zeros(src.size)
    owner = np.repeat(np.arange(src.size), counts)
    np.add.at(delay, owner, topology.latency_ns[links])
    longest = float(delay.max(initial=0.0))
    narrowest = float(capacity.min(initial=np.inf))
    share = np.tile(phase.share, group.rows)
    return Placed(
        src, counts, links, share, phase.steps, phase.steps * longest, longest, phase.reduced,
        phase.fill, narrowest, phase.message,
    )  # fmt: skip


def in_network(topology: Topology, group: Group, alpha_ns: float) -> list[Placed]:
    """Return the phase of aggregating switches: each cable carries the bytes once per direction.

    A rank sends its data and receives the sum, with one software latency each. Slots are sent whole
    and fill the tree hop by hop; no more bytes than the slots hold are in transit, so that a long
    round trip leaves cables idle. See `aggregation`.
    """
    if group.members.shape[1] == 1:
        return []
    trees = [aggregation_tree(topology, row.tolist()) for row in group.members]
    aggregator = topology.aggregator
    assert aggregator is not None
    links = np.concatenate([tree.links for tree in trees])
    share = np.concatenate([tree.streams for tree in trees])
    src = np.full(links.size, -1, np.int64)
    ends = np.flatnonzero(topology.node_kind[topology.link_src[links]] == NodeKind.DEVICE)
    src[ends] = np.searchsorted(topology.node_of_device, topology.link_src[links[ends]])
    narrowest = float(
        topology.capacity[links[topology.link_src[links] != topology.link_dst[links]]].min()
    )
    if narrowest <= 0.0:
        link = int(links[topology.capacity[links].argmin()])
        raise ClusterError(
            f"link {link} ({topology.link_name(link)}) has no capacity, but is in the tree of "
            "aggregating switches", remedy="give the link a capacity, or use another algo",
        )  # fmt: skip
    hops, delay = max(2 * t.depth for t in trees), max(t.delay_ns for t in trees)
    slot_ns = aggregator.slot_bytes * 1e9 / narrowest
    round_trip = 2 * alpha_ns + delay + hops * slot_ns
    busiest = float((share * 1e9 / topology.capacity[links]).max())
    idle = max(0.0, round_trip / (aggregator.slots * aggregator.slot_bytes) - busiest)
    return [
        Placed(src, np.ones(links.size, np.int64), links, share, 2, delay + (hops - 1) * slot_ns,
               delay, 0.0, 0.0, narrowest, 1.0, idle)
    ]  # fmt: skip


def estimate(
    topology: Topology,
    collective: Collective,
    group: Group,
    algo: str,
    regimes: Sequence[Regime],
    reduce_ns_per_byte: float,
) -> Estimate:
    """Return time and bytes of one algorithm on one group."""
    placed_phases = placed(topology, collective, group, algo, regimes[0].alpha_ns)
    starts = sorted(
        {0.0, *(s for phase in placed_phases for s in starts_of(regimes, phase.message))}
    )
    starts = [s for s in starts if s < np.inf]
    latency, slope = [0.0] * len(starts), [0.0] * len(starts)
    load = np.zeros(topology.links)
    sent = np.zeros(topology.devices)
    worst, bottleneck = 0.0, -1
    for phase in placed_phases:
        carried = np.bincount(phase.links, np.repeat(phase.share, phase.counts), topology.links)
        np.add.at(sent, phase.src[phase.src >= 0], phase.share[phase.src >= 0])
        busy = carried / np.where(topology.capacity > 0.0, topology.capacity, 1.0) * 1e9
        slowest = int(busy.argmax()) if phase.links.size else -1
        longest = float(busy[slowest]) if phase.links.size else 0.0
        for k, start in enumerate(starts):
            regime = regime_of(regimes, start, phase.message)
            latency[k] += phase.latency_ns(regime)
            slope[k] += phase.per_byte_ns(regime, reduce_ns_per_byte) + longest * regime.slowdown
        if longest > worst:
            worst, bottleneck = longest, slowest
        load += carried
    used = np.flatnonzero(load).astype(np.int32)
    return Estimate(
        tuple(starts), tuple(latency), tuple(slope), bottleneck, float(sent.max(initial=0.0)),
        _Load(topology.links, used, load[used]),
    )  # fmt: skip


def check_group(topology: Topology, group: Group) -> None:
    """Raise InvalidArgumentError if the group has devices that the cluster lacks."""
    if group.ranks > topology.devices:
        raise InvalidArgumentError(
            "group", f"has {group.ranks} ranks, but the cluster {topology.devices} devices"
        )
    wrong = group.members[(group.members < 0) | (group.members >= topology.devices)]
    if wrong.size:
        raise InvalidArgumentError(
            "group", f"contains device {wrong[0]}, but the cluster has {topology.devices}"
        )
