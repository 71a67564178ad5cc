"""Nodes, directed links, and routes over them."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.cluster.errors import ClusterError
from slipstream.cluster.quantity import NOT_GIVEN, Quantity
from slipstream.cluster.routing import Explicit, Int32s, Paths, Router
from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance

Float64s = npt.NDArray[np.float64]


class NodeKind(enum.IntEnum):
    DEVICE = 0
    SWITCH = 1
    HOST = 2


@dataclass(frozen=True)
class LinkKind:
    """Common properties of links of one kind.

    Attributes:
        name: ``"nvlink"``, ``"100gbe"``.
        bytes_per_s: usable payload bandwidth of one direction.
        latency_ns: time from one end to the other, for the first byte.
    """

    name: str
    bytes_per_s: Quantity
    latency_ns: Quantity = NOT_GIVEN

    @classmethod
    def of(
        cls,
        name: str,
        bytes_per_s: float,
        latency_ns: float = 0.0,
        *,
        provenance: Provenance = Provenance.USER,
        source: str = "",
    ) -> LinkKind:
        """Return a kind with both numbers from one source."""
        return cls(
            name,
            Quantity(bytes_per_s, provenance, source),
            Quantity(latency_ns, provenance, source),
        )


@dataclass(frozen=True)
class Aggregator:
    """Resources of a switch that sums data from ranks.

    Attributes:
        slots: number of sums in progress.
        slot_bytes: size of a slot, which is sent whole.
        bytes_per_s: rate of summation, whatever the number of ranks.
    """

    slots: int
    slot_bytes: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("slots", "slot_bytes", "bytes_per_s"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise InvalidArgumentError(
                    f"aggregator.{name}",
                    f"{value} is not positive",
                    remedy="pass a number such as 1024",
                )


@dataclass(frozen=True)
class Link:
    """One direction of a cable, as `Topology.link` shows it."""

    id: int
    name: str
    src: int
    dst: int
    bytes_per_s: float
    latency_ns: float
    kind: LinkKind


@dataclass(frozen=True)
class Node:
    """A device, switch or host, as `Topology.node` shows it."""

    id: int
    name: str
    kind: NodeKind


@dataclass(frozen=True, eq=False)
class Topology:
    """A network. Devices are numbered from 0 to `devices` - 1, independently of nodes.

    Made by the functions of `slipstream.cluster.generators`.

    Attributes:
        generator, settings: its generator and arguments, for saving.
        node_kind: uint8 [nodes] of `NodeKind`.
        node_of_device: int32 [devices].
        host_of_device: int32 [devices]; the machine of each device.
        link_src, link_dst: int32 [links], nodes.
        capacity: float64 [links], bytes per second of this direction.
        latency_ns: float64 [links].
        link_kind: uint8 [links], into `link_kinds`.
        router: finds paths.
        direct: whether devices are connected without switches (a torus).
        node_names: [nodes]; None without names.
        aggregator: properties of aggregating switches, which have links to themselves of that rate.
    """

    generator: str
    settings: Mapping[str, Any]
    node_kind: npt.NDArray[np.uint8]
    node_of_device: Int32s
    host_of_device: Int32s
    link_src: Int32s
    link_dst: Int32s
    capacity: Float64s
    latency_ns: Float64s
    link_kind: npt.NDArray[np.uint8]
    link_kinds: tuple[LinkKind, ...]
    router: Router
    direct: bool = False
    node_names: Sequence[str] | None = field(default=None)
    aggregator: Aggregator | None = None

    @property
    def devices(self) -> int:
        return self.node_of_device.size

    @property
    def nodes(self) -> int:
        return self.node_kind.size

    @property
    def links(self) -> int:
        return self.link_src.size

    @property
    def hosts(self) -> int:
        return int(self.host_of_device.max()) + 1

    def node_name(self, node: int) -> str:
        """Return ``device 3``, ``switch 0``, or the node's given name."""
        if self.node_names is not None:
            return self.node_names[node]
        kind = NodeKind(int(self.node_kind[node]))
        if kind is NodeKind.DEVICE:
            return f"device {int(np.searchsorted(self.node_of_device, node))}"
        first = int(np.argmax(self.node_kind == kind))
        return f"{kind.name.lower()} {node - first}"

    def link_name(self, link: int) -> str:
        """Return ``device 3 -> switch 0``."""
        src, dst = int(self.link_src[link]), int(self.link_dst[link])
        return f"{self.node_name(src)} -> {self.node_name(dst)}"

    def node(self, node: int) -> Node:
        _in_range("node", node, self.nodes)
        return Node(node, self.node_name(node), NodeKind(int(self.node_kind[node])))

    def link(self, link: int) -> Link:
        _in_range("link", link, self.links)
        return Link(
            link,
            self.link_name(link),
            int(self.link_src[link]),
            int(self.link_dst[link]),
            float(self.capacity[link]),
            float(self.latency_ns[link]),
            self.link_kinds[int(self.link_kind[link])],
        )

    def paths(
        self,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        key: npt.ArrayLike | None = None,
    ) -> Paths:
        """Return the links between pairs of devices; none from a device to itself.

        Args:
            src, dst: int [pairs].
            key: int [pairs]; distinguishes flows of one pair if several paths are equal.

        Returns:
            The number of links of each path, int64 [pairs], and all links in order, int32.

        Raises:
            InvalidArgumentError: a device does not exist.
            ClusterError: two devices are not connected.
        """
        source, target = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        for name, values in (("src", source), ("dst", target)):
            wrong = np.flatnonzero((values < 0) | (values >= self.devices))
            if wrong.size:
                _in_range(name, int(values[wrong[0]]), self.devices, "device")
        keys = np.zeros(source.size, np.int64) if key is None else np.asarray(key, np.int64)
        distinct = np.flatnonzero(source != target)
        if distinct.size == source.size:
            return self.router.paths(source, target, keys)
        counts = np.zeros(source.size, np.int64)
        if distinct.size == 0:
            return counts, np.empty(0, np.int32)
        counts[distinct], links = self.router.paths(
            source[distinct], target[distinct], keys[distinct]
        )
        return counts, links

    def route(self, src: int, dst: int, key: int = 0) -> list[int]:
        """Return the link numbers of one path, in order."""
        links: list[int] = self.paths([src], [dst], [key])[1].tolist()
        return links

    def with_routes(self, table: Mapping[tuple[int, int], Sequence[int]]) -> Topology:
        """Return a copy with the routes of `table` for some pairs of devices.

        Raises:
            ClusterError: links do not lead from one device to the other.
        """
        for (src, dst), path in table.items():
            _in_range("device", src, self.devices)
            _in_range("device", dst, self.devices)
            at = int(self.node_of_device[src])
            for link in path:
                _in_range("link", link, self.links)
                if int(self.link_src[link]) != at:
                    raise ClusterError(
                        f"the route from device {src} to device {dst} is broken at link {link} "
                        f"({self.link_name(link)}): it was at {self.node_name(at)}"
                    )
                at = int(self.link_dst[link])
            if at != int(self.node_of_device[dst]):
                raise ClusterError(
                    f"the route from device {src} to device {dst} ends at {self.node_name(at)}"
                )
        routes = [[s, d, *map(int, path)] for (s, d), path in table.items()]
        return replace(
            self,
            settings={**self.settings, "routes": routes},
            router=Explicit({pair: tuple(path) for pair, path in table.items()}, self.router),
        )

    def with_aggregators(
        self, aggregator: Aggregator, switches: Sequence[int] | None = None
    ) -> Topology:
        """Return a copy with aggregating switches (``algo="in_network"``).

        Aggregation is a link from the switch to itself, whose rate all its users share.

        Args:
            switches: numbers of nodes; by default every switch.

        Raises:
            InvalidArgumentError: a node is not a switch, or the network has none.
        """
        nodes = np.flatnonzero(self.node_kind == NodeKind.SWITCH)
        if self.aggregator is not None:
            raise InvalidArgumentError("aggregator", "is already set for this network")
        for node in switches or ():
            if node not in nodes:
                raise InvalidArgumentError("switches", f"{node} is not the number of a switch")
        chosen = np.array(nodes if switches is None else sorted(set(switches)), np.int32)
        if chosen.size == 0:
            raise InvalidArgumentError("switches", f"a {self.generator} network has no switches")
        kind = LinkKind.of("aggregator", aggregator.bytes_per_s)
        table = {"switches": chosen.tolist(), **asdict(aggregator)}
        return replace(
            self,
            settings={**self.settings, "aggregator": table},
            link_src=np.concatenate([self.link_src, chosen]),
            link_dst=np.concatenate([self.link_dst, chosen]),
            capacity=np.append(self.capacity, np.full(chosen.size, aggregator.bytes_per_s)),
            latency_ns=np.append(self.latency_ns, np.zeros(chosen.size)),
            link_kind=np.append(
                self.link_kind, np.full(chosen.size, len(self.link_kinds), np.uint8)
            ),
            link_kinds=(*self.link_kinds, kind),
            aggregator=aggregator,
        )

    def with_capacity(self, link: int, bytes_per_s: float) -> Topology:
        """Return a copy in which one link has another capacity: 0 for a broken one."""
        _in_range("link", link, self.links)
        if not (np.isfinite(bytes_per_s) and bytes_per_s >= 0.0):
            raise InvalidArgumentError("bytes_per_s", f"{bytes_per_s} is not a capacity")
        capacity = self.capacity.copy()
        capacity[link] = bytes_per_s
        changed = [*self.settings.get("capacities", []), [link, bytes_per_s]]
        return replace(self, capacity=capacity, settings={**self.settings, "capacities": changed})


def _in_range(name: str, value: int, size: int, kind: str = "") -> None:
    if not 0 <= value < size:
        raise InvalidArgumentError(name, f"{value} is not a {kind or name}; there are {size}")
