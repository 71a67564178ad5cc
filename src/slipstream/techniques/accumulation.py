"""Gradient accumulation: several batches per optimizer step.

The update's cost is shared by more samples. It changes training as a larger batch does.
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

from slipstream.durations import Question
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

# Replicas' communication, and what DistributedDataParallel does around it.
_TALKS = "c10d::"
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
        """None, or why there is nothing to accumulate."""
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step has no backward pass"
        if not (graph.tasks.phase == StepPhase.OPTIMIZER).any():
            return "the step has no optimizer"
        described: Any = graph.meta.get("optimizer") or {}
        if described.get("class") == "LBFGS":
            return "LBFGS evaluates the loss several times on one batch"
        if not graph.samples:
            # Four times the work for four times the samples would look like a loss.
            return HIDDEN_BATCH
        return None

    def required_timings(self, graph: Graph) -> Sequence[Question]:
        """Adding a gradient to the one that is there, for every parameter shape."""
        return [_added(spec) for spec in Counter(updated_tensors(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Repeat forward and backward; from the second time on gradients are added.

        Replicas exchange gradients once, with the last batch.
        """
        tasks = graph.tasks
        compute = np.flatnonzero(tasks.phase != StepPhase.OPTIMIZER)
        update = np.flatnonzero(tasks.phase == StepPhase.OPTIMIZER)
        # zero_grad may come first: what precedes the first computation stays there, once.
        first = compute[compute > 0][0] if len(compute) > 1 else 0
        before, after = update[update < first], update[update > first]
        begin = compute[compute < first]
        repeated = compute[compute >= first]
        repeats = self.batches - 1
        passes = [*[repeated[~_exchanges(graph)[repeated]]] * repeats, repeated]
        # -1: the task that stands for what a pass adds to gradients that are there.
        adding = [part for each in passes[1:] for part in (each, [-1])]
        order = np.concatenate([begin, before, passes[0], *adding, after])
        specs = Counter(updated_tensors(graph))
        prices = {spec: price(context.durations, _added(spec), 0.0) for spec in specs}
        each_ns = sum(prices[spec].nanoseconds * count for spec, count in specs.items())
        assumed = any(one.provenance is Provenance.ASSUMED for one in prices.values())
        strings, put_in = StringTable(graph.strings), order < 0
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
            column[put_in] = added[name]
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

        A plain script does so already: it runs with `edit_script` applied.

        Raises:
            WorkloadError: the step is the user's own, or there is no optimizer.
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
            # Replicas, which techniques may yet make of the model, exchange gradients in every
            # backward pass, unless told not to.
            quiet = getattr(built.model, "no_sync", contextlib.nullcontext)
            for number in range(1, self.batches + 1):
                with quiet() if number < self.batches else contextlib.nullcontext():
                    loss = training_loss(built) / self.batches
                    loss.backward()
            built.optimizer.step()
            return loss.detach() * self.batches

        built.step = step
        built.samples *= self.batches

    def edit_script(self, script: Path, content: bytes) -> bytes:
        """A plain script with one update for every `batches` of its batches.

        Raises:
            NotPlacedError: its loop has another form than batch, backward, update.
            AlreadyThereError: it accumulates already.
            WorkloadError: it is no Python.
        """
        return accumulate(locate(Source.of(content, script), None), self.batches).content

    def code(self, workload: Workload) -> CodeChange | None:
        """One update for several batches in a script's own loop."""
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
    """Which tasks replicas' exchange of gradients consists of: [tasks]."""
    tasks = graph.tasks
    talks = np.array([text.startswith(_TALKS) for text in graph.strings], bool)
    within = np.array([_REDUCER in text.replace("::", ".") for text in graph.strings], bool)
    exchange: NDArray[np.bool_] = talks[tasks.name] | within[tasks.scope]
    return exchange


def _memory(
    graph: Graph,
    once: NDArray[np.int64],
    passes: Sequence[NDArray[np.int64]],
    after: NDArray[np.int64],
) -> Allocations:
    """The allocations of the tasks in the order `Accumulation.predict` gives them.

    Args:
        once: tasks before the passes.
        passes: the tasks of each; the last has them all.

    The first pass allocates the gradients, which stay; those of later passes are added to them
    and freed. Whatever else a pass leaves behind makes way for the next one's.
    """
    memory = graph.memory
    repeated, final = passes[-1], len(passes) - 1
    place = np.full(len(graph) + 1, -1, np.int64)
    place[once] = np.arange(len(once))
    # Behind every pass but the first stands a task for its additions.
    place[after] = len(once) + sum(map(len, passes)) + final + np.arange(len(after))
    within = np.zeros(len(graph) + 1, bool)
    within[repeated] = True
    parts = []
    first = len(once)
    for k, tasks in enumerate(passes):
        last = first + len(tasks) - 1
        runs = np.zeros(len(graph) + 1, bool)
        runs[tasks] = True
        # What a task frees that this pass leaves out is freed after the one before it.
        place[repeated] = first + np.maximum(np.cumsum(runs[repeated]) - 1, 0)
        first = last + 1 + int(k > 0)
        # What an earlier step left goes in the first pass, what none frees is counted once.
        goes = (memory.producer < 0) & within[memory.release]
        chosen = np.where(goes, k == 0, runs[memory.producer] | (k == final))
        part = memory.take(np.flatnonzero(chosen))
        produced, stays = within[part.producer], part.release < 0
        gradient = produced & stays & (part.role == Role.GRADIENT)
        producer, release = place[part.producer], place[part.release]
        # What outlives its own pass.
        leaves = produced & ~within[part.release]
        if k < final:
            release[leaves] = last
        if k > 0:
            release[gradient] = producer[gradient]
        else:
            release[gradient] = -1
        parts.append(
            replace(part, producer=producer.astype(np.int32), release=release.astype(np.int32))
        )
    return parts[0].joined(*parts[1:])


def _added(spec: TensorSpec) -> Question:
    """The gradient was made a moment ago, and what it is added to not long before."""
    return Question(Call(_ADD, (spec, spec, 1), (spec,)), warm=True)
