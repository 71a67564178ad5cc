"""Gradients sent in slices, the most urgent first: P3, priority-based parameter propagation.

Gradients are made last layer first but needed first layer first, by the next forward pass. They
are cut in slices, each all-reduced by itself, those of the earliest layer before all others that
wait; a layer is updated when its slices are there, and the next forward pass waits for each layer,
not for all of them. Source: Jayarajan et al., SysML 2019, arXiv 1905.03960.
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

_TRIED = (12_500, 50_000, 200_000, 800_000, 3_200_000)
_SMALLEST = 256
# The update of a layer by itself is timed with the others, and shared out by size.
_UNSURE = 0.2


@dataclass(frozen=True)
class PrioritySync(Spreads):
    """`workers` replicas; slices of at most so many elements; 0: what is predicted to be best."""

    workers: int = 2
    slice_: int = 0
    algo: str = "auto"

    name: ClassVar[str] = "priority_sync"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slice_ and self.slice_ < _SMALLEST:
            raise InvalidArgumentError(
                "priority_sync:slice", f"{self.slice_} elements are fewer than {_SMALLEST}",
                remedy="for example priority_sync:4,slice=50000; 0 for the best",
            )  # fmt: skip

    def predict(self, graph: Graph, context: Context) -> Graph:
        """All-reduces of slices by priority; each layer's update before its next forward pass."""
        cluster = self.need_cluster(context)
        group = self.group(cluster)
        grads, uses = gradients(graph), first_uses(graph, StepPhase.FORWARD)
        ready = np.array([gradient.task for gradient in grads])
        ends_ns = replay(graph).end_ns[ready].tolist()
        begin = min(uses.values())
        used = np.array([uses.get(gradient.module, begin) for gradient in grads])
        urgent = [uses.get(gradient.module, 0) for gradient in grads]
        update = graph.tasks.phase == StepPhase.OPTIMIZER
        spent = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[update].sum())
        total = max(nbytes_of(grads), 1)
        gates_ns = [spent * gradient.spec.nbytes / total for gradient in grads]

        def put_gates(edit: Editor) -> NDArray[np.int64]:
            return edit.insert_all(
                used, "update", gates_ns, Provenance.FITTED, spread=_UNSURE, before=True
            )

        def send(
            edit: Editor, gates: NDArray[np.int64], ready: NDArray[np.int64], elements: int
        ) -> int:
            slices = _slices(grads, elements)
            cost = {
                size: cluster.cost(Collective("all_reduce", size, group, self.algo))
                for size in {nbytes for _, nbytes in slices}
            }
            for number, nbytes in _served(ends_ns, urgent, slices, cost):
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
            # The step without its update, tensors and memory takes as long, and is soon edited.
            bare = replace(
                graph, memory=Allocations.none(), operand_start=np.zeros_like(graph.operand_start)
            )
            edit = Editor(bare, "")
            put_gates(edit)
            edit.remove(np.flatnonzero(update))
            gated, stays = edit.apply(""), ~update
            place = np.cumsum(stays) - 1 + np.cumsum(np.bincount(used, minlength=len(graph)))
            in_order = np.argsort(used, kind="stable")
            gates = np.empty_like(used)
            gates[in_order] = np.cumsum(stays)[used[in_order]] - 1 + np.arange(len(used))

            def step_ns(elements: int) -> float:
                edit = Editor(gated, "")
                send(edit, gates, place[ready], elements)
                return replay(edit.apply("")).step_ns

            # Once a gradient is a single slice, larger ones change nothing.
            largest = max(gradient.spec.numel for gradient in grads)
            smaller = (0, *_TRIED[:-1])
            tried = [size for size, below in zip(_TRIED, smaller, strict=True) if below < largest]
            return min(tried, key=step_ns)

        elements = self.slice_ or fastest()
        edit = Editor(graph, str(replace(self, slice_=elements)))
        count = send(edit, put_gates(edit), ready, elements)
        edit.remove(np.flatnonzero(update))
        edited = edit.apply(
            f"{self.workers} workers; {count} slices of at most {elements} elements, "
            "the earliest layer first"
        )
        return self.shared(edited)

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap model and optimizer, in a process that is one of `workers` already.

        Raises:
            WorkloadError: the process is not one of that many, or there is no model or optimizer.
        """
        from slipstream.techniques.distributed.priority.wrapper import PriorityDDP

        self.need_joined()
        for part in (built.model, built.optimizer):
            self.need_part(part, "the model and its optimizer")
        built.model = PriorityDDP(built.model, built.optimizer, slice_elems=self.slice_ or "auto")

    def code(self, workload: Workload) -> CodeChange | None:
        given = f", slice_elems={self.slice_}" if self.slice_ else ""
        return self.by_hand(
            "'gloo'", f"model = ss.distributed.PriorityDDP(model, optimizer{given})"
        )


def _slices(found: Sequence[Gradient], elements: int) -> list[tuple[int, int]]:
    """(number of the gradient, bytes) of each slice."""
    slices: list[tuple[int, int]] = []
    for number, one in enumerate(found):
        item = one.spec.nbytes // max(one.spec.numel, 1)
        slices += [
            (number, item * min(elements, one.spec.numel - start))
            for start in range(0, one.spec.numel, elements)
        ]
    return slices


def _served(
    ends_ns: Sequence[float],
    urgent: Sequence[int],
    slices: Sequence[tuple[int, int]],
    cost: dict[int, Cost],
) -> list[tuple[int, int]]:
    """The slices in the order in which one channel sends them, the most urgent that waits first.

    In a synchronous step nothing of the next one is made before all of this one has been sent, so
    that the order is settled within a step.

    Args:
        ends_ns: of each gradient, when it is ready.
        urgent: of each gradient, the task of the next forward pass that needs its parameter.
        cost: of sending a slice, by its bytes.
    """
    waiting: list[tuple[int, int]] = []
    coming = sorted(range(len(slices)), key=lambda s: (ends_ns[slices[s][0]], s))
    order: list[tuple[int, int]] = []
    now, place = 0.0, 0
    while waiting or place < len(coming):
        while place < len(coming):
            released = ends_ns[slices[coming[place]][0]]
            if waiting and released > now:
                break
            now = max(now, released) if not waiting else now
            heapq.heappush(waiting, (urgent[slices[coming[place]][0]], coming[place]))
            place += 1
        _, chosen = heapq.heappop(waiting)
        order.append(slices[chosen])
        now += cost[slices[chosen][1]].duration_ns
    return order
