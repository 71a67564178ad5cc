"""Gradient accumulation: several batches per optimizer step.

The update's cost is shared by more samples. It changes training as a larger batch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Edges, Edit, Graph, StepPhase, StringTable, TensorSpec
from slipstream.graph.graph import PROVENANCES
from slipstream.provenance import Provenance
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage

if TYPE_CHECKING:
    from slipstream.workload import Built, Workload

_ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"


@dataclass(frozen=True)
class Accumulation(Settings):
    """Run forward and backward on `batches` batches before each optimizer step."""

    batches: int = 4

    name: ClassVar[str] = "accumulation"
    stage: ClassVar[int] = Stage.OPTIMIZER + 5
    conflicts: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.batches < 2:
            raise InvalidArgumentError("accumulation:batches", f"{self.batches} is less than 2")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why there is nothing to accumulate."""
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step has no backward pass"
        if not (graph.tasks.phase == StepPhase.OPTIMIZER).any():
            return "the step has no optimizer"
        return None

    def questions(self, graph: Graph) -> Sequence[Call]:
        """Adding a gradient to the one that is there, for every parameter shape."""
        return [_add(spec) for spec in _gradients(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Repeat forward and backward; from the second time on gradients are added."""
        tasks = graph.tasks
        compute = np.flatnonzero(tasks.phase != StepPhase.OPTIMIZER)
        update = np.flatnonzero(tasks.phase == StepPhase.OPTIMIZER)
        # zero_grad may come first: what precedes the first computation stays there, once.
        first = compute[compute > 0][0] if len(compute) > 1 else 0
        before, after = update[update < first], update[update > first]
        begin = compute[compute < first]
        repeated = compute[compute >= first]
        order = np.concatenate([begin, before, np.tile(repeated, self.batches), after])
        repeats = self.batches - 1
        answers = [context.durations.lookup(_add(spec)) for spec in _gradients(graph)]
        known = [answer.nanoseconds for answer in answers if answer is not None]
        strings, n = StringTable(graph.strings), len(order) + 1
        added = {
            "name": strings.add("accumulate gradients"), "scope": 0, "module": 0, "source": 0,
            "kind": 1, "phase": int(StepPhase.BACKWARD), "lane": 0, "rank": 0, "call": -1,
            "sequence": -1, "duration_ns": repeats * sum(known), "gap_ns": 0.0, "spread": 0.1,
            "provenance": PROVENANCES.index(
                Provenance.MICROBENCHMARK if len(known) == len(answers) else Provenance.ASSUMED
            ),
        }  # fmt: skip
        where = len(begin) + len(before) + self.batches * len(repeated)
        edited = tasks.take(np.insert(order, where, 0))
        for name, column in edited.columns().items():
            column[where] = added[name]
        counts = np.diff(graph.operand_start)[order]
        counts = np.insert(counts, where, 0)
        operands = [graph.storages(int(task)) for task in order]
        return replace(
            graph,
            tasks=edited,
            edges=Edges.none(),
            strings=strings.freeze(),
            operand_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            operands=np.concatenate(operands).astype(np.int32),
            samples=graph.samples * self.batches,
            edits=(
                *graph.edits,
                Edit(str(self), f"{self.batches} batches per update", n - len(tasks)),
            ),
        )

    def apply(self, built: Built) -> None:
        """Replace the step by one that accumulates over several passes of the batch.

        Raises:
            WorkloadError: the step is the user's own, or there is no optimizer.
        """
        from slipstream.workload.built import training_loss

        if built.optimizer is None or built.model is None or built.batch is None:
            raise WorkloadError(
                "accumulation needs the model, the batch and the optimizer",
                remedy="return (model, batch, loss, optimizer)",
            )

        def step() -> Any:
            built.optimizer.zero_grad()
            for _ in range(self.batches):
                loss = training_loss(built) / self.batches
                loss.backward()
            built.optimizer.step()
            return loss.detach() * self.batches

        built.step = step
        built.samples *= self.batches

    def quality(self, graph: Graph | None = None) -> Quality:
        """A larger batch: the learning rate and its schedule have to follow."""
        return Quality(QualityKind.NEEDS_TRAINING, "the effective batch grows")

    def code(self, workload: Workload) -> CodeChange | None:
        """No automatic edit yet."""
        return None


def _gradients(graph: Graph) -> list[TensorSpec]:
    described: Any = graph.meta.get("optimizer") or {"tensors": []}
    return [
        TensorSpec(dtype, tuple(shape), tuple(strides), device)
        for dtype, shape, strides, device in described["tensors"]
    ]


def _add(spec: TensorSpec) -> Call:
    return Call(_ADD, (spec, spec, 1), (spec,))
