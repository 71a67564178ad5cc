"""Shards instead of replicas: ZeRO 1 to 3, the last of which is fully sharded data parallelism.

Stage 1 shards the optimizer's state, stage 2 also the gradients, stage 3 also the parameters: each
unit of parameters is gathered before its forward pass and again before its backward pass, after
which its gradients are reduce-scattered. A unit is gathered while the previous one computes.
Source: Rajbhandari et al., SC 2020, arXiv 1910.02054; Zhao et al., VLDB 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.cluster import Collective
from slipstream.durations import TimingRequest
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Editor, Graph, Role, StepPhase, insert_exchange
from slipstream.technique import CodeChange, Context, Traits
from slipstream.techniques.distributed.ddp import DDP, copying, put_copy
from slipstream.techniques.distributed.gradients import (
    Gradient,
    buckets,
    first_uses,
    gradients,
    nbytes_of,
)
from slipstream.techniques.distributed.replicas import REPLICAS, Spreads
from slipstream.techniques.distributed.sharded.technique import ShardedUpdate, share, share_update

if TYPE_CHECKING:
    from slipstream.cluster import Cluster, Group
    from slipstream.workload import BuiltWorkload, Workload

_MIB = 1 << 20
_STAGES = (1, 2, 3)
# Units in memory: the one that computes and the one being gathered.
_GATHERED_AT_ONCE = 2


@dataclass(frozen=True)
class FSDP(Spreads):
    """`workers` that shard the optimizer's state (stage 1), gradients (2) and parameters (3).

    Attributes:
        unit_mb: size of parameters that are gathered together, in MiB; in a script, a unit is a
            module passed to ``fully_shard``.
    """

    workers: int = 2
    stage_: int = 3
    unit_mb: float = 25.0

    name: ClassVar[str] = "fsdp"
    # Accumulation would gather parameters for each micro-batch, which is not predicted.
    traits: ClassVar[Traits] = replace(
        REPLICAS, conflicts=frozenset({"accumulation"}), variants=("fsdp:stage=2", "fsdp:stage=3")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage_ not in _STAGES:
            raise InvalidArgumentError(
                "fsdp:stage",
                f"{self.stage_} is not 1, 2 or 3",
                remedy="for example fsdp:4,stage=3",
            )
        if not 0 < self.unit_mb < float("inf"):
            raise InvalidArgumentError(
                "fsdp:unit_mb",
                f"{self.unit_mb} is not a positive size",
                remedy="for example fsdp:4,unit_mb=25",
            )

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the copies of gradients and parameters to and from flat buffers."""
        return [copying(gradient.spec) for gradient in gradients(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Predict stages 1 and 2 from replicas, and stage 3 from gathers and scatters of units."""
        cluster = self.need_cluster(context)
        if self.stage_ < 3:
            replicas = DDP(self.workers).predict(graph, context)
            sharded = ShardedUpdate().predict(replicas, context)
            if self.stage_ == 1:
                return sharded
            edit = Editor(sharded, str(self))
            share(edit, sharded, self.workers, Role.GRADIENT)
            return edit.apply("each worker keeps its shard of the gradients")
        return self._fully(graph, context, cluster)

    def _fully(self, graph: Graph, context: Context, cluster: Cluster) -> Graph:
        group, edit = self.group(cluster), Editor(graph, str(self))
        limit = int(self.unit_mb * _MIB)
        # In the order of the forward pass, the reverse of that of gradients.
        units = buckets(gradients(graph), limit, limit)[::-1]
        forward = _begins(graph, units, StepPhase.FORWARD)
        backward = _begins(graph, units[::-1], StepPhase.BACKWARD)[::-1]
        update = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
        begin = int(np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD)[0])
        order = [(forward[n], n) for n in range(len(units))]
        # The last unit is still gathered when the backward pass begins with it.
        order += [(backward[n], n) for n in range(len(units) - 2, -1, -1)]
        starts = [begin, *(start for start, _ in order)]
        for place, (start, number) in enumerate(order):
            # Gathered while the previous unit computes; the first, after the update.
            released = max(starts[max(place - 1, 0)] - 1, -1)
            self._gather(
                edit, cluster, context, units[number], group, start,
                released if place and released >= begin else int(update[-1]),
                0 if place and released >= begin else 1,
            )  # fmt: skip
        later = update[update > max(gradient.task for unit in units for gradient in unit)]
        # An update at the start of the step uses the previous step's gradients.
        awaited, lag = (int(later[0]), 0) if len(later) else (int(update[0]), 1)
        for unit in units[::-1]:
            self._scatter(edit, cluster, context, unit, group, awaited, lag)
        share_update(edit, graph, self.workers)
        share(edit, graph, self.workers, Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER)
        if len(graph.memory):
            sizes = sorted(map(nbytes_of, units))
            edit.allocate(sum(sizes[-_GATHERED_AT_ONCE:]) + sizes[-1], Role.PARAMETER, -1, -1)
        edited = edit.apply(
            f"{self.workers} workers; {len(units)} unit{'s' * (len(units) != 1)} of parameters "
            "gathered twice, gradients scattered"
        )
        return self.shared(edited)

    def _gather(
        self, edit: Editor, cluster: Cluster, context: Context, unit: Sequence[Gradient],
        group: Group, start: int, ready: int, ready_lag: int,
    ) -> None:  # fmt: skip
        copies = [
            put_copy(edit, context, gradient.spec, start, "out of gathered unit", before=True)
            for gradient in unit
        ]
        insert_exchange(
            edit, cluster, Collective("all_gather", nbytes_of(unit), group),
            beside=max(start - 1, 0) if ready_lag else ready, ready=ready, ready_lag=ready_lag,
            awaited=copies[0],
            name="all_gather of parameters", purpose="parameter",
        )  # fmt: skip

    def _scatter(
        self, edit: Editor, cluster: Cluster, context: Context, unit: Sequence[Gradient],
        group: Group, awaited: int, lag: int,
    ) -> None:  # fmt: skip
        last = unit[-1].task
        copies = [
            put_copy(edit, context, gradient.spec, last, "into unit to scatter")
            for gradient in unit
        ]
        insert_exchange(
            edit, cluster, Collective("reduce_scatter", nbytes_of(unit), group),
            beside=last, ready=copies[-1], awaited=awaited, lag=lag,
            tensors=tuple(grad.spec for grad in unit), modules=tuple(grad.module for grad in unit),
            name="reduce_scatter of gradients",
        )  # fmt: skip

    def apply(self, built: BuiltWorkload) -> None:
        """Raise, because parameters have to be sharded before the optimizer is created.

        Raises:
            WorkloadError: always.
        """
        self.need_joined()
        raise WorkloadError(
            "fsdp: parameters have to be sharded before the optimizer is created",
            remedy="call fully_shard(model) in your script, then create the optimizer",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step, because only the author knows which modules are units."""
        return CodeChange(
            "",
            f"start the script with torchrun --nproc-per-node {self.workers}, and by hand, before "
            "the optimizer is created:\n    for block in model.blocks:\n"
            "        fully_shard(block)\n    fully_shard(model)",
        )


def _begins(graph: Graph, units: Sequence[Sequence[Gradient]], phase: StepPhase) -> list[int]:
    """Return the first task of each unit, never before that of the previous unit."""
    uses = first_uses(graph, phase)
    first = min(uses.values())
    begins: list[int] = []
    for unit in units:
        starts = [uses[gradient.module] for gradient in unit if gradient.module in uses]
        begins.append(max([*begins[-1:], min(starts, default=first)]))
    return begins
