"""Routes of transfers, computed on request without a table of all pairs.

A router maps pairs of devices to paths, many per call: ``paths(src, dst, key)`` returns the number
of links of each path, and the links of all paths in sequence. `key` distinguishes transfers of one
pair, so that they may use different paths of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.cluster.errors import ClusterError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Paths = tuple[Int64s, Int32s]
_Number = TypeVar("_Number", Int64s, int)


class Router(Protocol):
    """``src``, ``dst``, ``key``: int64 [pairs], devices of the topology, ``src != dst``."""

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths: ...


def spread(src: Int64s, dst: Int64s, key: Int64s) -> npt.NDArray[np.uint64]:
    """Return a hash of (src, dst, key), as switches choose among equal paths: fixed for a flow.

    Source: the finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        mixed = np.zeros(np.shape(src), np.uint64)
        for part in (src, dst, key):
            mixed = mixed + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def from_columns(columns: Sequence[npt.NDArray[np.integer]]) -> Paths:
    """Return paths from one array per hop, with -1 for paths without this hop."""
    table = np.stack(columns, axis=1).astype(np.int32)
    present = table >= 0
    return present.sum(axis=1), table[present]


def merge(pairs: int, parts: Sequence[tuple[Int64s, Paths]]) -> Paths:
    """Merge paths of some pairs each (with their numbers) into the order of all pairs.

    A pair in several parts has the links of each, in the order of the parts.
    """
    owner = np.concatenate([np.repeat(which, paths[0]) for which, paths in parts])
    links = np.concatenate([paths[1] for _, paths in parts])
    order = np.argsort(owner, kind="stable")
    return np.bincount(owner, minlength=pairs).astype(np.int64), links[order].astype(np.int32)


@dataclass(frozen=True)
class Stages:
    """Router from a function that returns one array per hop; `tables` are its further arguments.

    The function is defined in a module, so that a topology can be sent to another process.
    """

    hops: Callable[..., Sequence[npt.NDArray[np.integer]]]
    tables: Sequence[Any] = ()

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        return from_columns(self.hops(src, dst, key, *self.tables))


@dataclass(frozen=True)
class DimensionOrdered:
    """Routes one dimension after another, in the shorter direction if the dimension wraps.

    Attributes:
        dims: devices are numbered with the last dimension fastest.
        wrap: per dimension.
        link: int32 [devices, dims, 2]; towards higher and lower coordinates, -1 without a link.
    """

    dims: tuple[int, ...]
    wrap: tuple[bool, ...]
    link: Int32s

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        at = np.array(np.unravel_index(src, self.dims))
        to = np.array(np.unravel_index(dst, self.dims))
        parts = []
        for d, size in enumerate(self.dims):
            ahead = to[d] - at[d]
            if self.wrap[d]:
                ahead = ahead % size
                back = ahead > size - ahead
                hops = np.where(back, size - ahead, ahead)
                step = np.where(back, -1, 1)
            else:
                hops, step = np.abs(ahead), np.sign(ahead)
            pair = np.repeat(np.arange(src.size), hops)
            along = np.arange(pair.size) - np.repeat(np.cumsum(hops) - hops, hops)
            place = at[:, pair]
            place[d] = (place[d] + step[pair] * along) % size
            here = np.ravel_multi_index(tuple(place), self.dims)
            links = self.link[here, d, (step[pair] < 0).astype(np.int64)]
            parts.append((np.arange(src.size), (hops, links)))
            at[d] = to[d]
        return merge(src.size, parts)


@dataclass(frozen=True, eq=False)
class Shortest:
    """Routes with the fewest links in any directed graph; switches choose among equals by hash.

    Distances to a device are computed at its first use as destination, and cached.
    """

    node_of_device: Int32s
    out_offset: Int64s
    out_link: Int32s
    link_dst: Int32s
    in_offset: Int64s
    in_link: Int32s
    link_src: Int32s
    _distance: dict[int, Int32s] = field(default_factory=dict)

    @classmethod
    def over(cls, node_of_device: Int32s, src: Int32s, dst: Int32s, nodes: int) -> Shortest:
        """Return a router over links from `src` to `dst`, int32 [links]."""
        return cls(node_of_device, *_by_node(src, nodes), dst, *_by_node(dst, nodes), src)

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        counts, links = [], []
        choices = spread(src, dst, key)
        for s, d, choice in zip(src.tolist(), dst.tolist(), choices.tolist(), strict=True):
            path = self._path(s, d, choice)
            counts.append(len(path))
            links.extend(path)
        return np.array(counts, np.int64), np.array(links, np.int32)

    def _path(self, src: int, dst: int, choice: int) -> list[int]:
        distance = self._distances(dst)
        node = int(self.node_of_device[src])
        if distance[node] < 0:
            raise ClusterError(
                f"device {src} has no path to device {dst}",
                remedy="add links between the two parts, or keep the group inside one part",
            )
        path: list[int] = []
        while distance[node] > 0:
            out = self.out_link[self.out_offset[node] : self.out_offset[node + 1]]
            near = out[distance[self.link_dst[out]] == distance[node] - 1]
            # Another choice at every hop: a single one would use few of the paths.
            link = int(near[(choice >> (7 * len(path) % 57)) % near.size])
            path.append(link)
            node = int(self.link_dst[link])
        return path

    def _distances(self, dst: int) -> Int32s:
        distance = self._distance.get(dst)
        if distance is None:
            distance = np.full(self.out_offset.size - 1, -1, np.int32)
            front = [int(self.node_of_device[dst])]
            distance[front[0]] = 0
            while front:
                behind = []
                for node in front:
                    for link in self.in_link[self.in_offset[node] : self.in_offset[node + 1]]:
                        before = int(self.link_src[link])
                        if distance[before] < 0:
                            distance[before] = distance[node] + 1
                            behind.append(before)
                front = behind
            self._distance[dst] = distance
        return distance


def _by_node(ends: Int32s, nodes: int) -> tuple[Int64s, Int32s]:
    """Return the links with an end at each node: offset int64 [nodes + 1], link int32 [links]."""
    offset = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(ends, minlength=nodes), out=offset[1:])
    return offset, np.argsort(ends, kind="stable").astype(np.int32)


@dataclass(frozen=True)
class Explicit:
    """User-defined routes by (src, dst); `other` provides all others."""

    table: Mapping[tuple[int, int], Sequence[int]]
    other: Router

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
        listed = np.array([pair in self.table for pair in pairs], np.bool_)
        routes = [
            self.table[pair] for pair, is_listed in zip(pairs, listed, strict=True) if is_listed
        ]
        of_listed: Paths = (
            np.array([len(path) for path in routes], np.int64),
            np.array([link for path in routes for link in path], np.int32),
        )
        unlisted = np.flatnonzero(~listed)
        parts = [(np.flatnonzero(listed), of_listed)]
        if unlisted.size:
            parts.append((unlisted, self.other.paths(src[unlisted], dst[unlisted], key[unlisted])))
        return merge(src.size, parts)
