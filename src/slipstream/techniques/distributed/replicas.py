"""Base classes of techniques that run a step on several workers."""

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

_MAX_WORKERS = 1 << 20
# Traits of techniques that create replicas; those with DistributedDataParallel add a hook.
REPLICAS = Traits(stage=Stage.DISTRIBUTION, clock="wall", replicas="makes")
# Traits of techniques that change how DistributedDataParallel averages gradients.
ON_REPLICAS = Traits(clock="wall", replicas="uses", hook="occupies")


class _Distributed(TechniqueSettings):
    """Requirements of distributed techniques on a prediction's context and a built workload."""

    def need_cluster(self, context: Context) -> Cluster:
        """Return the cluster to predict for; raise a `UsageError` without one."""
        if context.cluster is None:
            raise UsageError(
                f"{self.name} needs a cluster",
                remedy="pass --cluster here.toml, or for example --cluster "
                "workers=4,link=10gbit,latency=50us",
            )
        return context.cluster

    def need_part(self, part: Any, what: str) -> None:
        """Raise a `WorkloadError` if `part` of the workload is None."""
        if part is None:
            raise WorkloadError(
                f"{self.name} needs {what}", remedy="return (model, batch, loss, optimizer)"
            )


class Spreads(_Distributed):
    """Base of techniques that run a step on `workers`, each with its own batch."""

    workers: int
    updates: ClassVar[bool] = True
    traits: ClassVar[Traits] = REPLICAS
    # The learning rate and its schedule have to be adapted.
    effect: ClassVar[Quality] = Quality(
        QualityKind.NEEDS_TRAINING, "a step uses the batches of all workers"
    )

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= _MAX_WORKERS:
            raise InvalidArgumentError(
                f"{self.name}:workers", f"{self.workers} is not between 2 and {_MAX_WORKERS}",
                remedy=f"for example {self.name}:4",
            )  # fmt: skip

    def group(self, cluster: Cluster) -> Group:
        """Return the cluster's first devices, as a grid where whole rows are used.

        Raises:
            InvalidArgumentError: the cluster has fewer devices than `workers`.
        """
        need_devices([self], cluster)  # type: ignore[list-item]
        whole, workers = cluster.all(), self.workers
        if workers == cluster.devices:
            return whole
        if len(whole.shape) > 1 and workers % whole.shape[-1] == 0 and workers > whole.shape[-1]:
            # For whole hosts or rows of a grid, collectives can still use the dimensions.
            rows = workers // whole.shape[-1]
            return Group.of(whole.members.reshape(-1)[:workers], (rows, whole.shape[-1]))
        return Group.of(np.arange(workers))

    def need_joined(self) -> None:
        """Raise a `WorkloadError` unless this process is in a group of `workers` processes."""
        import torch.distributed as dist

        joined = dist.is_available() and dist.is_initialized()
        count = dist.get_world_size() if joined else 1
        if not joined or count != self.workers:
            raise WorkloadError(
                f"{self.name} needs {self.workers} processes, but this is "
                + (f"one of {count}" if joined else "a single one"),
                remedy=f"start it with torchrun --nproc-per-node {self.workers} your_script.py",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the exchange between workers cannot be predicted; None if it can."""
        reason = why_no_gradients(graph)
        if reason is None and self.updates and not has_update(graph):
            return "the step has no optimizer"
        return reason

    def by_hand(self, group: str, wrap: str) -> CodeChange:
        """Return manual steps: starting processes and distributing data cannot be edits.

        Args:
            group: argument of ``init_process_group``.
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
        """Return `graph` as a step of all workers, each with its own samples."""
        meta = {**graph.meta, "workers": self.workers}
        return replace(graph, samples=graph.samples * self.workers, meta=meta)


class OnReplicas(_Distributed):
    """Base of techniques that change how replicas average their gradients."""

    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "gradients are summed in another order"
    )

    def why_no_replicas(self, graph: Graph) -> str | None:
        """Return why the technique needs another one that creates replicas; None if not."""
        if all_reduces(graph):
            return None
        return f"no gradients are all-reduced; combine it, for example ddp:workers=16+{self.name}"

    def need_ddp(self, built: BuiltWorkload, written: str) -> Any:
        """Return the model; raise a `WorkloadError` unless DistributedDataParallel wraps it.

        Args:
            written: spec of the technique, for the message.
        """
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(built.model, DistributedDataParallel):
            raise WorkloadError(
                f"{self.name} needs a model in DistributedDataParallel",
                remedy=f"for example ddp:workers=2+{written}, in 2 processes",
            )
        return built.model

    def need_hookless(self, built: BuiltWorkload) -> Any:
        """Return the model; raise a `WorkloadError` unless it is in DDP and has no hook."""
        model = self.need_ddp(built, self.name)
        if getattr(model, "_comm_hooks", None):
            raise WorkloadError(
                f"{self.name} needs the model's communication hook, which is already in use",
                remedy="use only one technique that changes how gradients are exchanged",
            )
        return model


def all_reduces(graph: Graph) -> list[Exchange]:
    """Return the exchanges that average the gradients of replicas."""
    return [
        row
        for row in graph.exchanges
        if row.collective.kind == "all_reduce" and row.purpose == "gradient"
    ]


def has_update(graph: Graph) -> bool:
    return bool((graph.tasks.phase == StepPhase.OPTIMIZER).any())


def speaks_gloo(cluster: Cluster) -> bool:
    """Whether the cluster was calibrated with messages of gloo, as our collectives use."""
    return cluster.calibration is not None and "gloo" in cluster.calibration.libraries
