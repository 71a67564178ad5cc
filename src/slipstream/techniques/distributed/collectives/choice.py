"""Predicted time of our collectives on a cluster, and the choice of flat or 2-D all-reduce."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from slipstream.cluster import Collective, Group
from slipstream.errors import InvalidArgumentError
from slipstream.ranks.lines import best_algorithm
from slipstream.techniques.distributed.collectives.grid import chunks_of

if TYPE_CHECKING:
    from slipstream.cluster import Cluster, Cost
    from slipstream.cluster.routing import Int64s

# Python overhead per message, in addition to the links: posting the send and the receive, and
# waiting for both. An eighth of an empty 2-D all-reduce of two chunks, with four ranks on two cores
# of an AMD EPYC at 2.0 GHz.
MESSAGE_NS = 100e3
_CLOSED_FORMS = {"ring": "ring", "halving": "halving_doubling"}
# A smaller gain is within the prediction error, and does not justify another summation order.
_MIN_GAIN = 0.05


def grid_ns(cluster: Cluster, nbytes: float, members: Int64s) -> float:
    """Predict the duration of `grid.all_reduce` by rows and columns, in ns.

    Chunks overlap: the busiest link carries the bytes of all phases and is idle only while one
    chunk is on the other links. For each chunk and direction, a rank sends one message to each
    rank in its row and column. Summation does not overlap; a ring sums as much and is charged too.

    Args:
        members: int64 [rows, columns], devices of the cluster.
    """
    rows, columns = members.shape
    phases = [
        _ring(cluster, "reduce_scatter", nbytes, members),
        _ring(cluster, "all_reduce", nbytes / columns, np.ascontiguousarray(members.T)),
        _ring(cluster, "all_gather", nbytes, members),
    ]
    one_by_one = sum(phase.duration_ns for phase in phases)
    carried = sum((phase.link_bytes for phase in phases), np.zeros(cluster.topology.links))
    added = nbytes * (1 - 1 / members.size) * cluster.reduce_ns_per_byte.value
    busiest = float((carried / cluster.topology.capacity).max(initial=0.0)) * 1e9 + added
    chunks = chunks_of(int(nbytes))
    messages = 2 * chunks * (rows - 1 + columns - 1)
    return float(busiest + (one_by_one - busiest) / chunks + messages * MESSAGE_NS)


def line_ns(
    cluster: Cluster, kind: str, nbytes: float, group: Group, *, half_precision: bool = False
) -> float:
    """Predict the duration of a `lines.scatter` or `lines.gather` alone, in ns.

    Args:
        kind: ``reduce_scatter`` or ``all_gather``.
        half_precision: see `lines.best_algorithm`.
    """
    ranks = group.ranks
    chosen = best_algorithm(ranks, nbytes, half_precision=half_precision)
    if chosen == "direct":
        collective = Collective("all_to_all", nbytes, group)
    else:
        collective = Collective(kind, nbytes, group, _CLOSED_FORMS[chosen])
    messages = round(math.log2(ranks)) if chosen == "halving" else ranks - 1
    return cluster.cost(collective).duration_ns + messages * MESSAGE_NS


def predicted_ns(cluster: Cluster, nbytes: float, ranks: int, rows: int) -> tuple[float, float]:
    """Predict an all-reduce around a flat ring, and by rows and columns, each in ns.

    Raises:
        InvalidArgumentError: the cluster has fewer devices than `ranks`.
    """
    mesh = cluster.mesh((rows, ranks // rows), ("across", "within"))
    members = mesh[("across", "within")].members.reshape(rows, ranks // rows)
    # A ring over two dimensions visits the ranks row by row.
    flat = _ring(cluster, "all_reduce", nbytes, members.reshape(1, -1))
    return flat.duration_ns, grid_ns(cluster, nbytes, members)


def _ring(cluster: Cluster, kind: str, nbytes: float, members: Int64s) -> Cost:
    """Return the cost of one collective per row of `members`, all running simultaneously."""
    return cluster.cost(Collective(kind, nbytes, Group(members, (members.shape[1],)), "ring"))


def chosen(cluster: Cluster | None, nbytes: int, ranks: int, rows: int) -> str:
    """Return ``2d`` if it is predicted to be faster on the cluster, else ``flat``.

    Raises:
        InvalidArgumentError: `cluster` is None or has fewer devices than `ranks`.
    """
    if cluster is None:
        raise InvalidArgumentError(
            "cluster", "algorithm='auto' needs a cluster to predict on, but it is None",
            remedy="pass cluster=Cluster.load('here.toml'), a file that slipstream cluster measure "
            "writes, or algorithm='2d'",
        )  # fmt: skip
    flat, grid = predicted_ns(cluster, nbytes, ranks, rows)
    return "2d" if grid < (1.0 - _MIN_GAIN) * flat else "flat"
