"""ensemble: train all members of an ensemble in one step, with stacked layers.

Source: Wang et al., "HFTA: Horizontally Fused Training Array", MLSys 2021; shared weights: Wen
et al., "BatchEnsemble: an Alternative Approach to Efficient Ensemble and Lifelong Learning", ICLR
2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from slipstream.durations import CallChanges, Durations, required_timings, rescale
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import PROVENANCES, Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.flow import Match, flow_of
from slipstream.graph.graph import cached_per_graph
from slipstream.graph.layers import RECURRENT, LayerKinds, layer_kinds, module_layers
from slipstream.surgery import exchange_parameters, module_of
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.ensembles.timing import layer_call

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_MAX_MEMBERS = 4096
_MEMBER_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER)
_BY_HAND = (
    "import slipstream as ss\n"
    "ensemble = ss.ensembles.build(model, train, members=8, sample=batches)"
)


@dataclass(frozen=True)
class TrainTogether(TechniqueSettings):
    """Technique that trains `members` models in one step, each on a copy of the batch.

    It is compared with one model's step by time per sample, where the copies count as samples.

    Attributes:
        members: number of models; the first starts as the model, the others newly initialised.
        weights: ``own`` for each member, or ``shared`` by all, with separate factors of each
            member for inputs and outputs.
    """

    members: int = 8
    weights: Literal["own", "shared"] = "own"

    name: ClassVar[str] = "ensemble"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=frozenset({"batch_size", "lowrank", "lowbit", "quadratic"}),
        # Two members show whether stacking gains time, in a quarter of the measuring time of eight.
        variants=("ensemble:2",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not 1 < self.members <= _MAX_MEMBERS:
            raise InvalidArgumentError(
                "ensemble:members", f"{self.members} members are not possible",
                remedy=f"pass 2 to {_MAX_MEMBERS}",
            )  # fmt: skip

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why members cannot be trained in one step, or None."""
        if not graph.meta.get("training", True):
            return (
                "the step does not train; use ss.ensembles to build ensembles of trained networks"
            )
        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        if not module_layers(graph):
            return "no linear layer and no convolution of float32 runs in this step"
        return _cannot_stack(graph) or self._batch.why_not(graph, workload)

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the step at the batch of all members, stacked layers and the stacked update."""
        layers = [call for kind in layer_kinds(graph).kinds for call in self._calls(kind)]
        update = required_timings(graph, self._update(graph, graph))
        return [*self._batch.required_timings(graph), *layers, *update]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Predict a step of the batch of all members, whose layers hold every member's weights.

        The gain is that the step runs as many operators as that of one model.
        """
        larger = self._batch.predict(graph, context)
        edit = Editor(larger, str(self))
        self._scale_layers(edit, larger, layer_kinds(graph), context.durations)
        rescale(edit, larger, self._update(graph, larger), context.durations)
        edited = edit.apply(f"{self.members} members in one step, weights {self.weights}")
        if self.weights == "shared":
            return edited
        memory = edited.memory
        factor = np.where(np.isin(memory.role, _MEMBER_ROLES), self.members, 1)
        return replace(edited, memory=replace(memory, nbytes=memory.nbytes * factor))

    def apply(self, built: BuiltWorkload) -> None:
        """Repeat the batch for each member, and stack the weights of all in every layer.

        Raises:
            WorkloadError: the step hides its model or batch, does not train, or has a layer that
                cannot be stacked.
        """
        import torch

        from slipstream.techniques.ensembles.stacking import redrawn, stack, undivided

        built.need_model(self.name)
        if built.optimizer is None:
            raise WorkloadError("ensemble trains its members, but this step has no optimizer")
        model, count = built.model, self.members
        built.resize(count * built.samples)
        # Not the seed itself: the model may have been initialised with it.
        seed = torch.initial_seed() + 1
        members = [model, *(redrawn(model, seed + number) for number in range(1, count))]
        before = list(model.parameters())
        stack(model, members, self.weights)
        exchange_parameters(built.optimizer, before, *model.parameters())
        if self.weights == "own":

            def scale(module: Any, arguments: Any, y: Any) -> Any:
                return undivided(y, count) if isinstance(y, torch.Tensor) else y

            model.register_forward_hook(scale)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return the quality; with own weights each member trains as if alone."""
        if self.weights == "own":
            return Quality(
                QualityKind.SAME_DISTRIBUTION,
                "each member's gradients are those of a separate step, for losses that are means "
                "over samples and optimizers that update weights elementwise",
                "average the members' probabilities",
            )
        return Quality(
            QualityKind.NEEDS_TRAINING, "Wen et al. 2020: members differ by factors of rank one",
            "average the members' probabilities",
        )  # fmt: skip

    def code(self, workload: Workload) -> CodeChange | None:
        """Return an example to insert by hand around a function that trains the model."""
        return CodeChange("", f"by hand, around your training function:\n{_BY_HAND}")

    @property
    def _batch(self) -> BatchSize:
        return BatchSize(f"x{self.members}")

    def _calls(self, layer: Match) -> list[Call]:
        """Return the calls of the layer over all rows, plain and stacked."""
        passing = "both" if layer.backward else "forward"
        return [
            layer_call(weights, self.members, layer.x, layer.settings.arguments, passing)
            for weights in ("one", self.weights)
        ]

    def _scale_layers(
        self, edit: Editor, larger: Graph, layers: LayerKinds, durations: Durations
    ) -> None:
        """Scale the tasks of each layer to their time with every member's weights.

        A slower pass is slower by additional operators, so the difference is added to the layer's
        time; a faster one scales it by the ratio.
        """
        count = len(layers.kinds)
        measured, additive = np.zeros((2, count), bool)
        factor = np.ones(count)
        spread, more_ns, error_ns = np.zeros((3, count))
        provenance = np.zeros(count, np.uint8)
        for number, layer in enumerate(layers.kinds):
            calls = self._calls(layer)
            ratio = durations.ratio(*calls)
            if ratio is None:
                continue
            measured[number], factor[number], spread[number] = True, ratio.value, ratio.spread
            provenance[number] = PROVENANCES.index(ratio.provenance)
            single, members = (durations.lookup(call) for call in calls)
            if ratio.value > 1 and single is not None and members is not None:
                additive[number], more_ns[number] = True, members.nanoseconds - single.nanoseconds
                error_ns[number] = math.hypot(
                    members.spread * members.nanoseconds, single.spread * single.nanoseconds
                )
        kind = layers.kind
        before_ns = np.bincount(layers.layer, larger.tasks.duration_ns[layers.task], len(kind))
        added = additive[kind] & (before_ns > 0)
        before_ns[~added] = 1.0
        factors = np.where(added, 1 + more_ns[kind] / before_ns, factor[kind])
        spreads = np.where(added, error_ns[kind] / (before_ns * factors), spread[kind])
        chosen = measured[kind[layers.layer]]
        layer_of = layers.layer[chosen]
        edit.scale(
            layers.task[chosen],
            factors[layer_of],
            provenance[kind[layer_of]],
            spread=spreads[layer_of],
        )

    def _update(self, graph: Graph, larger: Graph) -> CallChanges:
        """Return the optimizer's tasks in `larger`, with their calls on all members' weights."""
        tasks = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
        calls = {}
        if self.weights == "own":
            for number in set(graph.tasks.call[tasks].tolist()) - {-1}:
                call = graph.calls[number]
                stacked = [self._stacked(part) for part in (call.arguments, call.outputs)]
                calls[number] = Call(call.op, *stacked)
        return CallChanges.by_call(larger, tasks, calls)

    def _stacked(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self._stacked(element) for element in value)
        if not isinstance(value, TensorSpec) or not value.shape:
            return value
        shape, strides = (self.members, *value.shape), (value.numel, *value.strides)
        return replace(value, shape=shape, strides=strides)


@cached_per_graph
def _cannot_stack(graph: Graph) -> str | None:
    """Return why a forward operator that reads parameters cannot be stacked, or None."""
    flow = flow_of(graph)
    reading = np.flatnonzero(np.isin(graph.operands, graph.parameters))
    reads = np.zeros(len(graph), bool)
    reads[np.searchsorted(graph.operand_start, reading, side="right") - 1] = True
    reads[[layer.forward[0] for layer in module_layers(graph)]] = False
    for task in np.flatnonzero(reads & (graph.tasks.phase == StepPhase.FORWARD)).tolist():
        view = graph.task(task)
        if not flow.complete[task] or flow.views[task] or "norm" in view.name:
            continue
        if flow.parameters.isdisjoint(flow.operands(task)[0]):
            continue
        root, *inner = view.scope.split("/")
        if root in RECURRENT or "aten::linear" not in (root, *inner, view.name):
            kind = (root if root in RECURRENT else view.name).removeprefix("aten::")
            module = module_of(graph, task) or "the step"
            return f"{kind} of {module} cannot be computed for several members in one step"
    return None
