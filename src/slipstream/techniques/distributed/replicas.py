"""Workers that take a step together: how many, where, and what such techniques have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.cluster import Group
from slipstream.errors import InvalidArgumentError, UsageError, WorkloadError
from slipstream.graph import Exchange, Graph, StepPhase
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
    need_devices,
)
from slipstream.techniques.distributed.gradients import why_no_gradients

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.workload import BuiltWorkload, Workload

_LARGEST = 1 << 20
# What makes replicas, without and with DistributedDataParallel's hook for others.
REPLICAS = Traits(stage=Stage.DISTRIBUTION, clock="wall", replicas="makes")
# What changes how replicas in DistributedDataParallel average their gradients.
ON_REPLICAS = Traits(clock="wall", replicas="uses", hook="occupies")


class _Distributed(TechniqueSettings):
    """What techniques of several workers need of where they are predicted and applied."""

    def need_cluster(self, context: Context) -> Cluster:
        """The cluster to predict for.

        Raises:
            UsageError: none was given.
        """
        if context.cluster is None:
            raise UsageError(
                f"{self.name} needs a cluster to run on",
                remedy="--cluster here.toml, or in short --cluster "
                "workers=4,link=10gbit,latency=50us",
            )
        return context.cluster

    def need_part(self, part: Any, what: str) -> None:
        """Raise a `WorkloadError` where `part` of what was built is None."""
        if part is None:
            raise WorkloadError(
                f"{self.name} needs {what}", remedy="return (model, batch, loss, optimizer)"
            )


class Spreads(_Distributed):
    """Base of what spreads a step over `workers`, each with a batch of its own."""

    workers: int
    updates: ClassVar[bool] = True
    traits: ClassVar[Traits] = REPLICAS
    # The learning rate and its schedule have to follow.
    effect: ClassVar[Quality] = Quality(
        QualityKind.NEEDS_TRAINING, "the batch of all workers is one step's"
    )

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= _LARGEST:
            raise InvalidArgumentError(
                f"{self.name}:workers", f"{self.workers} is not from 2 to {_LARGEST}",
                remedy=f"for example {self.name}:4",
            )  # fmt: skip

    def group(self, cluster: Cluster) -> Group:
        """The cluster's first devices, in its dimensions where these are all.

        Raises:
            InvalidArgumentError: there are too few.
        """
        need_devices([self], cluster)  # type: ignore[list-item]
        whole, workers = cluster.all(), self.workers
        if workers == cluster.devices:
            return whole
        if len(whole.shape) > 1 and workers % whole.shape[-1] == 0 and workers > whole.shape[-1]:
            # Whole hosts, or whole rows of a grid: collectives can still go by dimensions.
            rows = workers // whole.shape[-1]
            return Group.of(whole.members.reshape(-1)[:workers], (rows, whole.shape[-1]))
        return Group.of(np.arange(workers))

    def need_joined(self) -> None:
        """Raise a `WorkloadError` unless this process is one of `workers` that have joined."""
        import torch.distributed as dist

        joined = dist.is_available() and dist.is_initialized()
        count = dist.get_world_size() if joined else 1
        if not joined or count != self.workers:
            raise WorkloadError(
                f"{self.name} needs {self.workers} processes, and this is "
                + (f"one of {count}" if joined else "one by itself"),
                remedy=f"torchrun --nproc-per-node {self.workers} your_script.py",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why it cannot be told what the workers would send each other."""
        reason = why_no_gradients(graph)
        if reason is None and self.updates and not has_update(graph):
            return "the step has no optimizer"
        return reason

    def by_hand(self, group: str, wrap: str) -> CodeChange:
        """No edit: processes have to be started, and data to be shared out.

        Args:
            group: the backend's name as an argument.
            wrap: the line that wraps the model or the optimizer.
        """
        return CodeChange(
            "",
            f"start the script with torchrun --nproc-per-node {self.workers}, and by hand:\n"
            f"    torch.distributed.init_process_group({group})\n"
            f"    {wrap}\n"
            "    sampler = torch.utils.data.DistributedSampler(dataset)",
        )

    def shared(self, graph: Graph) -> Graph:
        """`graph` as a step that the workers take together, each with its own samples."""
        meta = {**graph.meta, "workers": self.workers}
        return replace(graph, samples=graph.samples * self.workers, meta=meta)


class OnReplicas(_Distributed):
    """Base of what changes how replicas average their gradients."""

    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "gradients are summed in another order"
    )

    def why_no_replicas(self, graph: Graph) -> str | None:
        """None, or what to combine it with."""
        if all_reduces(graph):
            return None
        return f"no gradients are all-reduced; combine it: ddp:workers=16+{self.name}"

    def need_ddp(self, built: BuiltWorkload, written: str) -> Any:
        """The model, in DistributedDataParallel.

        Args:
            written: the technique with its settings.

        Raises:
            WorkloadError: it is not.
        """
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(built.model, DistributedDataParallel):
            raise WorkloadError(
                f"{self.name} needs a model in DistributedDataParallel",
                remedy=f"ddp:workers=2+{written}, in as many processes",
            )
        return built.model

    def need_hookless(self, built: BuiltWorkload) -> Any:
        """The model, in DistributedDataParallel and without a communication hook.

        Raises:
            WorkloadError: it is not.
        """
        model = self.need_ddp(built, self.name)
        if getattr(model, "_comm_hooks", None):
            raise WorkloadError(
                f"{self.name} needs the model's communication hook, which is taken",
                remedy="one technique that changes how gradients are exchanged",
            )
        return model


def all_reduces(graph: Graph) -> list[Exchange]:
    """What averages gradients of the step's replicas."""
    return [row for row in graph.exchanges if row.collective.kind == "all_reduce"]


def has_update(graph: Graph) -> bool:
    return bool((graph.tasks.phase == StepPhase.OPTIMIZER).any())


def speaks_gloo(cluster: Cluster) -> bool:
    """Whether the cluster was measured with what our own collectives run on, messages of gloo."""
    return cluster.calibration is not None and "gloo" in cluster.calibration.libraries
