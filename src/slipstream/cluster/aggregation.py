"""Trees of switches that sum the data ranks send through them.

Every cable of a tree carries the bytes once up and the sum once down, whatever the number of ranks
below it; a switch that cannot aggregate forwards the data of each of its children.

Source: Gebara, Ghobadi, Costa, "In-network aggregation for shared machine learning clusters",
MLSys 2021 (here one tree per group, rooted at the nearest switch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.cluster.errors import ClusterError
from slipstream.cluster.routing import Int32s
from slipstream.cluster.topology import Float64s, Topology


@dataclass(frozen=True, eq=False)
class Tree:
    """A tree of links with their load.

    Attributes:
        links: int32 [links]; links of the tree in both directions, and of its aggregating switches.
        streams: float64 [links]; how many times each link carries the bytes.
        depth: hops from the farthest rank to the root.
        delay_ns: latency of the links from the farthest rank to the root and back.
    """

    links: Int32s
    streams: Float64s
    depth: int
    delay_ns: float


def aggregation_tree(topology: Topology, devices: Sequence[int], number: int = 0) -> Tree:
    """Return the tree over these devices, rooted at the aggregating switch nearest to all.

    If several are equally near, groups use different ones, and so do the trees of one group that
    have consecutive numbers.

    Raises:
        ClusterError: no switch aggregates, or none is connected to all devices in both directions.
    """
    from scipy.sparse import csr_array  # slow to import, and many callers need no tree
    from scipy.sparse.csgraph import dijkstra

    src, dst = topology.link_src, topology.link_dst
    loop = {int(src[link]): int(link) for link in np.flatnonzero(src == dst)}
    if topology.aggregator is None:
        raise ClusterError(
            "no switch of this network aggregates",
            remedy="use Topology.with_aggregators, or another algo",
        )
    # From the root against the links' direction: a node's predecessor is its next hop to the root.
    back = csr_array((np.ones(src.size), (dst, src)), (topology.nodes,) * 2)
    roots = np.array(sorted(loop))
    hops, after = dijkstra(back, unweighted=True, indices=roots, return_predecessors=True)
    members = topology.node_of_device[np.asarray(devices)]
    far, total = hops[:, members].max(axis=1), hops[:, members].sum(axis=1)
    if not np.isfinite(far).any():
        raise ClusterError("no aggregating switch is connected to all devices of the group")
    nearest = np.flatnonzero((far == far.min()) & (total == total[far == far.min()].min()))
    chosen = int(nearest[(int(devices[0]) + number) % nearest.size])
    root, up = int(roots[chosen]), after[chosen]

    order = sorted(_above(members.tolist(), up, root), key=lambda n: -hops[chosen, n])
    link_of = {
        (int(src[link]), int(dst[link])): int(link)
        for link in np.flatnonzero(np.isin(src, order) & np.isin(dst, order))
    }
    below = dict.fromkeys(order, 0.0)
    for node in members.tolist():
        below[node] = 1.0
    carried: dict[int, float] = {}
    delay = dict.fromkeys(order, 0.0)
    for node in order:
        if node in loop and below[node] > 0.0:
            carried[loop[node]] = 1.0
            below[node] = 1.0
        if node == root:
            continue
        parent = int(up[node])
        if (parent, node) not in link_of:
            raise ClusterError(
                f"{topology.node_name(parent)} has no link back to {topology.node_name(node)}",
                remedy="use cables of two links, or another algo",
            )
        up_link, down_link = link_of[node, parent], link_of[parent, node]
        carried[up_link] = carried[down_link] = below[node]
        below[parent] += below[node]
        trip = topology.latency_ns[up_link] + topology.latency_ns[down_link]
        delay[parent] = max(delay[parent], delay[node] + float(trip))
    return Tree(
        np.array(list(carried), np.int32), np.array(list(carried.values())), int(far[chosen]),
        delay[root],
    )  # fmt: skip


def _above(members: Sequence[int], up: Int32s, root: int) -> set[int]:
    """Return the nodes on the paths from members to the root, both included."""
    nodes: set[int] = {root}
    for member in members:
        node = member
        while node not in nodes:
            nodes.add(node)
            node = int(up[node])
    return nodes
