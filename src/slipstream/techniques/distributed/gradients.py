"""Which gradients a recorded step makes, when each is ready, and how DDP puts them in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.graph import Graph, StepPhase, TensorSpec
from slipstream.graph.graph import kept

FIRST_BUCKET_BYTES = 1 << 20
"""DistributedDataParallel's default for the first bucket, so that communication starts early."""
DEFAULT_MIB = 25.0
"""Its default for all others."""
BUCKET_BYTES = 25 << 20
_ACCUMULATE = "AccumulateGrad"
# What AccumulateGrad does with a new gradient: keep it, copy it, or add it to the one there is.
_TAKES = frozenset({"aten::detach", "aten::clone", "aten::copy_", "aten::add_", "aten::add"})
_REDUCER = "DistributedDataParallel"


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        task: when it is done, the gradient is ready.
        spec: the tensor.
        module: qualified name of the module whose parameter it is of.
    """

    task: int
    spec: TensorSpec
    module: str


@kept
def gradients(graph: Graph) -> list[Gradient]:
    """The gradients of the step's last backward pass, in the order in which they are ready."""
    tasks = graph.tasks
    accumulates = np.array([_ACCUMULATE in text for text in graph.strings], bool)
    takes = [call.name in _TAKES and bool(call.inputs) for call in graph.calls]
    mask = accumulates[tasks.scope] & np.array([*takes, False])[tasks.call]  # -1 is not a call
    taking = np.flatnonzero(mask & (np.diff(graph.operand_start) > 0))
    storages = graph.operands[graph.operand_start[taking]]
    # Accumulated over several passes, a gradient is exchanged after the last one only.
    last = dict(zip(storages.tolist(), taking.tolist(), strict=True))
    views = [graph.task(task) for task in sorted(last.values())]
    return [Gradient(view.number, view.known_call.inputs[0], view.module) for view in views]


def nbytes_of(bucket: Sequence[Gradient]) -> int:
    return sum(one.spec.nbytes for one in bucket)


def last_backward(graph: Graph) -> int:
    """The last task of the backward pass; -1 without one."""
    tasks = np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD)
    return int(tasks[-1]) if len(tasks) else -1


def first_uses(graph: Graph, phase: StepPhase) -> dict[str, int]:
    """By a module's qualified name: the first task of `phase` that runs in it."""
    tasks = np.flatnonzero(graph.tasks.phase == phase)
    modules, firsts = np.unique(graph.tasks.module[tasks], return_index=True)
    names = [graph.string(module) for module in modules.tolist()]
    return dict(zip(names, tasks[firsts].tolist(), strict=True))


def why_no_gradients(graph: Graph) -> str | None:
    """None, or why it cannot be told what replicas would exchange."""
    if graph.workers > 1 or graph.exchanges:
        return "the step is shared among workers already"
    if any(_REDUCER in text for text in graph.strings):
        return "the step exchanges gradients already; record it without DistributedDataParallel"
    if last_backward(graph) < 0:
        return "the step has no backward pass"
    if not gradients(graph):
        return "the recording does not say when gradients are ready; record it again"
    return None


def ddp_buckets(found: Sequence[Gradient], cap_mib: float) -> list[list[Gradient]]:
    """`buckets` of DDP's ``bucket_cap_mb``; the default has a smaller first bucket besides."""
    most = int(cap_mib * (1 << 20))
    return buckets(found, FIRST_BUCKET_BYTES if cap_mib == DEFAULT_MIB else most, most)


def buckets(
    found: Sequence[Gradient],
    first_bytes: int = FIRST_BUCKET_BYTES,
    most_bytes: int = BUCKET_BYTES,
) -> list[list[Gradient]]:
    """Gradients in the buckets that DDP makes of them once it has seen their order.

    A bucket is closed by the gradient that reaches its limit; each dtype and device has buckets of
    its own. Source: torch's ``compute_bucket_assignment_by_size``, and `Reducer::rebuild_buckets`,
    which after the first step takes gradients in the order in which they are ready.

    Returns:
        Lists of gradients, in the order in which they are sent: that in which they are full.
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
            limits[key] = most_bytes
    return [*closed, *open_.values()]
