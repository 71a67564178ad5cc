"""Generators of topologies. Links are full duplex: two per cable."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec

import numpy as np

from slipstream.cluster.routing import (
    DimensionOrdered,
    Int64s,
    Paths,
    Router,
    Shortest,
    Stages,
    merge,
    spread,
)
from slipstream.cluster.topology import LinkKind, NodeKind, Topology
from slipstream.errors import InvalidArgumentError

_MAX_SIZE = 2**27


@dataclass
class _Wiring:
    """Collects nodes and links."""

    kinds: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    src: list[Int64s] = field(default_factory=list)
    dst: list[Int64s] = field(default_factory=list)
    link_kinds: list[LinkKind] = field(default_factory=list)
    link_kind: list[Int64s] = field(default_factory=list)
    links: int = 0

    def nodes(self, kind: NodeKind, count: int) -> Int64s:
        first = sum(self.counts)
        _check_size(first + count, "nodes")
        self.kinds.append(kind)
        self.counts.append(count)
        return np.arange(first, first + count)

    def one_way(self, src: Int64s, dst: Int64s, kind: LinkKind) -> Int64s:
        """Add links from each of `src` to the corresponding `dst`; return their numbers."""
        src, dst = np.broadcast_arrays(src, dst)
        _check_size(self.links + src.size, "links")
        if kind not in self.link_kinds:
            self.link_kinds.append(kind)
        self.src.append(src.reshape(-1))
        self.dst.append(dst.reshape(-1))
        self.link_kind.append(np.full(src.size, self.link_kinds.index(kind)))
        first, self.links = self.links, self.links + src.size
        return np.arange(first, self.links).reshape(src.shape)

    def cables(self, a: Int64s, b: Int64s, kind: LinkKind) -> tuple[Int64s, Int64s]:
        """Add both directions; return the links from a to b, and back."""
        return self.one_way(a, b, kind), self.one_way(b, a, kind)

    def finish(
        self,
        devices: Int64s,
        router: Router | None,
        hosts: Int64s | None = None,
        *,
        direct: bool = False,
        names: Sequence[str] | None = None,
    ) -> Topology:
        """Return the topology of all nodes and links; without a router, paths are `Shortest`."""
        empty = [np.empty(0, np.int64)]
        node_kind = np.repeat(np.array(self.kinds, np.uint8), self.counts)
        node_of_device = devices.astype(np.int32)
        src, dst = (np.concatenate(e or empty).astype(np.int32) for e in (self.src, self.dst))
        link_kind = np.concatenate(self.link_kind or empty).astype(np.uint8)
        rate = np.array([kind.bytes_per_s.value for kind in self.link_kinds] or [0.0])
        delay = np.array([kind.latency_ns.value for kind in self.link_kinds] or [0.0])
        return Topology(
            "", {}, node_kind, node_of_device,
            (np.arange(devices.size) if hosts is None else hosts).astype(np.int32),
            src, dst, rate[link_kind], delay[link_kind], link_kind, tuple(self.link_kinds),
            router or Shortest.over(node_of_device, src, dst, node_kind.size), direct, names,
        )  # fmt: skip


_Settings = ParamSpec("_Settings")


def _generator(make: Callable[_Settings, Topology]) -> Callable[_Settings, Topology]:
    """Register a generator, whose topologies record its arguments; integers must be positive."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def generate(*arguments: _Settings.args, **named: _Settings.kwargs) -> Topology:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if signature.parameters[name].annotation == "int":
                _at_least_one(name, value)
        settings = {name: value for name, value in bound.arguments.items() if value is not None}
        return replace(make(*arguments, **named), generator=make.__name__, settings=settings)

    GENERATORS[make.__name__] = generate
    return generate


GENERATORS: dict[str, Callable[..., Topology]] = {}
"""Generators by name, as TOML files name them."""


@_generator
def star(devices: int, link: LinkKind) -> Topology:
    """Connect every device to one non-blocking switch by its own cable."""
    return _star(devices, link)


@_generator
def nvswitch(devices: int, link: LinkKind) -> Topology:
    """Connect the devices of one host by a switch inside it."""
    return _star(devices, link, np.zeros(devices, np.int64))


