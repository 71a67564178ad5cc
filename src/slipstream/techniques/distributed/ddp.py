"""Replicas that average their gradients: DistributedDataParallel.

Gradients are collected in buckets in the order in which they become ready; a full bucket is
all-reduced while the backward pass continues; the update waits for the last bucket. The prediction
is the step of one worker, which represents all of them. Source: Li et al., VLDB 2020, 2006.15704.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.cluster import Collective
from slipstream.durations import TimingRequest
from slipstream.errors import InvalidArgumentError
from slipstream.graph import (
    Call,
    Editor,
    Graph,
    Kind,
    Role,
    StepPhase,
    TensorSpec,
    insert_exchange,
    price,
)
from slipstream.provenance import Provenance
from slipstream.technique import CodeChange, Context, Traits
from slipstream.techniques.distributed.gradients import (
    DEFAULT_MIB,
    ddp_buckets,
    gradients,
    last_backward,
    nbytes_of,
)
from slipstream.techniques.distributed.replicas import REPLICAS, Spreads

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
# Bandwidth of a copy without a measured duration, in bytes per second.
_ASSUMED_COPY = 5e9


@dataclass(frozen=True)
class DDP(Spreads):
    """`workers` replicas, each with its own batch; gradients in buckets of `bucket_mb` MiB.

    Attributes:
        workers: number of replicas, on the first devices of the cluster.
        bucket_mb: torch's ``bucket_cap_mb``; with the default, the first bucket has 1 MiB.
        algo: algorithm of the all-reduce, see `slipstream.cluster.Collective`.
        jitter: standard deviation of a worker's compute time between steps, relative to its mean;
            every step waits for the slowest worker.
    """

    workers: int = 2
    bucket_mb: float = DEFAULT_MIB
    algo: str = "auto"
    jitter: float = 0.0

    name: ClassVar[str] = "ddp"
    traits: ClassVar[Traits] = replace(REPLICAS, hook="provides")
    updates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise InvalidArgumentError(
                "ddp:bucket_mb",
                f"{self.bucket_mb} is not a positive size",
                remedy="for example ddp:bucket_mb=25",
            )
        if not 0 <= self.jitter < 1:
            raise InvalidArgumentError(
                "ddp:jitter",
                f"{self.jitter} is not between 0 and 1",
                remedy="for example ddp:jitter=0.03",
            )

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the copies of each gradient into and out of its bucket."""
        return [copying(gradient.spec) for gradient in gradients(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Insert copies to and from buckets, an all-reduce per bucket, and the wait for it."""
        cluster = self.need_cluster(context)
        group = self.group(cluster)
        edit = Editor(graph, str(self))
        buckets = ddp_buckets(gradients(graph), self.bucket_mb)
        end = last_backward(graph)
        filled = [
            [
                put_copy(edit, context, gradient.spec, gradient.task, "into bucket")
                for gradient in bucket
            ]
            for bucket in buckets
        ]
        if self.jitter:
            wait_for_slowest(edit, graph, end, self.jitter, self.workers)
        for bucket, copies in zip(buckets, filled, strict=True):
            back = [
                put_copy(edit, context, gradient.spec, end, "out of bucket") for gradient in bucket
            ]
            insert_exchange(
                edit,
                cluster,
                Collective("all_reduce", nbytes_of(bucket), group, self.algo),
                beside=bucket[-1].task,
                ready=copies[-1],
                awaited=back[0],
                tensors=tuple(gradient.spec for gradient in bucket),
                modules=tuple(gradient.module for gradient in bucket),
                name="all_reduce of gradients",
            )
        if len(graph.memory):
            edit.allocate(sum(map(nbytes_of, buckets)), Role.GRADIENT, -1, -1)
        edited = edit.apply(
            f"{self.workers} workers; {len(buckets)} bucket{'s' * (len(buckets) != 1)} of gradients"
        )
        return self.shared(edited)

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap the model, in one of `workers` processes that have joined a group.

        Raises:
            WorkloadError: the group has another size, or there is no model.
        """
        from torch.nn.parallel import DistributedDataParallel

        self.need_joined()
        self.need_part(built.model, "the model")
        cap = None if self.bucket_mb == DEFAULT_MIB else self.bucket_mb
        built.model = DistributedDataParallel(built.model, bucket_cap_mb=cap)

    def code(self, workload: Workload) -> CodeChange | None:
        return self.by_hand("", "model = torch.nn.parallel.DistributedDataParallel(model)")


def copying(spec: TensorSpec) -> TimingRequest:
    """Return the copy of a gradient that is still in the cache."""
    return TimingRequest(Call(_COPY, (spec, spec, False), (spec,)), warm=True)


def put_copy(
    edit: Editor, context: Context, spec: TensorSpec, where: int, what: str, *, before: bool = False
) -> int:
    """Insert the copy of a gradient after (or before) the task `where`; return its handle."""
    question = copying(spec)
    duration_ns = price(context.durations, question, spec.nbytes / _ASSUMED_COPY * 1e9)
    return edit.put(where, question.call, duration_ns, name=f"copy {what}", before=before)


def wait_for_slowest(edit: Editor, graph: Graph, where: int, jitter: float, workers: int) -> None:
    """Insert a wait after the task `where`: the excess of the slowest worker over the mean.

    The expected maximum of n normal deviates, to within 1 % for n >= 2 (Blom 1958).
    """
    from scipy.special import ndtri

    largest = float(ndtri((workers - 0.375) / (workers + 0.25)))
    computes = np.isin(graph.tasks.phase, (StepPhase.FORWARD, StepPhase.BACKWARD))
    busy = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[computes].sum())
    edit.insert(
        where,
        "wait for the slowest worker",
        jitter * largest * busy,
        Provenance.USER,
        kind=Kind.WAIT,
    )
