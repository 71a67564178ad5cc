"""Replicas that shard the update: ZeRO-1, weight-update sharding.

Gradients are reduce-scattered instead of all-reduced, every worker updates its share of the
parameters, and the new parameters are all-gathered. The bytes on the wire are those of the
all-reduce; the update takes 1/n of its time and of the optimizer's memory. Source: Rajbhandari et
al., SC 2020, arXiv 1910.02054; Xu et al., 2020, arXiv 2004.13336.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.graph import (
    Editor,
    Graph,
    Role,
    StepPhase,
    TensorSpec,
    insert_exchange,
    replace_exchange,
)
from slipstream.provenance import Provenance
from slipstream.technique import CodeChange, Context, Stage, Traits
from slipstream.techniques.distributed.replicas import (
    ON_REPLICAS,
    OnReplicas,
    all_reduces,
    has_update,
    speaks_gloo,
)

if TYPE_CHECKING:
    from slipstream.cluster import Cluster, Collective
    from slipstream.workload import BuiltWorkload, Workload

# Shards split tensors, so the number and duration of operators do not shrink evenly.
_UNSURE = 0.2


@dataclass(frozen=True)
class ShardedUpdate(OnReplicas):
    """Each replica updates its share of the parameters."""

    name: ClassVar[str] = "sharded_update"
    traits: ClassVar[Traits] = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 4)

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is no update to shard; None if there is."""
        reason = self.why_no_replicas(graph)
        if reason is None and not has_update(graph):
            return "the step has no optimizer"
        return reason

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Split each all-reduce into its two halves, and shard the update between them."""
        cluster = self.need_cluster(context)
        edit = Editor(graph, str(self))
        update = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
        last = int(update[-1])
        first_use = int(np.flatnonzero(graph.tasks.phase != StepPhase.OPTIMIZER)[0])
        workers = graph.workers
        for row in all_reduces(graph):
            reduce = replace(row.collective, kind="reduce_scatter", algo="auto")
            gather = replace(row.collective, kind="all_gather", algo="auto")
            replace_exchange(
                edit, row, cluster, encode=(), transfers=[reduce], decode=(), name="sharded ",
                duration_ns=_ours_ns(cluster, reduce, row.tensors),
            )  # fmt: skip
            insert_exchange(
                edit,
                cluster,
                gather,
                beside=last,
                ready=last,
                awaited=first_use,
                lag=1,
                name="all_gather of parameters",
                purpose="parameter",
                duration_ns=_ours_ns(cluster, gather, row.tensors),
            )
        share_update(edit, graph, workers)
        share(edit, graph, workers, Role.OPTIMIZER)
        return edit.apply(f"each of {workers} workers updates its share of the parameters")

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap the optimizer of a model that DistributedDataParallel already wraps.

        Raises:
            WorkloadError: the model is not wrapped or has a hook, or there is no optimizer.
            InvalidArgumentError: the optimizer's update cannot be sharded.
        """
        from slipstream.techniques.distributed.sharded import optimizer

        model = self.need_hookless(built)
        self.need_part(built.optimizer, "the optimizer")
        built.optimizer = optimizer.ShardedUpdate(built.optimizer, model)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step: wrap the optimizer after creating it."""
        return CodeChange(
            "",
            "after model = DistributedDataParallel(model) and the optimizer, by hand:\n"
            "    optimizer = slipstream.distributed.ShardedUpdate(optimizer, model)",
        )


def _ours_ns(
    cluster: Cluster, collective: Collective, tensors: Sequence[TensorSpec]
) -> float | None:
    """Return the duration of our collective; None if the cluster's closed form applies."""
    if not speaks_gloo(cluster):
        return None
    from slipstream.techniques.distributed.collectives.choice import line_ns

    half_precision = collective.kind == "reduce_scatter" and any(
        spec.nbytes < 4 * spec.numel for spec in tensors
    )
    group = cluster.group_of(collective)
    return line_ns(
        cluster, collective.kind, collective.nbytes, group, half_precision=half_precision
    )


def share_update(edit: Editor, graph: Graph, workers: int) -> None:
    """Scale the update to 1/n of the parameters: durations of operators, and gaps between them."""
    update = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
    edit.scale(update, 1.0 / workers, Provenance.ASSUMED, spread=_UNSURE)
    edit.set_gap(update, graph.tasks.gap_ns[update] / workers)


def share(edit: Editor, graph: Graph, workers: int, *roles: Role) -> None:
    """Resize allocations of `roles` to one worker's share."""
    memory = graph.memory
    chosen = np.flatnonzero(np.isin(memory.role, [int(role) for role in roles]))
    edit.resize(chosen, -(-memory.nbytes[chosen] // workers))
