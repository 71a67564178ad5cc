"""What our collectives take on a cluster, and which all-reduce it says is faster: flat or 2-D."""

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

# What Python does to post a message, the other side's to expect it, and both to wait, besides the
# links; an eighth of a grid's empty 2-D all-reduce for two chunks, four ranks on two cores of an
# AMD EPYC at 2.0 GHz.
MESSAGE_NS = 100e3
_CLOSED_FORMS = {"ring": "ring", "halving": "halving_doubling"}
# A gain below this is within what a prediction is off, and not worth another order of sums.
LEAST_GAIN = 0.05


def grid_ns(cluster: Cluster, nbytes: float, members: Int64s) -> float:
    """How long `grid.all_reduce` takes by rows and columns; nanoseconds.

    Chunks overlap: the busiest link, with what all phases put on it, is never idle but for one
    chunk's time on the others. A rank posts a message to each of its row and its column, for each
    chunk and each way. What it adds up is not hidden: a ring adds as much, and is charged for it.

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
    cluster: Cluster, kind: str, nbytes: float, group: Group, *, whole: bool = False
) -> float:
    """How long `lines.scatter` or `lines.gather` take by themselves; nanoseconds.

    Args:
        kind: ``reduce_scatter`` or ``all_gather``.
        whole: as of `lines.way`.
    """
    ranks = group.ranks
    chosen = best_algorithm(ranks, nbytes, whole=whole)
    if chosen == "direct":
        asked = Collective("all_to_all", nbytes, group)
    else:
        asked = Collective(kind, nbytes, group, _CLOSED_FORMS[chosen])
    messages = round(math.log2(ranks)) if chosen == "halving" else ranks - 1
    return cluster.cost(asked).duration_ns + messages * MESSAGE_NS


def predicted_ns(cluster: Cluster, nbytes: float, ranks: int, rows: int) -> tuple[float, float]:
    """How long an all-reduce takes flat, around a ring, and by rows and columns; nanoseconds.

    Raises:
        InvalidArgumentError: the cluster is smaller than so many ranks.
    """
    mesh = cluster.mesh((rows, ranks // rows), ("across", "within"))
    members = mesh[("across", "within")].members.reshape(rows, ranks // rows)
    # A ring around two dimensions goes row by row.
    flat = _ring(cluster, "all_reduce", nbytes, members.reshape(1, -1))
    return flat.duration_ns, grid_ns(cluster, nbytes, members)


def _ring(cluster: Cluster, kind: str, nbytes: float, members: Int64s) -> Cost:
    """Of every row of `members` at once."""
    return cluster.cost(Collective(kind, nbytes, Group(members, (members.shape[1],)), "ring"))


def chosen(cluster: Cluster | None, nbytes: int, ranks: int, rows: int) -> str:
    """``2d`` where the cluster says that it is faster, else ``flat``.

    Raises:
        InvalidArgumentError: there is no cluster, or a smaller one.
    """
    if cluster is None:
        raise InvalidArgumentError(
            "cluster", "auto predicts on a cluster, and none is given",
            remedy="cluster=Cluster.load('here.toml') of slipstream cluster measure, or "
            "algorithm='2d'",
        )  # fmt: skip
    flat, grid = predicted_ns(cluster, nbytes, ranks, rows)
    return "2d" if grid < (1.0 - LEAST_GAIN) * flat else "flat"
