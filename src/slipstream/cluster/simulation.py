"""Run jobs on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.lower import Queues, lower
from slipstream.cluster.tasks import Job
from slipstream.cluster.timeline import Timeline
from slipstream.errors import InvalidArgumentError


def simulate(
    cluster: Cluster,
    jobs: Job | Sequence[Job],
    *,
    fidelity: Literal["fluid", "packet"] = "fluid",
    queues: Queues | None = None,
    explain: bool = False,
) -> Timeline:
    """What happens when these jobs share the cluster.

    A collective is its algorithm's transfers with a barrier a phase. Every transfer is a fluid:
    all that are under way share the links max-min fairly, by weight, the more urgent first. With
    ``fidelity="packet"`` it travels as packets that wait in queues, are dropped or marked there,
    and are sent by windows: for incast, congestion and the tail of short transfers, which fluids
    do not have, on small clusters (a packet and link cost about 0.15 microseconds).

    Args:
        fidelity: of transfers.
        queues: for packets; by default `Queues()`.
        explain: keep what held every transfer up, for `Timeline.bottlenecks` and the rates of
            links in `Timeline.to_perfetto`. Of fluids only.

    Raises:
        InvalidArgumentError: a rank, group, dependency or number that is not allowed; weights or
            `explain` with packets.
        ClusterError: devices that are not joined, or only by a link without capacity.
        GraphError: tasks that wait for each other.
    """
    if fidelity not in ("fluid", "packet"):
        raise InvalidArgumentError("fidelity", f"'{fidelity}' is not fluid or packet")
    packets = fidelity == "packet"
    if packets and explain:
        raise InvalidArgumentError(
            "explain", "is asked of packets, which have no one link that holds them up",
            remedy="fidelity='fluid', or Timeline.queues",
        )  # fmt: skip
    if queues is not None and not packets:
        raise InvalidArgumentError("queues", "are given for fluids", remedy="fidelity='packet'")
    given = [jobs] if isinstance(jobs, Job) else list(jobs)
    lowered = lower(cluster, given, (queues or Queues()) if packets else None)
    schedule = lowered.program.compile().simulate(rate_changes=explain)
    return Timeline(cluster, given, lowered, schedule)
