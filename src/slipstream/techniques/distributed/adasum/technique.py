"""Adasum as a technique: its cost on a cluster, and its use in a training script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.cluster import Collective, Group
from slipstream.durations import TimingRequest
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Editor, Graph, Role, StepPhase, insert_exchange
from slipstream.technique import CodeChange, Context, Quality, QualityKind
from slipstream.techniques.distributed.adasum.rule import adasum_benefit
from slipstream.techniques.distributed.ddp import copying, put_copy
from slipstream.techniques.distributed.gradients import gradients, nbytes_of
from slipstream.techniques.distributed.replicas import Spreads

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.workload import BuiltWorkload, Workload

# Passes over all parameters before and after the exchange. Each is memory-bound, and costs about as
# much as a copy.
_BEFORE = ("weights of before", "change of weights", "scalar products")
_AFTER = ("weighted sum", "new weights")
_IN_NODE = "mean of the node"


@dataclass(frozen=True)
class Adasum(Spreads):
    """`workers` replicas that step independently and combine their updates by Adasum.

    Attributes:
        workers: number of replicas, on the first devices of the cluster.
        per_node: number of consecutive workers whose updates are averaged first.
    """

    workers: int = 2
    per_node: int = 1

    name: ClassVar[str] = "adasum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_node < 1 or self.workers % self.per_node:
            raise InvalidArgumentError(
                "adasum:per_node",
                f"{self.workers} workers cannot be split into nodes of {self.per_node}",
                remedy="for example adasum:workers=8,per_node=4",
            )  # fmt: skip

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the copies of each parameter."""
        return [copying(gradient.spec) for gradient in gradients(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Insert the exchange of updates after the optimizer, where nothing overlaps it."""
        cluster = self.need_cluster(context)
        edit = Editor(graph, str(self))
        last = int(np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)[-1])
        grads = gradients(graph)
        specs = [grad.spec for grad in grads]
        nodes = (_IN_NODE,) if self.per_node > 1 else ()
        copies = {
            name: [put_copy(edit, context, spec, last, name) for spec in specs]
            for name in (*_BEFORE, *nodes, *_AFTER)
        }
        nbytes = nbytes_of(grads)
        insert_exchange(
            edit,
            cluster,
            self._collective(nbytes, cluster),
            beside=last,
            ready=copies[nodes[0] if nodes else _BEFORE[-1]][-1],
            awaited=copies[_AFTER[0]][0],
            tensors=tuple(specs),
            modules=tuple(grad.module for grad in grads),
            name="adasum of updates",
        )
        if len(graph.memory):
            for _ in ("weights of before, then updates", "others' slices"):
                edit.allocate(nbytes, Role.TEMPORARY, last, -1)
        return self.shared(edit.apply(f"{self.workers} workers combine their updates"))

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap the optimizer, in one of `workers` processes that have joined a group.

        Raises:
            WorkloadError: the group has another size, or there is no optimizer.
        """
        from slipstream.techniques.distributed.adasum.optimizer import AdasumOptimizer

        self.need_joined()
        self.need_part(built.optimizer, "the optimizer")
        built.optimizer = AdasumOptimizer(built.optimizer, per_node=self.per_node)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return the effect of a larger batch, and the expected gain if gradients were recorded."""
        unit = "worker" if self.per_node == 1 else "node"
        note = f"a step uses the batches of all workers; keep the learning rate of one {unit}"
        gain = (
            None if graph is None else adasum_benefit(graph.statistics, self.workers, self.per_node)
        )
        return Quality(QualityKind.NEEDS_TRAINING, note if gain is None else f"{note}; {gain}")

    def _collective(self, nbytes: float, cluster: Cluster) -> Collective:
        group = self.group(cluster)
        if self.per_node == 1:
            return Collective("all_reduce", nbytes, group)
        shape = (self.workers // self.per_node, self.per_node)
        return Collective("all_reduce", nbytes, Group.of(group.members.reshape(-1), shape), "2d")

    def code(self, workload: Workload) -> CodeChange | None:
        nodes = f", per_node={self.per_node}" if self.per_node > 1 else ""
        return self.by_hand(
            "'gloo'", f"optimizer = ss.distributed.AdasumOptimizer(optimizer{nodes})"
        )
