"""Which links a transfer takes. Routes are computed when asked for: no table of all pairs.

A router turns pairs of devices into paths, many at once: ``paths(src, dst, key)`` gives how many
links each path has, and all links one path after the other. `key` tells apart transfers of one
pair, so that they may take different ones of several equal paths.
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
    """A hash of (src, dst, key), as switches choose among equal paths: fixed for a flow.

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
    """Paths from one array a hop, with -1 where a path has no such hop."""
    table = np.stack(columns, axis=1).astype(np.int32)
    there = table >= 0
    return there.sum(axis=1), table[there]


def merge(pairs: int, parts: Sequence[tuple[Int64s, Paths]]) -> Paths:
    """Paths of some pairs each (their numbers first), put in the order of all pairs.

    A pair that occurs in several parts goes over the links of each, in the order of the parts.
    """
    owner = np.concatenate([np.repeat(which, paths[0]) for which, paths in parts])
    links = np.concatenate([paths[1] for _, paths in parts])
    order = np.argsort(owner, kind="stable")
    return np.bincount(owner, minlength=pairs).astype(np.int64), links[order].astype(np.int32)


@dataclass(frozen=True)
class Stages:
    """A router made of a function that gives one array a hop; `tables` are its further arguments.

    The function is a module's own, so that a topology can be sent to another process.
    """

    hops: Callable[..., Sequence[npt.NDArray[np.integer]]]
    tables: Sequence[Any] = ()

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        return from_columns(self.hops(src, dst, key, *self.tables))


@dataclass(frozen=True)
class DimensionOrdered:
    """One dimension after the other, the short way round where the dimension wraps.

    Attributes:
        dims: devices are numbered with the last dimension fastest.
        wrap: per dimension.
        link: int32 [devices, dims, 2]; towards higher and lower coordinates, -1 where none is.
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
    """Fewest links; among equal ways each switch chooses by hash. Any directed graph.

    Distances to a device are found when it is first a destination, and kept.
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
        """Over links from `src` to `dst`, int32 [links]."""
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
                f"there is no way from device {src} to device {dst}",
                remedy="add links that join the two parts, or keep the group inside one part",
            )
        path: list[int] = []
        while distance[node] > 0:
            out = self.out_link[self.out_offset[node] : self.out_offset[node + 1]]
            near = out[distance[self.link_dst[out]] == distance[node] - 1]
            # A new choice at every hop: one hash for all would use few of the paths.
            link = int(near[(choice >> (7 * len(path) % 57)) % near.size])
            path.append(link)
            node = int(self.link_dst[link])
        return path

    def _distances(self, dst: int) -> Int32s:
        known = self._distance.get(dst)
        if known is None:
            known = np.full(self.out_offset.size - 1, -1, np.int32)
            front = [int(self.node_of_device[dst])]
            known[front[0]] = 0
            while front:
                behind = []
                for node in front:
                    for link in self.in_link[self.in_offset[node] : self.in_offset[node + 1]]:
                        before = int(self.link_src[link])
                        if known[before] < 0:
                            known[before] = known[node] + 1
                            behind.append(before)
                front = behind
            self._distance[dst] = known
        return known


def _by_node(ends: Int32s, nodes: int) -> tuple[Int64s, Int32s]:
    """The links that have an end at each node: offset int64 [nodes + 1], link int32 [links]."""
    offset = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(ends, minlength=nodes), out=offset[1:])
    return offset, np.argsort(ends, kind="stable").astype(np.int32)


@dataclass(frozen=True)
class Explicit:
    """Routes somebody wrote down, by (src, dst); all others go as `other` says."""

    table: Mapping[tuple[int, int], Sequence[int]]
    other: Router

    def paths(self, src: Int64s, dst: Int64s, key: Int64s) -> Paths:
        pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
        listed = np.array([pair in self.table for pair in pairs], np.bool_)
        given = [
            self.table[pair] for pair, is_listed in zip(pairs, listed, strict=True) if is_listed
        ]
        of_listed: Paths = (
            np.array([len(path) for path in given], np.int64),
            np.array([link for path in given for link in path], np.int32),
        )
        rest = np.flatnonzero(~listed)
        parts = [(np.flatnonzero(listed), of_listed)]
        if rest.size:
            parts.append((rest, self.other.paths(src[rest], dst[rest], key[rest])))
        return merge(src.size, parts)
