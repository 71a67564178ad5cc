"""Exchange of gradients in slices, the most urgent first: P3, priority-based propagation.

The backward pass computes gradients from the last layer to the first, but the next forward pass
needs the first layer first. Gradients are cut into slices, each all-reduced separately, with those
of the earliest layer first. A layer is updated once its slices have arrived, and the next forward
pass waits for each layer, not for all. Source: Jayarajan et al., SysML 2019, arXiv 1905.03960.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.cluster import Collective
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Allocations, Editor, Graph, StepPhase, insert_exchange, replay
from slipstream.provenance import Provenance
from slipstream.technique import CodeChange, Context
from slipstream.techniques.distributed.gradients import (
    Gradient,
    first_uses,
    gradients,
    nbytes_of,
)
from slipstream.techniques.distributed.replicas import Spreads

if TYPE_CHECKING:
    from slipstream.cluster import Cost
    from slipstream.workload import BuiltWorkload, Workload

_CANDIDATES = (12_500, 50_000, 200_000, 800_000, 3_200_000)
_MIN_SLICE = 256
# Relative error of a layer's update time, which is a share by size of the whole update's.
_UPDATE_SPREAD = 0.2


@dataclass(frozen=True)
class PrioritySync(Spreads):
    """`workers` replicas that exchange slices of at most `slice_` elements.

    0 elements select the size with the shortest predicted step.
    """

    workers: int = 2
    slice_: int = 0
    algo: str = "auto"

    name: ClassVar[str] = "priority_sync"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slice_ and self.slice_ < _MIN_SLICE:
            raise InvalidArgumentError(
                "priority_sync:slice", f"{self.slice_} elements are fewer than {_MIN_SLICE}",
                remedy="pass for example priority_sync:4,slice=50000, or 0 for the best size",
            )  # fmt: skip

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Insert all-reduces of slices by priority, and each layer's update before its next use."""
        cluster = self.need_cluster(context)
        group = self.group(cluster)
        grads, uses = gradients(graph), first_uses(graph, StepPhase.FORWARD)
        ready = np.array([gradient.task for gradient in grads])
        ends_ns = replay(graph).end_ns[ready].tolist()
        first_use = min(uses.values())
        used = np.array([uses.get(gradient.module, first_use) for gradient in grads])
        urgency = [uses.get(gradient.module, 0) for gradient in grads]
        update = graph.tasks.phase == StepPhase.OPTIMIZER
        update_ns = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[update].sum())
        total = max(nbytes_of(grads), 1)
        updates_ns = [update_ns * gradient.spec.nbytes / total for gradient in grads]

        def insert_updates(edit: Editor) -> NDArray[np.int64]:
            return edit.insert_all(
                used, "update", updates_ns, Provenance.FITTED, spread=_UPDATE_SPREAD, before=True
            )

        def send(
            edit: Editor, gates: NDArray[np.int64], ready: NDArray[np.int64], elements: int
        ) -> int:
            slices = _slices(grads, elements)
            cost = {
                size: cluster.cost(Collective("all_reduce", size, group, self.algo))
                for size in {nbytes for _, nbytes in slices}
            }
            for number, nbytes in _send_order(ends_ns, urgency, slices, cost):
                insert_exchange(
                    edit,
                    cluster,
                    Collective("all_reduce", nbytes, group, self.algo),
                    beside=int(ready.max()),
                    ready=int(ready[number]),
                    awaited=int(gates[number]),
                    lag=1,
                    tensors=(grads[number].spec,),
                    modules=(grads[number].module,),
                    name="all_reduce of a slice",
                    cost=cost[nbytes],
                )
            return len(slices)

        def fastest() -> int:
            # Without update, tensors and memory the step takes as long, and edits are faster.
            bare = replace(
                graph, memory=Allocations.none(), operand_start=np.zeros_like(graph.operand_start)
            )
            edit = Editor(bare, "")
            insert_updates(edit)
            edit.remove(np.flatnonzero(update))
            gated, stays = edit.apply(""), ~update
            positions = np.cumsum(stays) - 1 + np.cumsum(np.bincount(used, minlength=len(graph)))
            in_order = np.argsort(used, kind="stable")
            gates = np.empty_like(used)
            gates[in_order] = np.cumsum(stays)[used[in_order]] - 1 + np.arange(len(used))

            def step_ns(elements: int) -> float:
                edit = Editor(gated, "")
                send(edit, gates, positions[ready], elements)
                return replay(edit.apply("")).step_ns

            # Once every gradient is a single slice, larger slices change nothing.
            largest = max(gradient.spec.numel for gradient in grads)
            smaller = (0, *_CANDIDATES[:-1])
            tried = [
                size for size, below in zip(_CANDIDATES, smaller, strict=True) if below < largest
            ]
            return min(tried, key=step_ns)

        elements = self.slice_ or fastest()
        edit = Editor(graph, str(replace(self, slice_=elements)))
        count = send(edit, insert_updates(edit), ready, elements)
        edit.remove(np.flatnonzero(update))
        edited = edit.apply(
            f"{self.workers} workers; {count} slices of at most {elements} elements, "
            "the earliest layer first"
        )
        return self.shared(edited)

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap model and optimizer, in a process group of `workers` processes.

        Raises:
            WorkloadError: the group has another size, or the model or optimizer is missing.
        """
        from slipstream.techniques.distributed.priority.wrapper import PriorityDDP

        self.need_joined()
        for part in (built.model, built.optimizer):
            self.need_part(part, "the model and its optimizer")
        built.model = PriorityDDP(built.model, built.optimizer, slice_elems=self.slice_ or "auto")

    def code(self, workload: Workload) -> CodeChange | None:
        argument = f", slice_elems={self.slice_}" if self.slice_ else ""
        return self.by_hand(
            "'gloo'", f"model = ss.distributed.PriorityDDP(model, optimizer{argument})"
        )


def _slices(gradient_list: Sequence[Gradient], elements: int) -> list[tuple[int, int]]:
    """Return (index of the gradient, bytes) of each slice."""
    slices: list[tuple[int, int]] = []
    for number, gradient in enumerate(gradient_list):
        item = gradient.spec.nbytes // max(gradient.spec.numel, 1)
        slices += [
            (number, item * min(elements, gradient.spec.numel - start))
            for start in range(0, gradient.spec.numel, elements)
        ]
    return slices


def _send_order(
    ends_ns: Sequence[float],
    urgency: Sequence[int],
    slices: Sequence[tuple[int, int]],
    cost: dict[int, Cost],
) -> list[tuple[int, int]]:
    """Return slices in the order in which a channel sends them, the most urgent ready one first.

    All slices of a synchronous step are sent before the next step has gradients, so the order
    depends on a single step.

    Args:
        ends_ns: time at which each gradient is ready.
        urgency: the task of the next forward pass that first needs each gradient's parameter.
        cost: cost of sending a slice, by bytes.
    """
    waiting: list[tuple[int, int]] = []
    pending = sorted(range(len(slices)), key=lambda s: (ends_ns[slices[s][0]], s))
    order: list[tuple[int, int]] = []
    now, position = 0.0, 0
    while waiting or position < len(pending):
        while position < len(pending):
            ready_ns = ends_ns[slices[pending[position]][0]]
            if waiting and ready_ns > now:
                break
            now = max(now, ready_ns) if not waiting else now
            heapq.heappush(waiting, (urgency[slices[pending[position]][0]], pending[position]))
            position += 1
        _, chosen = heapq.heappop(waiting)
        order.append(slices[chosen])
        now += cost[slices[chosen][1]].duration_ns
    return order