@_generator
def loopback(devices: int, link: LinkKind) -> Topology:
    """Connect processes of one machine that communicate through its memory."""
    return _star(devices, link, np.zeros(devices, np.int64))


def _star(devices: int, link: LinkKind, hosts: Int64s | None = None) -> Topology:
    wiring = _Wiring()
    ends, hub = wiring.nodes(NodeKind.DEVICE, devices), wiring.nodes(NodeKind.SWITCH, 1)
    return wiring.finish(ends, Stages(_star_hops, wiring.cables(ends, hub, link)), hosts)


def _star_hops(src: Int64s, dst: Int64s, key: Int64s, up: Int64s, down: Int64s) -> list[Int64s]:
    return [up[src], down[dst]]


@_generator
def ring(devices: int, link: LinkKind) -> Topology:
    """Connect each device to the next, and the last to the first."""
    return torus((devices,), link)


@_generator
def mesh(dims: Sequence[int], link: LinkKind) -> Topology:
    """Connect devices in a grid without wrap-around cables."""
    return torus(dims, link, wrap=(False,) * len(tuple(dims)))


@_generator
def torus(
    dims: Sequence[int],
    link: LinkKind,
    wrap: Sequence[bool] | None = None,
    per_host: int = 1,
) -> Topology:
    """Connect devices in a grid to their neighbours; the last dimension is numbered fastest.

    Args:
        wrap: per dimension, whether a cable connects its ends; by default all do. Two devices in a
            dimension are connected by one cable, wrapped or not.
        per_host: number of devices, in order of numbers, that share a host.
    """
    dims = tuple(int(size) for size in dims)
    wrap = (True,) * len(dims) if wrap is None else tuple(bool(w) for w in wrap)
    if not dims or len(wrap) != len(dims):
        raise InvalidArgumentError("wrap", f"has {len(wrap)} entries for {len(dims)} dimensions")
    for size in dims:
        _at_least_one("dims", size)
    wiring = _Wiring()
    count = math.prod(dims)
    ends = wiring.nodes(NodeKind.DEVICE, count)
    grid = ends.reshape(dims)
    table = np.full((count, len(dims), 2), -1, np.int32)
    for d, size in enumerate(dims):
        if size == 1:
            continue
        ahead = np.roll(grid, -1, axis=d)
        last = size if wrap[d] and size > 2 else size - 1
        here = np.take(grid, np.arange(last), axis=d).reshape(-1)
        next_ = np.take(ahead, np.arange(last), axis=d).reshape(-1)
        table[here, d, 0], table[next_, d, 1] = wiring.cables(here, next_, link)
    router = DimensionOrdered(
        dims, tuple(w and s > 2 for w, s in zip(wrap, dims, strict=True)), table
    )
    return wiring.finish(ends, router, ends // per_host, direct=True)


@_generator
def leaf_spine(
    devices: int,
    per_leaf: int,
    spines: int,
    link: LinkKind,
    oversubscription: float = 1.0,
    uplink_latency_ns: float | None = None,
) -> Topology:
    """Connect devices to leaves, and every leaf to every spine. Spines are chosen by hash.

    Args:
        oversubscription: bandwidth of a leaf's devices over that of its uplinks; 1 is
            non-blocking.
    """
    if not (math.isfinite(oversubscription) and oversubscription > 0.0):
        raise InvalidArgumentError(
            "oversubscription", f"{oversubscription} is not a positive number"
        )
    leaves = -(-devices // per_leaf)
    up_rate = link.bytes_per_s.value * per_leaf / spines / oversubscription
    latency = link.latency_ns.value if uplink_latency_ns is None else uplink_latency_ns
    rate = link.bytes_per_s
    uplink = LinkKind.of(
        f"{link.name} uplink", up_rate, latency, provenance=rate.provenance,
        source=f"{rate.source}; {per_leaf} devices over {spines} spines, "
        f"oversubscription {oversubscription:g}",
    )  # fmt: skip
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, devices)
    leaf = wiring.nodes(NodeKind.SWITCH, leaves)
    spine = wiring.nodes(NodeKind.SWITCH, spines)
    up, down = wiring.cables(ends, leaf[ends // per_leaf], link)
    rise, fall = wiring.cables(leaf[:, None], spine[None, :], uplink)
    router = Stages(_leaf_spine_hops, (per_leaf, up, down, rise, fall))
    return wiring.finish(ends, router)


def _leaf_spine_hops(
    src: Int64s, dst: Int64s, key: Int64s, per_leaf: int, up: Int64s, down: Int64s, rise: Int64s,
    fall: Int64s,
) -> list[Int64s]:  # fmt: skip
    a, b = src // per_leaf, dst // per_leaf
    spine = (spread(src, dst, key) % np.uint64(rise.shape[1])).astype(np.int64)
    far = a != b
    return [
        up[src],
        np.where(far, rise[a, spine], -1),
        np.where(far, fall[b, spine], -1),
        down[dst],
    ]


@_generator
def fat_tree(k: int, link: LinkKind) -> Topology:
    """Connect k^3 / 4 devices by three non-blocking tiers of k-port switches; paths are hashed.

    Source: Al-Fares, Loukissas, Vahdat, "A scalable, commodity data center network
    architecture", SIGCOMM 2008.
    """
    if k % 2:
        raise InvalidArgumentError("k", f"{k} is odd; a fat tree has switches of even radix")
    half, wiring = k // 2, _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, k * half * half)
    edge = wiring.nodes(NodeKind.SWITCH, k * half).reshape(k, half)
    middle = wiring.nodes(NodeKind.SWITCH, k * half).reshape(k, half)
    core = wiring.nodes(NodeKind.SWITCH, half * half).reshape(half, half)
    up, down = wiring.cables(ends, edge.reshape(-1)[ends // half], link)
    rise = wiring.cables(edge[:, :, None], middle[:, None, :], link)
    top = wiring.cables(middle[:, :, None], core[None, :, :], link)
    router = Stages(_fat_tree_hops, (half, up, down, *rise, *top))
    return wiring.finish(ends, router)


def _fat_tree_hops(
    src: Int64s, dst: Int64s, key: Int64s, half: int, up: Int64s, down: Int64s, rise: Int64s, fall:
    Int64s, climb: Int64s, sink: Int64s,
) -> list[Int64s]:  # fmt: skip
    pod, to_pod = src // half**2, dst // half**2
    edge, to_edge = src // half % half, dst // half % half
    choice = spread(src, dst, key)
    middle = (choice % np.uint64(half)).astype(np.int64)
    core = (choice // np.uint64(half) % np.uint64(half)).astype(np.int64)
    leaves_edge = (pod != to_pod) | (edge != to_edge)
    leaves_pod = pod != to_pod
    return [
        up[src],
        np.where(leaves_edge, rise[pod, edge, middle], -1),
        np.where(leaves_pod, climb[pod, middle, core], -1),
        np.where(leaves_pod, sink[to_pod, middle, core], -1),
        np.where(leaves_edge, fall[to_pod, to_edge, middle], -1),
        down[dst],
    ]


@_generator
def gpu_hosts(hosts: int, gpus: int, inside: LinkKind, pcie: LinkKind, nic: LinkKind) -> Topology:
    """Connect devices of a host by a switch, and hosts by one network card each.

    Args:
        inside: from a device to the switch in its host.
        pcie: from a device to its host.
        nic: from a host to the only, non-blocking, switch of the cluster.
    """
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, hosts * gpus)
    inner = wiring.nodes(NodeKind.SWITCH, hosts)
    machine = wiring.nodes(NodeKind.HOST, hosts)
    fabric = wiring.nodes(NodeKind.SWITCH, 1)
    host = ends // gpus
    near = wiring.cables(ends, inner[host], inside)
    out = wiring.cables(ends, machine[host], pcie)
    card = wiring.cables(machine, fabric, nic)
    router = Stages(_gpu_hosts_hops, (gpus, *near, *out, *card))
    return wiring.finish(ends, router, host)


def _gpu_hosts_hops(
    src: Int64s, dst: Int64s, key: Int64s, gpus: int, up: Int64s, down: Int64s, leave: Int64s,
    enter: Int64s, send: Int64s, receive: Int64s,
) -> list[Int64s]:  # fmt: skip
    a, b = src // gpus, dst // gpus
    far = a != b
    return [
        np.where(far, leave[src], up[src]),
        np.where(far, send[a], -1),
        np.where(far, receive[b], -1),
        np.where(far, enter[dst], down[dst]),
    ]


@_generator
def rail(hosts: int, gpus: int, inside: LinkKind, nic: LinkKind) -> Topology:
    """Give every device a network card, and connect the g-th devices of all hosts by a switch.

    Transfers to another rail cross over inside the sending host first.
    """
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, hosts * gpus)
    inner = wiring.nodes(NodeKind.SWITCH, hosts)
    rails = wiring.nodes(NodeKind.SWITCH, gpus)
    near = wiring.cables(ends, inner[ends // gpus], inside)
    out = wiring.cables(ends, rails[ends % gpus], nic)
    router = Stages(_rail_hops, (gpus, *near, *out))
    return wiring.finish(ends, router, ends // gpus)


def _rail_hops(
    src: Int64s, dst: Int64s, key: Int64s, gpus: int, up: Int64s, down: Int64s, send: Int64s,
    receive: Int64s,
) -> list[Int64s]:  # fmt: skip
    far = src // gpus != dst // gpus
    crosses = src % gpus != dst % gpus
    peer = src // gpus * gpus + dst % gpus
    inside = ~far | crosses
    return [
        np.where(inside, up[src], -1),
        np.where(inside, down[np.where(far, peer, dst)], -1),
        np.where(far, send[peer], -1),
        np.where(far, receive[dst], -1),
    ]


@_generator
def dragonfly(
    groups: int, routers: int, devices_per_router: int, link: LinkKind, long_link: LinkKind
) -> Topology:
    """Connect groups of fully connected routers by one long cable per pair; minimal routes.

    Source: Kim, Dally, Scott, Abts, "Technology-driven, highly-scalable dragonfly topology",
    ISCA 2008.
    """
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, groups * routers * devices_per_router)
    switch = wiring.nodes(NodeKind.SWITCH, groups * routers)
    up, down = wiring.cables(ends, switch[ends // devices_per_router], link)
    _check_size(groups * routers**2 + groups**2, "links")
    local = np.full((groups, routers, routers), -1)
    a, b = np.nonzero(~np.eye(routers, dtype=bool))
    for group in range(groups):
        base = group * routers
        local[group, a, b] = wiring.one_way(switch[base + a], switch[base + b], link)
    # The cables of a group, to the following groups in a circle, are distributed over its routers.
    ports = max(1, -(-(groups - 1) // routers))
    far = np.full((groups, groups), -1)
    gate = np.zeros((groups, groups), np.int64)
    g, h = np.nonzero(~np.eye(groups, dtype=bool))
    gate[g, h] = (h - g - 1) % groups // ports
    far[g, h] = wiring.one_way(
        switch[g * routers + gate[g, h]], switch[h * routers + gate[h, g]], long_link
    )
    router = Stages(_dragonfly_hops, (routers, devices_per_router, up, down, local, far, gate))
    return wiring.finish(ends, router)


def _dragonfly_hops(
    src: Int64s, dst: Int64s, key: Int64s, routers: int, devices: int, up: Int64s, down: Int64s,
    local: Int64s, far: Int64s, gate: Int64s,
) -> list[Int64s]:  # fmt: skip
    a, b = src // devices, dst // devices
    g, h, r, s = a // routers, b // routers, a % routers, b % routers
    leaves = g != h
    out, into = np.where(leaves, gate[g, h], s), np.where(leaves, gate[h, g], s)
    return [
        up[src],
        local[g, r, out],
        far[g, h],
        np.where(leaves, local[h, into, s], -1),
        down[dst],
    ]


@_generator
def islands(parts: Sequence[Topology], pcie: LinkKind, nic: LinkKind) -> Topology:
    """Connect the hosts of several networks by another one (a data-centre network).

    Args:
        pcie: from a device to its host.
        nic: from a host to the switch that connects all hosts.
    """
    if not parts:
        raise InvalidArgumentError("parts", "is empty; pass a topology per island")
    wiring = _Wiring()
    sizes = [part.devices for part in parts]
    first_device = np.cumsum([0, *sizes])
    first_host = np.cumsum([0, *(part.hosts for part in parts)])
    ends = wiring.nodes(NodeKind.DEVICE, int(first_device[-1]))
    first_link = []
    for part, start in zip(parts, first_device, strict=False):
        number = np.full(part.nodes, -1)
        number[part.node_of_device] = ends[start : start + part.devices]
        others = np.flatnonzero(number < 0)
        for node in others:
            number[node] = wiring.nodes(NodeKind(int(part.node_kind[node])), 1)[0]
        first_link.append(wiring.links)
        # In their original order, so that the part's routes hold with an offset.
        changes = np.flatnonzero(np.diff(part.link_kind)) + 1
        for run in np.split(np.arange(part.links), changes) if part.links else ():
            kind = part.link_kinds[int(part.link_kind[run[0]])]
            wiring.one_way(number[part.link_src[run]], number[part.link_dst[run]], kind)
    host = np.concatenate(
        [part.host_of_device + first for part, first in zip(parts, first_host, strict=False)]
    )
    machine = wiring.nodes(NodeKind.HOST, int(first_host[-1]))
    hub = wiring.nodes(NodeKind.SWITCH, 1)
    out = wiring.cables(ends, machine[host], pcie)
    card = wiring.cables(machine, hub, nic)
    router = _Islands(
        tuple(part.router for part in parts), first_device, np.array(first_link), host, *out, *card
    )
    return wiring.finish(ends, router, host, direct=all(part.direct for part in parts))


@dataclass(frozen=True)
class _Islands:
    routers: tuple[Router, ...]
    first_device: Int64s
    first_link: Int64s
    host: Int64s
    leave: Int64s
    enter: Int64s
    send: Int64s
    receive: Int64s

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        part = np.searchsorted(self.first_device, src, side="right") - 1
        other = np.searchsorted(self.first_device, dst, side="right") - 1
        far = np.flatnonzero(part != other)
        across = Stages(self._across).paths(src[far], dst[far], key[far])
        parts = [(far, across)]
        for p, router in enumerate(self.routers):
            inside = np.flatnonzero((part == p) & (other == p))
            if inside.size:
                first = self.first_device[p]
                counts, links = router.paths(src[inside] - first, dst[inside] - first, key[inside])
                parts.append((inside, (counts, (links + self.first_link[p]).astype(np.int32))))
        return merge(src.size, parts)

    def _across(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        a, b = self.host[src], self.host[dst]
        apart = a != b
        return [
            self.leave[src],
            np.where(apart, self.send[a], -1),
            np.where(apart, self.receive[b], -1),
            self.enter[dst],
        ]


@_generator
def from_edges(
    edges: Sequence[tuple[str, str, LinkKind]],
    devices: Sequence[str],
    *,
    both_ways: bool = True,
) -> Topology:
    """Build any graph. Paths have the fewest links; among equal ones a hash chooses.

    Args:
        edges: (node, node, kind of link); nodes that are not in `devices` are switches.
        devices: names of the nodes that compute, in the order of their numbers.
        both_ways: whether an edge is a full-duplex cable, or only one direction.
    """
    if not devices:
        raise InvalidArgumentError("devices", "is empty")
    if len(set(devices)) != len(devices):
        raise InvalidArgumentError("devices", "contains a device twice")
    names = list(dict.fromkeys([*devices, *(end for a, b, _ in edges for end in (a, b))]))
    number = {name: n for n, name in enumerate(names)}
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, len(devices))
    wiring.nodes(NodeKind.SWITCH, len(names) - len(devices))
    for a, b, kind in edges:
        if a == b:
            raise InvalidArgumentError("edges", f"'{a}' is connected to itself")
        join = wiring.cables if both_ways else wiring.one_way
        join(np.array([number[a]]), np.array([number[b]]), kind)
    return wiring.finish(ends, None, names=names)


def _check_size(count: int, things: str) -> None:
    if count > _MAX_SIZE:
        raise InvalidArgumentError(
            "topology", f"more than {_MAX_SIZE:,} {things}", remedy="use fewer hosts or devices"
        )


def _at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidArgumentError(
            name, f"{value!r} is not a positive integer", remedy="pass a number such as 8"
        )
