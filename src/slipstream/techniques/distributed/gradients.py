"""Gradients of a recorded step, when each is ready, and their assignment to DDP buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.graph import Graph, StepPhase, TensorSpec
from slipstream.graph.graph import cached_per_graph

FIRST_BUCKET_BYTES = 1 << 20
"""DistributedDataParallel's default for the first bucket, so that communication starts early."""
DEFAULT_MIB = 25.0
"""DistributedDataParallel's default for all other buckets."""
BUCKET_BYTES = 25 << 20
_ACCUMULATE = "AccumulateGrad"
# Operators by which AccumulateGrad stores, copies or adds a new gradient.
_TAKES = frozenset({"aten::detach", "aten::clone", "aten::copy_", "aten::add_", "aten::add"})
_REDUCER = "DistributedDataParallel"


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        task: the task after which the gradient is ready.
        spec: the tensor.
        module: qualified name of the module that owns the parameter.
    """

    task: int
    spec: TensorSpec
    module: str


@cached_per_graph
def gradients(graph: Graph) -> list[Gradient]:
    """Return the gradients of the last backward pass, in the order in which they become ready."""
    tasks = graph.tasks
    accumulates = np.array([_ACCUMULATE in text for text in graph.strings], bool)
    takes = [call.name in _TAKES and bool(call.inputs) for call in graph.calls]
    mask = accumulates[tasks.scope] & np.array([*takes, False])[tasks.call]  # -1 is not a call
    taking = np.flatnonzero(mask & (np.diff(graph.operand_start) > 0))
    storages = graph.operands[graph.operand_start[taking]]
    # A gradient accumulated over several passes is exchanged after the last one only.
    last = dict(zip(storages.tolist(), taking.tolist(), strict=True))
    views = [graph.task(task) for task in sorted(last.values())]
    return [Gradient(view.number, view.known_call.inputs[0], view.module) for view in views]


def nbytes_of(bucket: Sequence[Gradient]) -> int:
    return sum(gradient.spec.nbytes for gradient in bucket)


def last_backward(graph: Graph) -> int:
    """Return the last task of the backward pass; -1 without one."""
    tasks = np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD)
    return int(tasks[-1]) if len(tasks) else -1


def first_uses(graph: Graph, phase: StepPhase) -> dict[str, int]:
    """Return the first task of `phase` in each module, by its qualified name."""
    tasks = np.flatnonzero(graph.tasks.phase == phase)
    modules, firsts = np.unique(graph.tasks.module[tasks], return_index=True)
    names = [graph.string(module) for module in modules.tolist()]
    return dict(zip(names, tasks[firsts].tolist(), strict=True))


def why_no_gradients(graph: Graph) -> str | None:
    """Return why the exchange of replicas cannot be predicted; None if it can."""
    if graph.workers > 1 or graph.exchanges:
        return "the step already runs on several workers"
    if any(_REDUCER in text for text in graph.strings):
        return "the step already exchanges gradients; record it without DistributedDataParallel"
    if last_backward(graph) < 0:
        return "the step has no backward pass"
    if not gradients(graph):
        return "the recording does not show when gradients are ready; record it again"
    return None


def ddp_buckets(found: Sequence[Gradient], cap_mib: float) -> list[list[Gradient]]:
    """Return `buckets` for DDP's ``bucket_cap_mb``; its default has a smaller first bucket."""
    max_bytes = int(cap_mib * (1 << 20))
    return buckets(found, FIRST_BUCKET_BYTES if cap_mib == DEFAULT_MIB else max_bytes, max_bytes)


def buckets(
    found: Sequence[Gradient],
    first_bytes: int = FIRST_BUCKET_BYTES,
    max_bytes: int = BUCKET_BYTES,
) -> list[list[Gradient]]:
    """Assign gradients to buckets as DDP does after the first step.

    The gradient that reaches the limit closes a bucket; each dtype and device has separate buckets.
    Source: torch's ``compute_bucket_assignment_by_size``, and `Reducer::rebuild_buckets`,
    which after the first step takes gradients in the order in which they are ready.

    Returns:
        Lists of gradients, in the order in which buckets become full and are sent.
    """
    closed: list[list[Gradient]] = []
    open_: dict[tuple[str, str], list[Gradient]] = {}
    limits: dict[tuple[str, str], int] = {}
    for gradient in found:
        key = (gradient.spec.dtype, gradient.spec.device)
        bucket = open_.setdefault(key, [])
        bucket.append(gradient)
        if nbytes_of(bucket) >= limits.get(key, first_bytes):
            closed.append(open_.pop(key))
            limits[key] = max_bytes
    return [*closed, *open_.values()]
