"""Topologies by name: every function here makes one. Links are full duplex, two for a cable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

_MAX_LINKS = 2**27


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
        self.kinds.append(kind)
        self.counts.append(count)
        return np.arange(first, first + count)

    def one_way(self, src: Int64s, dst: Int64s, kind: LinkKind) -> Int64s:
        """Links from each of `src` to each of `dst` beside it; their numbers."""
        src, dst = np.broadcast_arrays(src, dst)
        if self.links + src.size > _MAX_LINKS:
            raise InvalidArgumentError("topology", f"more than {_MAX_LINKS} links")
        if kind not in self.link_kinds:
            self.link_kinds.append(kind)
        self.src.append(src.reshape(-1))
        self.dst.append(dst.reshape(-1))
        self.link_kind.append(np.full(src.size, self.link_kinds.index(kind)))
        first, self.links = self.links, self.links + src.size
        return np.arange(first, self.links).reshape(src.shape)

    def cables(self, a: Int64s, b: Int64s, kind: LinkKind) -> tuple[Int64s, Int64s]:
        """Both directions: the links from a to b, and back."""
        return self.one_way(a, b, kind), self.one_way(b, a, kind)

    def finish(
        self,
        generator: str,
        settings: Mapping[str, Any],
        devices: Int64s,
        router: Router | Callable[[Topology], Router],
        hosts: Int64s | None = None,
        *,
        direct: bool = False,
        names: Sequence[str] | None = None,
    ) -> Topology:
        empty = [np.empty(0, np.int64)]
        link_kind = np.concatenate(self.link_kind or empty).astype(np.uint8)
        rate = np.array([kind.bytes_per_s.value for kind in self.link_kinds] or [0.0])
        delay = np.array([kind.latency_ns.value for kind in self.link_kinds] or [0.0])
        made = Topology(
            generator,
            dict(settings),
            np.repeat(np.array(self.kinds, np.uint8), self.counts),
            devices.astype(np.int32),
            (np.arange(devices.size) if hosts is None else hosts).astype(np.int32),
            np.concatenate(self.src or empty).astype(np.int32),
            np.concatenate(self.dst or empty).astype(np.int32),
            rate[link_kind],
            delay[link_kind],
            link_kind,
            tuple(self.link_kinds),
            router if not callable(router) else _NoRouter(),
            direct,
            names,
        )
        if callable(router):
            object.__setattr__(made, "router", router(made))
        return made


class _NoRouter:
    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        raise AssertionError("the router was not set")


def star(devices: int, link: LinkKind) -> Topology:
    """Every device on one non-blocking switch, by a cable of its own."""
    return _star("star", devices, link)


def nvswitch(devices: int, link: LinkKind) -> Topology:
    """The devices of one host on a switch inside it."""
    return _star("nvswitch", devices, link, np.zeros(devices, np.int64))


def loopback(devices: int, link: LinkKind) -> Topology:
    """Processes of one machine that send to each other through its memory."""
    return _star("loopback", devices, link, np.zeros(devices, np.int64))


def _star(name: str, devices: int, link: LinkKind, hosts: Int64s | None = None) -> Topology:
    _at_least("devices", devices, 1)
    wiring = _Wiring()
    ends, hub = wiring.nodes(NodeKind.DEVICE, devices), wiring.nodes(NodeKind.SWITCH, 1)
    up, down = wiring.cables(ends, hub, link)
    router = Stages(_Star(up, down))
    return wiring.finish(name, {"devices": devices, "link": link}, ends, router, hosts)


@dataclass(frozen=True)
class _Star:
    up: Int64s
    down: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        return [self.up[src], self.down[dst]]


def ring(devices: int, link: LinkKind) -> Topology:
    """Each device wired to the next, the last to the first."""
    made = torus((devices,), link)
    return _renamed(made, "ring", {"devices": devices, "link": link})


def mesh(dims: Sequence[int], link: LinkKind) -> Topology:
    """A grid without wrap-around cables."""
    made = torus(dims, link, wrap=(False,) * len(tuple(dims)))
    return _renamed(made, "mesh", {"dims": list(dims), "link": link})


def torus(
    dims: Sequence[int],
    link: LinkKind,
    wrap: Sequence[bool] | None = None,
    per_host: int = 1,
) -> Topology:
    """A grid of devices, each wired to its neighbours; the last dimension is numbered fastest.

    Args:
        wrap: per dimension, whether a cable joins its ends; by default all do. Two devices in a
            dimension are joined by one cable, wrapped or not.
        per_host: how many devices, in order of numbers, share a host.
    """
    dims = tuple(int(size) for size in dims)
    wrap = (True,) * len(dims) if wrap is None else tuple(bool(w) for w in wrap)
    if not dims or len(wrap) != len(dims):
        raise InvalidArgumentError("wrap", f"has {len(wrap)} entries for {len(dims)} dimensions")
    for size in dims:
        _at_least("dims", size, 1)
    _at_least("per_host", per_host, 1)
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
        there = np.take(ahead, np.arange(last), axis=d).reshape(-1)
        table[here, d, 0], table[there, d, 1] = wiring.cables(here, there, link)
    router = DimensionOrdered(
        dims, tuple(w and s > 2 for w, s in zip(wrap, dims, strict=True)), table
    )
    settings = {"dims": list(dims), "wrap": list(wrap), "per_host": per_host, "link": link}
    return wiring.finish("torus", settings, ends, router, ends // per_host, direct=True)


def leaf_spine(
    devices: int,
    per_leaf: int,
    spines: int,
    link: LinkKind,
    oversubscription: float = 1.0,
    uplink_latency_ns: float | None = None,
) -> Topology:
    """Two tiers: leaves with devices, every leaf on every spine. Spines are chosen by hash.

    Args:
        oversubscription: what a leaf's devices can send over what its uplinks carry; 1 is
            non-blocking.
    """
    for name, value in (("devices", devices), ("per_leaf", per_leaf), ("spines", spines)):
        _at_least(name, value, 1)
    _positive("oversubscription", oversubscription)
    leaves = -(-devices // per_leaf)
    up_rate = link.bytes_per_s.value * per_leaf / spines / oversubscription
    latency = link.latency_ns.value if uplink_latency_ns is None else uplink_latency_ns
    known = link.bytes_per_s
    uplink = LinkKind.of(
        f"{link.name} uplink", up_rate, latency, provenance=known.provenance,
        source=f"{known.source}; {per_leaf} devices over {spines} spines, "
        f"oversubscription {oversubscription:g}",
    )  # fmt: skip
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, devices)
    leaf = wiring.nodes(NodeKind.SWITCH, leaves)
    spine = wiring.nodes(NodeKind.SWITCH, spines)
    up, down = wiring.cables(ends, leaf[ends // per_leaf], link)
    rise, fall = wiring.cables(leaf[:, None], spine[None, :], uplink)
    settings = {
        "devices": devices, "per_leaf": per_leaf, "spines": spines, "link": link,
        "oversubscription": oversubscription, "uplink_latency_ns": latency,
    }  # fmt: skip
    router = Stages(_LeafSpine(per_leaf, up, down, rise, fall))
    return wiring.finish("leaf_spine", settings, ends, router)


@dataclass(frozen=True)
class _LeafSpine:
    per_leaf: int
    up: Int64s
    down: Int64s
    rise: Int64s
    fall: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        a, b = src // self.per_leaf, dst // self.per_leaf
        spine = (spread(src, dst, key) % np.uint64(self.rise.shape[1])).astype(np.int64)
        far = a != b
        return [
            self.up[src],
            np.where(far, self.rise[a, spine], -1),
            np.where(far, self.fall[b, spine], -1),
            self.down[dst],
        ]


def fat_tree(k: int, link: LinkKind) -> Topology:
    """Three tiers of k-port switches for k^3 / 4 devices, non-blocking; paths chosen by hash.

    Source: Al-Fares, Loukissas, Vahdat, "A scalable, commodity data center network
    architecture", SIGCOMM 2008.
    """
    _at_least("k", k, 2)
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
    router = Stages(_FatTree(half, up, down, *rise, *top))
    return wiring.finish("fat_tree", {"k": k, "link": link}, ends, router)


@dataclass(frozen=True)
class _FatTree:
    half: int
    up: Int64s
    down: Int64s
    rise: Int64s
    fall: Int64s
    climb: Int64s
    sink: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        half = self.half
        pod, to_pod = src // half**2, dst // half**2
        edge, to_edge = src // half % half, dst // half % half
        choice = spread(src, dst, key)
        middle = (choice % np.uint64(half)).astype(np.int64)
        core = (choice // np.uint64(half) % np.uint64(half)).astype(np.int64)
        leaves_edge = (pod != to_pod) | (edge != to_edge)
        leaves_pod = pod != to_pod
        return [
            self.up[src],
            np.where(leaves_edge, self.rise[pod, edge, middle], -1),
            np.where(leaves_pod, self.climb[pod, middle, core], -1),
            np.where(leaves_pod, self.sink[to_pod, middle, core], -1),
            np.where(leaves_edge, self.fall[to_pod, to_edge, middle], -1),
            self.down[dst],
        ]


def gpu_hosts(hosts: int, gpus: int, inside: LinkKind, pcie: LinkKind, nic: LinkKind) -> Topology:
    """Hosts of several devices joined inside by a switch, with one network card a host.

    Args:
        inside: from a device to the switch in its host.
        pcie: from a device to its host.
        nic: from a host to the one, non-blocking, switch of the cluster.
    """
    _at_least("hosts", hosts, 1)
    _at_least("gpus", gpus, 1)
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, hosts * gpus)
    inner = wiring.nodes(NodeKind.SWITCH, hosts)
    machine = wiring.nodes(NodeKind.HOST, hosts)
    fabric = wiring.nodes(NodeKind.SWITCH, 1)
    host = ends // gpus
    near = wiring.cables(ends, inner[host], inside)
    out = wiring.cables(ends, machine[host], pcie)
    card = wiring.cables(machine, fabric, nic)
    settings = {"hosts": hosts, "gpus": gpus, "inside": inside, "pcie": pcie, "nic": nic}
    router = Stages(_GpuHosts(gpus, *near, *out, *card))
    return wiring.finish("gpu_hosts", settings, ends, router, host)


@dataclass(frozen=True)
class _GpuHosts:
    gpus: int
    up: Int64s
    down: Int64s
    leave: Int64s
    enter: Int64s
    send: Int64s
    receive: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        a, b = src // self.gpus, dst // self.gpus
        far = a != b
        return [
            np.where(far, self.leave[src], self.up[src]),
            np.where(far, self.send[a], -1),
            np.where(far, self.receive[b], -1),
            np.where(far, self.enter[dst], self.down[dst]),
        ]


def rail(hosts: int, gpus: int, inside: LinkKind, nic: LinkKind) -> Topology:
    """A network card for every device, and one switch for the g-th devices of all hosts.

    What goes to another rail crosses over inside the sending host first.
    """
    _at_least("hosts", hosts, 1)
    _at_least("gpus", gpus, 1)
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, hosts * gpus)
    inner = wiring.nodes(NodeKind.SWITCH, hosts)
    rails = wiring.nodes(NodeKind.SWITCH, gpus)
    near = wiring.cables(ends, inner[ends // gpus], inside)
    out = wiring.cables(ends, rails[ends % gpus], nic)
    settings = {"hosts": hosts, "gpus": gpus, "inside": inside, "nic": nic}
    router = Stages(_Rail(gpus, *near, *out))
    return wiring.finish("rail", settings, ends, router, ends // gpus)


@dataclass(frozen=True)
class _Rail:
    gpus: int
    up: Int64s
    down: Int64s
    send: Int64s
    receive: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        far = src // self.gpus != dst // self.gpus
        crosses = src % self.gpus != dst % self.gpus
        peer = src // self.gpus * self.gpus + dst % self.gpus
        inside = ~far | crosses
        return [
            np.where(inside, self.up[src], -1),
            np.where(inside, self.down[np.where(far, peer, dst)], -1),
            np.where(far, self.send[peer], -1),
            np.where(far, self.receive[dst], -1),
        ]


def dragonfly(
    groups: int, routers: int, devices_per_router: int, link: LinkKind, long_link: LinkKind
) -> Topology:
    """Groups of fully joined routers, one long cable between any two groups; minimal routes.

    Source: Kim, Dally, Scott, Abts, "Technology-driven, highly-scalable dragonfly topology",
    ISCA 2008.
    """
    for name, value in (("groups", groups), ("routers", routers)):
        _at_least(name, value, 1)
    _at_least("devices_per_router", devices_per_router, 1)
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, groups * routers * devices_per_router)
    switch = wiring.nodes(NodeKind.SWITCH, groups * routers)
    up, down = wiring.cables(ends, switch[ends // devices_per_router], link)
    local = np.full((groups, routers, routers), -1)
    a, b = np.nonzero(~np.eye(routers, dtype=bool))
    for one in range(groups):
        base = one * routers
        local[one, a, b] = wiring.one_way(switch[base + a], switch[base + b], link)
    # The cables of a group, to the groups after it in a circle, are dealt out to its routers.
    ports = max(1, -(-(groups - 1) // routers))
    far = np.full((groups, groups), -1)
    gate = np.zeros((groups, groups), np.int64)
    g, h = np.nonzero(~np.eye(groups, dtype=bool))
    gate[g, h] = (h - g - 1) % groups // ports
    far[g, h] = wiring.one_way(
        switch[g * routers + gate[g, h]], switch[h * routers + gate[h, g]], long_link
    )
    settings = {
        "groups": groups, "routers": routers, "devices_per_router": devices_per_router,
        "link": link, "long_link": long_link,
    }  # fmt: skip
    router = Stages(_Dragonfly(routers, devices_per_router, up, down, local, far, gate))
    return wiring.finish("dragonfly", settings, ends, router)


@dataclass(frozen=True)
class _Dragonfly:
    routers: int
    devices: int
    up: Int64s
    down: Int64s
    local: Int64s
    far: Int64s
    gate: Int64s

    def __call__(self, src: Int64s, dst: Int64s, key: Int64s) -> list[Int64s]:
        a, b = src // self.devices, dst // self.devices
        g, h, r, s = a // self.routers, b // self.routers, a % self.routers, b % self.routers
        leaves = g != h
        out, into = np.where(leaves, self.gate[g, h], s), np.where(leaves, self.gate[h, g], s)
        return [
            self.up[src],
            self.local[g, r, out],
            self.far[g, h],
            np.where(leaves, self.local[h, into, s], -1),
            self.down[dst],
        ]


def islands(parts: Sequence[Topology], pcie: LinkKind, nic: LinkKind) -> Topology:
    """Several networks whose hosts are joined by another one (a data-centre network).

    Args:
        pcie: from a device to its host.
        nic: from a host to the switch that joins all hosts.
    """
    if not parts:
        raise InvalidArgumentError("parts", "is empty; an island is a topology")
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
        # In the order they have there, so that the part's routes hold with an offset.
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
    settings = {"parts": list(parts), "pcie": pcie, "nic": nic}
    return wiring.finish(
        "islands", settings, ends, router, host, direct=all(part.direct for part in parts)
    )


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


def from_edges(
    edges: Sequence[tuple[str, str, LinkKind]],
    devices: Sequence[str],
    *,
    both_ways: bool = True,
) -> Topology:
    """Any graph. Paths have the fewest links; among equal ones a hash chooses.

    Args:
        edges: (node, node, kind of link); nodes that are not in `devices` are switches.
        devices: names of the nodes that compute, in the order of their numbers.
        both_ways: an edge is a full-duplex cable; else one direction only.
    """
    if not devices:
        raise InvalidArgumentError("devices", "is empty")
    if len(set(devices)) != len(devices):
        raise InvalidArgumentError("devices", "names a device twice")
    names = list(dict.fromkeys([*devices, *(end for a, b, _ in edges for end in (a, b))]))
    number = {name: n for n, name in enumerate(names)}
    wiring = _Wiring()
    ends = wiring.nodes(NodeKind.DEVICE, len(devices))
    wiring.nodes(NodeKind.SWITCH, len(names) - len(devices))
    for a, b, kind in edges:
        if a == b:
            raise InvalidArgumentError("edges", f"'{a}' is joined to itself")
        join = wiring.cables if both_ways else wiring.one_way
        join(np.array([number[a]]), np.array([number[b]]), kind)
    settings = {"edges": list(edges), "devices": list(devices), "both_ways": both_ways}
    return wiring.finish("from_edges", settings, ends, _shortest, names=names)


def _shortest(topology: Topology) -> Router:
    into = np.argsort(topology.link_dst, kind="stable").astype(np.int32)
    offset = np.zeros(topology.nodes + 1, np.int64)
    np.cumsum(np.bincount(topology.link_dst, minlength=topology.nodes), out=offset[1:])
    return Shortest(
        topology.node_of_device, *topology.out_links, topology.link_dst, offset, into,
        topology.link_src,
    )  # fmt: skip


def _renamed(topology: Topology, generator: str, settings: dict[str, Any]) -> Topology:
    object.__setattr__(topology, "generator", generator)
    object.__setattr__(topology, "settings", settings)
    return topology


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InvalidArgumentError(name, f"{value!r} is not a whole number from {low} up")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise InvalidArgumentError(name, f"{value} is not a positive number")


GENERATORS: Mapping[str, Callable[..., Topology]] = {
    function.__name__: function
    for function in (
        dragonfly, fat_tree, from_edges, gpu_hosts, islands, leaf_spine, loopback, mesh, nvswitch,
        rail, ring, star, torus,
    )
}  # fmt: skip
"""By name, as TOML files name them."""
