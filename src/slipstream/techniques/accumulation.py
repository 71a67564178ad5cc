"""Gradient accumulation: several batches per optimizer step.

The update's cost is shared by more samples. Training behaves as with a larger batch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import TimingRequest
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import (
    Allocations,
    Call,
    Edges,
    Edit,
    Graph,
    Role,
    StepPhase,
    StringTable,
    TensorSpec,
    price,
)
from slipstream.graph.values import PROVENANCES
from slipstream.provenance import Provenance
from slipstream.source import Source, accumulate, locate
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import updated_tensors
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.built import HIDDEN_BATCH, training_loss

# Operators of replicas' communication, and scopes of DistributedDataParallel.
_COMMUNICATION = "c10d::"
_REDUCER = "torch.distributed"
_ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"


@dataclass(frozen=True)
class Accumulation(TechniqueSettings):
    """Run forward and backward on `batches` batches before each optimizer step."""

    batches: int = 4

    name: ClassVar[str] = "accumulation"
    traits: ClassVar[Traits] = Traits(stage=Stage.OPTIMIZER + 5, edits_script=True)
    effect: ClassVar[Quality] = Quality(QualityKind.NEEDS_TRAINING, "the effective batch grows")

    def __post_init__(self) -> None:
        if self.batches < 2:
            raise InvalidArgumentError(
                "accumulation:batches",
                f"{self.batches} is less than 2",
                remedy="for example accumulation:4",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is nothing to accumulate; None if there is."""
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step has no backward pass"
        if not (graph.tasks.phase == StepPhase.OPTIMIZER).any():
            return "the step has no optimizer"
        described: Any = graph.meta.get("optimizer") or {}
        if described.get("class") == "LBFGS":
            return "LBFGS evaluates the loss several times on one batch"
        if not graph.samples:
            # With an unknown number of samples, the longer step would look like a slow-down.
            return HIDDEN_BATCH
        return None

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the addition of a gradient, for every parameter shape."""
        return [_added(spec) for spec in Counter(updated_tensors(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Repeat forward and backward; all but the first pass add gradients.

        Replicas exchange gradients once, with the last batch.
        """
        tasks = graph.tasks
        compute = np.flatnonzero(tasks.phase != StepPhase.OPTIMIZER)
        update = np.flatnonzero(tasks.phase == StepPhase.OPTIMIZER)
        # zero_grad may come first: updates before the first computation are not repeated.
        first = compute[compute > 0][0] if len(compute) > 1 else 0
        before, after = update[update < first], update[update > first]
        begin = compute[compute < first]
        repeated = compute[compute >= first]
        repeats = self.batches - 1
        passes = [*[repeated[~_exchanges(graph)[repeated]]] * repeats, repeated]
        # -1 represents the addition of a pass's gradients.
        later = [part for repeat in passes[1:] for part in (repeat, [-1])]
        order = np.concatenate([begin, before, passes[0], *later, after])
        specs = Counter(updated_tensors(graph))
        prices = {spec: price(context.durations, _added(spec), 0.0) for spec in specs}
        each_ns = sum(prices[spec].nanoseconds * count for spec, count in specs.items())
        assumed = any(cost.provenance is Provenance.ASSUMED for cost in prices.values())
        strings, inserted = StringTable(graph.strings), order < 0
        added = {
            "name": strings.add("accumulate gradients"), "scope": 0, "module": 0, "source": 0,
            "kind": 1, "phase": int(StepPhase.BACKWARD), "lane": 0, "rank": 0, "call": -1,
            "sequence": -1, "duration_ns": each_ns, "gap_ns": 0.0, "spread": 0.1,
            "provenance": PROVENANCES.index(
                Provenance.ASSUMED if assumed else Provenance.MICROBENCHMARK
            ),
        }  # fmt: skip
        edited = tasks.take(np.maximum(order, 0))
        for name, column in edited.columns().items():
            column[inserted] = added[name]
        starts, operands = graph.gathered(order)
        return replace(
            graph,
            tasks=edited,
            edges=Edges.none(),
            strings=strings.freeze(),
            operand_start=starts,
            operands=operands,
            samples=graph.samples * self.batches,
            memory=_memory(graph, np.concatenate([begin, before]), passes, after),
            edits=(
                *graph.edits,
                Edit(str(self), f"{self.batches} batches per update", len(order) - len(tasks)),
            ),
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Replace the step by one that accumulates over several passes of the batch.

        A plain script is already edited by `edit_script`.

        Raises:
            WorkloadError: the step is user-defined, or there is no optimizer.
        """
        if not built.from_parts and not built.own_step:
            built.samples *= self.batches
            return
        if built.optimizer is None or built.model is None or built.batch is None:
            raise WorkloadError(
                "accumulation needs the model, the batch and the optimizer",
                remedy="return (model, batch, loss, optimizer)",
            )
        if built.own_step:
            raise WorkloadError(
                "accumulation: the step is your own and makes one update",
                remedy="return (model, batch, loss, optimizer) from a function, without it",
            )

        def step() -> Any:
            built.optimizer.zero_grad()
            # Replicas, which later techniques may create, exchange gradients in every backward
            # pass outside of no_sync.
            no_sync = getattr(built.model, "no_sync", contextlib.nullcontext)
            for number in range(1, self.batches + 1):
                with no_sync() if number < self.batches else contextlib.nullcontext():
                    loss = training_loss(built) / self.batches
                    loss.backward()
            built.optimizer.step()
            return loss.detach() * self.batches

        built.step = step
        built.samples *= self.batches

    def edit_script(self, script: Path, content: bytes, lines: range) -> bytes:
        """Edit a plain script to run one update per `batches` batches.

        Args:
            lines: see `slipstream.source.locate`.

        Raises:
            EditLocationError: its loop does not have the form batch, backward, update.
            AlreadyAppliedError: it already accumulates.
            WorkloadError: it is not valid Python.
        """
        where = locate(Source.of(content, script), None, lines)
        return accumulate(where, self.batches).content

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit of a script's loop to one update for several batches."""
        n = self.batches
        return CodeChange.of(
            workload,
            lambda where: accumulate(where, n),
            by_hand=f"(loss / {n}).backward()\nif (step + 1) % {n} == 0:\n"
            "    optimizer.step()\n    optimizer.zero_grad()",
            note=f"it trains as a batch {n} times as large: learning rate and schedule have to "
            f"follow; fewer than {n} batches, left over when a pass ends, make no update of their "
            "own",
            technique=self,
        )


def _exchanges(graph: Graph) -> NDArray[np.bool_]:
    """Return which tasks exchange gradients between replicas, bool [tasks]."""
    tasks = graph.tasks
    communicates = np.array([text.startswith(_COMMUNICATION) for text in graph.strings], bool)
    within = np.array([_REDUCER in text.replace("::", ".") for text in graph.strings], bool)
    exchange: NDArray[np.bool_] = communicates[tasks.name] | within[tasks.scope]
    return exchange


def _memory(
    graph: Graph,
    once: NDArray[np.int64],
    passes: Sequence[NDArray[np.int64]],
    after: NDArray[np.int64],
) -> Allocations:
    """Return the allocations of the tasks in the order of `Accumulation.predict`.

    The first pass allocates the gradients, which remain; those of later passes are added to them
    and freed. Other tensors that outlive a pass are freed at its end, except in the last one.

    Args:
        once: tasks before the passes.
        passes: tasks of each pass; the last contains all of them.
    """
    memory = graph.memory
    repeated, final = passes[-1], len(passes) - 1
    place = np.full(len(graph) + 1, -1, np.int64)
    place[once] = np.arange(len(once))
    # Every pass but the first is followed by a task of its additions.
    place[after] = len(once) + sum(map(len, passes)) + final + np.arange(len(after))
    within = np.zeros(len(graph) + 1, bool)
    within[repeated] = True
    parts = []
    first = len(once)
    for k, tasks in enumerate(passes):
        last = first + len(tasks) - 1
        runs = np.zeros(len(graph) + 1, bool)
        runs[tasks] = True
        # If this pass omits the task that frees an allocation, the task before it frees it.
        place[repeated] = first + np.maximum(np.cumsum(runs[repeated]) - 1, 0)
        first = last + 1 + int(k > 0)
        # Allocations of an earlier step are freed in the first pass; permanent ones count once.
        inherited = (memory.producer < 0) & within[memory.release]
        chosen = np.where(inherited, k == 0, runs[memory.producer] | (k == final))
        part = memory.take(np.flatnonzero(chosen))
        produced, stays = within[part.producer], part.release < 0
        gradient = produced & stays & (part.role == Role.GRADIENT)
        producer, release = place[part.producer], place[part.release]
        outlives = produced & ~within[part.release]
        if k < final:
            release[outlives] = last
        if k > 0:
            release[gradient] = producer[gradient]
        else:
            release[gradient] = -1
        parts.append(
            replace(part, producer=producer.astype(np.int32), release=release.astype(np.int32))
        )
    return parts[0].joined(*parts[1:])


def _added(spec: TensorSpec) -> TimingRequest:
    """Return the addition of a gradient with operands in cache."""
    return TimingRequest(Call(_ADD, (spec, spec, 1), (spec,)), warm=True)
