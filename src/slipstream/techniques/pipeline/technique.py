"""Pipelines: stages of the model on several devices, which work on different micro-batches.

The prediction cuts the recorded step into stages of about equal time, repeats each per micro-batch
in the order of the schedule, and sends activations and their gradients between neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from slipstream.cluster import Mesh
from slipstream.cluster.orders import ORDERS, Order
from slipstream.cluster.placement import Part, Placement
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Edit, Graph, StepPhase, price, replay
from slipstream.graph.parts import balanced, boundaries, cut
from slipstream.graph.place import place
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Traits
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.distributed.gradients import gradients
from slipstream.techniques.distributed.replicas import REPLICAS, Spreads
from slipstream.techniques.pipeline.stability import delay_advice
from slipstream.units import format_bytes, format_percent

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

Schedule = Literal["gpipe", "1f1b", "zero_bubble", "pipedream", "async"]
_MAX_MICRO_BATCHES = 4096
_BATCH_NORM = "batch_norm"
# Techniques that change the step of replicas, or repeat it.
_CONFLICTS = frozenset({"accumulation", "sharded_update"})


@dataclass(frozen=True)
class Pipeline(Spreads):
    """The model in `workers` stages on as many devices.

    Attributes:
        workers: number of stages, on the first devices of the cluster.
        micro_batches: number of equal parts of the batch that are in the pipeline together.
        schedule: ``gpipe``, ``1f1b`` and ``zero_bubble`` make the update of the whole batch;
            ``pipedream`` and ``async`` never drain the pipeline, so that early stages compute with
            older weights, of which ``pipedream`` keeps a copy for the backward pass.
        rescheduling: number of updates in which the learning rate of a stage rises from the given
            one divided by the stage's delay to the given one; 0 to use the given one throughout.
        correction: decay, over the delay, of the moving average of updates by which ``async``
            extrapolates the weights of backward passes; 0 for the current weights.
        warmup: number of first steps that drain the pipeline.
    """

    workers: int = 2
    micro_batches: int = 4
    schedule: Schedule = "1f1b"
    rescheduling: int = 0
    correction: float = 0.0
    warmup: int = 0

    name: ClassVar[str] = "pipeline"
    traits: ClassVar[Traits] = replace(
        REPLICAS,
        axis="stage",
        conflicts=_CONFLICTS,
        variants=("pipeline:schedule=1f1b", "pipeline:schedule=zero_bubble"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.micro_batches <= _MAX_MICRO_BATCHES:
            raise InvalidArgumentError(
                "pipeline:micro_batches",
                f"{self.micro_batches} is not between 1 and {_MAX_MICRO_BATCHES}",
                remedy="for example pipeline:4,micro_batches=8",
            )
        if self.schedule not in ORDERS:
            raise InvalidArgumentError(
                "pipeline:schedule",
                f"'{self.schedule}' is not possible",
                remedy="pass one of " + ", ".join(ORDERS),
            )
        for name, value, valid, remedy in (
            ("rescheduling", self.rescheduling, self.rescheduling >= 0, "0 or a number of updates"),
            ("correction", self.correction, 0 <= self.correction < 1, "for example 0.135"),
            ("warmup", self.warmup, self.warmup >= 0, "0 or a number of steps"),
        ):
            if not valid:
                raise InvalidArgumentError(
                    f"pipeline:{name}", f"{value} is outside its range", remedy=f"pass {remedy}"
                )
            needed = ("async",) if name == "correction" else ("async", "pipedream")
            if value and self.schedule not in needed:
                raise InvalidArgumentError(
                    f"pipeline:{name}",
                    f"the schedule '{self.schedule}' has no weights to correct",
                    remedy="pass schedule=" + " or ".join(needed),
                )

    @property
    def order(self) -> Order:
        """The slots of every stage."""
        return ORDERS[self.schedule](self.workers, self.micro_batches)

    @property
    def asynchronous(self) -> bool:
        """Whether stages compute with weights of different steps."""
        return self.schedule in ("pipedream", "async")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the step cannot be cut or divided into micro-batches; None if it can."""
        if (reason := super().why_not(graph, workload)) is not None:
            return reason
        if graph.samples % self.micro_batches or not graph.samples:
            return f"{graph.samples} samples do not make {self.micro_batches} equal micro-batches"
        stages = len(boundaries(graph)) + 1
        if stages < self.workers:
            return (
                f"the forward pass makes at most {stages} stage{'s' * (stages != 1)}: elsewhere "
                "several tensors or a shared parameter would pass between stages"
            )
        if (resized := self._resized(graph)) is not None:
            return resized.why_not(graph)
        return None

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return the operators of a micro-batch, and the additions of its gradients."""
        resized = self._resized(graph)
        if resized is None:
            return ()
        return [*resized.required_timings(graph), *Accumulation().required_timings(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Place the stages on the first devices of the cluster, joined by transfers."""
        cluster = self.need_cluster(context)
        # Fails if there are too few devices.
        self.group(cluster)
        resized, order = self._resized(graph), self.order
        micro = graph if resized is None else resized.predict(graph, context)
        placement = self.placement(graph)
        modules = [part.modules[0] for part in placement.parts[1:]]
        placed = place(
            graph,
            placement,
            cluster,
            micro=micro,
            accumulate_ns=self._accumulate_ns(graph, context, modules),
            weight_copies=[
                order.stashed_versions(stage)
                if self.schedule == "pipedream"
                else 1 + (self.correction > 0 and order.delay(stage) > 0)
                for stage in range(self.workers)
            ],
        )
        edit = Edit(str(self), self._described(placed, modules), len(placed), _note(graph))
        return replace(placed, edits=(*graph.edits, edit))

    def placement(self, graph: Graph) -> Placement:
        """Return the stages of about equal time, one per device."""
        modules = balanced(graph, self.workers)
        parts = [
            Part(
                f"stage {stage + 1}",
                modules[stage - 1 : stage] if stage else (),
                Mesh(np.array([stage]), ("stage",)),
                graph.samples // self.micro_batches,
            )
            for stage in range(self.workers)
        ]
        return Placement(tuple(parts), self.order)

    def _resized(self, graph: Graph) -> BatchSize | None:
        if self.micro_batches == 1:
            return None
        return BatchSize(str(graph.samples // self.micro_batches))

    def _accumulate_ns(self, graph: Graph, context: Context, modules: Sequence[str]) -> list[float]:
        """Return the time to add a micro-batch's gradients to the sum, by stage."""
        if self.micro_batches == 1:
            return []
        each = {
            request.call.inputs[0]: price(context.durations, request, 0.0).nanoseconds
            for request in Accumulation().required_timings(graph)
        }
        parts, found = cut(graph, modules), gradients(graph)
        stage_of = {
            task: stage for stage in range(self.workers) for task in parts.backward(stage).tolist()
        }
        spent = [0.0] * self.workers
        for gradient in found:
            spent[stage_of[gradient.task]] += each.get(gradient.spec, 0.0)
        return spent

    def _described(self, placed: Graph, modules: Sequence[str]) -> str:
        timeline, order = replay(placed), self.order
        busy = timeline.lane_busy_ns[: self.workers].sum() / (self.workers * timeline.step_ns)
        words = [
            f"{self.workers} stages, cut before {', '.join(modules)}",
            f"{format_percent(1.0 - float(busy))} of the devices' time idle",
        ]
        if len(placed.memory):
            peaks = ", ".join(format_bytes(int(n)) for n in timeline.memory.peak_bytes)
            words.append(f"peak memory by stage {peaks}")
        if self.asynchronous:
            delays = ", ".join(f"{order.delay(stage):.3g}" for stage in range(self.workers))
            words.append(f"forward passes use weights {delays} updates old")
            words.append(delay_advice(order.delay(0)))
        return "; ".join(words)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training for weights of several steps; otherwise only sums are reordered."""
        if self.asynchronous:
            oldest = self.order.delay(0)
            return Quality(
                QualityKind.NEEDS_TRAINING,
                f"the first stage computes with weights {oldest:.3g} updates old",
                delay_advice(oldest),
            )
        if graph is not None and _has_batch_norm(graph) and self.micro_batches > 1:
            return Quality(
                QualityKind.NEEDS_TRAINING, "batch norm normalises each micro-batch separately"
            )
        return Quality(QualityKind.ROUNDING, "gradients are summed over micro-batches")

    def apply(self, built: BuiltWorkload) -> None:
        """Run one stage of the model in each of `workers` processes that have joined a group.

        Raises:
            WorkloadError: the group has another size, or the model cannot be cut into stages.
        """
        from slipstream.techniques.pipeline.stages import run_as_stage

        self.need_joined()
        self.need_part(built.model, "the model")
        if not built.training or built.own_step:
            raise WorkloadError(
                "pipeline needs the loss and the optimizer of the step",
                remedy="return (model, batch, loss, optimizer)",
            )
        run_as_stage(built, self)

    def warmup_steps(self) -> int:
        """Return `warmup`: these steps drain the pipeline."""
        return self.warmup

    def code(self, workload: Workload) -> CodeChange | None:
        return self.by_hand("", "see torch.distributed.pipelining.pipeline and its schedules")


def _has_batch_norm(graph: Graph) -> bool:
    forward = np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD)
    return any(_BATCH_NORM in name for name in graph.texts("name", forward))


def _note(graph: Graph) -> str:
    if _has_batch_norm(graph):
        return "batch norm normalises each micro-batch separately"
    return ""
