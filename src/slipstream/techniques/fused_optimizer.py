"""One kernel for the whole weight update, or one per kind of operation, in place of many.

Source: NVIDIA Apex's FusedAdam; in PyTorch the ``fused`` and ``foreach`` flags of its optimizers.
Modelled as in Daydream (Zhu et al., ATC 2020, section 5.2): the update's tasks make way for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, TensorSpec
from slipstream.provenance import Provenance
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage

if TYPE_CHECKING:
    from slipstream.workload import Built, Workload

_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
_FOREACH = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip
_STEP = "Optimizer.step#"


@dataclass(frozen=True)
class FusedOptimizer(Settings):
    """Update all parameters in one fused kernel (``fused``) or in batches (``foreach``)."""

    kind: Literal["fused", "foreach"] = "fused"

    name: ClassVar[str] = "fused_optimizer"
    stage: ClassVar[int] = Stage.OPTIMIZER
    conflicts: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why this optimizer cannot be fused."""
        described: Any = graph.meta.get("optimizer")
        if not described or not len(_update_tasks(graph)):
            return "the step has no optimizer"
        known = _FUSED if self.kind == "fused" else _FOREACH
        if described["class"] not in known:
            return f"torch has no {self.kind} form of {described['class']}"
        settings = described["settings"]
        if settings.get("fused") or (self.kind == "foreach" and settings.get("foreach")):
            return f"the optimizer is {'fused' if settings.get('fused') else 'foreach'} already"
        if settings.get("differentiable"):
            return "a differentiable optimizer cannot be fused"
        return None

    def questions(self, graph: Graph) -> Sequence[Call]:
        """The whole update as it is, and fused."""
        return [_update(graph, {}), _update(graph, self._flags())]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """One task in place of the update's, as long as the micro-benchmark of a whole update."""
        tasks = _update_tasks(graph)
        before = float(graph.tasks.duration_ns[tasks].sum() + graph.tasks.gap_ns[tasks].sum())
        old, new = (context.durations.lookup(call) for call in self.questions(graph))
        edit = Editor(graph, str(self))
        for task in tasks:
            edit.remove(int(task))
        if old is None or new is None or not old.nanoseconds:
            duration, provenance, spread = before, Provenance.ASSUMED, 0.5
        elif self.kind == "fused":
            # Works in place on what is there: as fast alone as in the step.
            duration, provenance, spread = new.nanoseconds, new.provenance, new.spread
        else:
            # Allocates temporaries as the loop does, at a cost that depends on the rest of the
            # step; the ratio carries that over.
            duration = before * new.nanoseconds / old.nanoseconds
            provenance, spread = new.provenance, math.hypot(old.spread, new.spread)
        edit.insert(
            int(tasks[-1]), f"{self.kind} update", duration, provenance,
            spread=spread, call=_update(graph, self._flags()),
        )  # fmt: skip
        return edit.apply(f"{len(tasks)} operators of the update in one")

    def apply(self, built: Built) -> None:
        """Set the flag on every parameter group.

        Raises:
            WorkloadError: there is no optimizer, or it has no such form.
        """
        kind = type(built.optimizer).__name__
        if kind not in (_FUSED if self.kind == "fused" else _FOREACH):
            raise WorkloadError(f"there is no {self.kind} form of {kind}")
        for group in built.optimizer.param_groups:
            group.update(self._flags())

    def quality(self, graph: Graph | None = None) -> Quality:
        """The same arithmetic in another order."""
        return Quality(QualityKind.ROUNDING, "the same update; sums may round differently")

    def code(self, workload: Workload) -> CodeChange | None:
        """No automatic edit yet: give ``fused=True`` where the optimizer is made."""
        return None

    def _flags(self) -> dict[str, bool]:
        return {"fused": self.kind == "fused", "foreach": self.kind == "foreach"}


def _update_tasks(graph: Graph) -> NDArray[np.int64]:
    """Tasks inside ``Optimizer.step``."""
    inside = np.array([text.startswith(_STEP) for text in graph.strings])
    phase = graph.tasks.phase == StepPhase.OPTIMIZER
    return np.flatnonzero(phase & inside[graph.tasks.scope])


def _update(graph: Graph, flags: dict[str, bool]) -> Call:
    described: Any = graph.meta["optimizer"]
    settings = {**described["settings"], **flags}
    specs = tuple(
        TensorSpec(dtype, tuple(shape), tuple(strides), device)
        for dtype, shape, strides, device in described["tensors"]
    )
    pairs = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(settings.items())
    )
    return Call("slipstream::optimizer_step()", (described["class"], pairs, specs))
