"""quadratic: replace linear layers and convolutions by layers of quadratic neurons.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import CallChanges, ratio_columns, required_timings, rescale
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.flow import Match
from slipstream.graph.layers import LayerKinds, layer_kinds
from slipstream.surgery import exchange_parameters
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.quadratic.timing import layer_call
from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = "import slipstream as ss\nss.quadratic.convert(model)  # before the optimizer is created"
# Numbers of tensors, each of the size of a layer's (output, input), that `Quadratic` allocates and
# frees within its (forward, backward) pass.
_TEMPORARIES = {
    "t2": ((0, 1), (0, 3)), "t3": ((1, 0), (3, 0)), "t4": ((2, 0), (6, 0)),
    "bilinear": ((2, 0), (6, 0)), "glu": ((3, 0), (7, 0)), "t2&4": ((3, 1), (7, 3)),
    "ours": ((3, 0), (5, 0)),
}  # fmt: skip
# Size of a neuron's stacked weight, as a multiple of the first-order weight.
_WEIGHT_FACTOR = {"t2": 1, "t3": 1, "t4": 2, "bilinear": 2, "glu": 2, "t2&4": 3, "ours": 3}


@dataclass(frozen=True)
class QuadraticLayers(ModuleTechnique):
    """Technique that replaces linear layers and convolutions by quadratic ones.

    Attributes:
        neuron: how projections are combined, see `slipstream.quadratic.NEURONS`.
        init: ``first_order`` initially computes what the original layer does; ``random`` draws new
            weights.
        only, except_: patterns of modules' qualified names.
    """

    neuron: str = "ours"
    init: str = "first_order"
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "quadratic"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL, variants=())
    effect: ClassVar[Quality] = Quality(
        QualityKind.NEEDS_TRAINING,
        "Xu et al. 2022: each layer computes another function, with more parameters; this is worth "
        "it if fewer layers then suffice",
        "compare with first-order models of the same number of parameters and of the same time",
    )

    def __post_init__(self) -> None:
        if self.neuron not in _WEIGHT_FACTOR:
            raise UnknownNameError("neuron", self.neuron, _WEIGHT_FACTOR)
        if self.init not in ("first_order", "random"):
            raise InvalidArgumentError("init", f"'{self.init}' is neither first_order nor random")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no layer of the step can be replaced, or None."""
        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        return self.no_match_reason(
            layer_kinds(graph).kinds,
            "no linear layer and no convolution of float32 runs in this step",
        )

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return every layer and the update of its weights, recorded and quadratic."""
        layers = [call for kind in self._chosen(graph).kinds for call in self._calls(kind)]
        return [*layers, *required_timings(graph, self._update(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale every layer's matmul by the ratio of the layers in a micro-benchmark.

        Weights, their update and their optimizer state grow by the neuron's factor; the tensors
        saved for the backward pass stay the same. Projections add to the peak only while a layer's
        pass runs.
        """
        edit = Editor(graph, str(self))
        layers = self._chosen(graph)
        pairs = (self._calls(kind) for kind in layers.kinds)
        factor, provenance, spread = ratio_columns(context.durations, pairs)
        kind = layers.kind[layers.layer]
        edit.scale(layers.task, factor[kind], provenance[kind], spread=spread[kind])
        weight_factor = _WEIGHT_FACTOR[self.neuron]
        if weight_factor > 1:
            weights = [each.settings.weight_shape(each.x) for each in layers.kinds]
            added = np.array([(weight_factor - 1) * 4 * math.prod(shape) for shape in weights])
            count = np.array([1 + bool(each.backward) for each in layers.kinds])[layers.kind]
            # Each layer's parameter, followed by its gradient if the layer trains.
            layer = np.repeat(np.arange(len(layers.kind)), count)
            role = np.where(np.diff(layer, prepend=-1), Role.PARAMETER, Role.GRADIENT)
            edit.allocate(added[layers.kind[layer]], role, -1, -1)
        self._allocate_temporaries(edit, graph, layers)
        rescale(edit, graph, self._update(graph), context.durations)
        edited = edit.apply(f"{len(layers.kind)} layers of quadratic neurons")
        return self._with_larger_state(graph, edited)

    def minimum_share(self, graph: Graph) -> float:
        """Return 1.0: each layer multiplies at least as much as the one it replaces."""
        return 1.0

    def apply(self, built: BuiltWorkload) -> None:
        """Replace the layers, and their parameters in the optimizer.

        Raises:
            WorkloadError: the step hides its model, or there is no layer to replace.
        """
        from slipstream.surgery import exchange
        from slipstream.techniques.quadratic.nn import convert_layer, convertible

        built.need_model(self.name)
        try:
            layers = convertible(built.model, self.selection)
        except InvalidArgumentError as error:
            raise WorkloadError(f"quadratic: {error.what}", remedy=error.remedy) from error
        for name, layer in layers.items():
            quadratic = convert_layer(layer, self.neuron, self.init)
            exchange(built.model, name, quadratic)
            if built.optimizer is not None:
                old, new = list(layer.parameters()), list(quadratic.parameters())
                exchange_parameters(built.optimizer, old, *new)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return one line to insert by hand before the optimizer is created."""
        return CodeChange("", f"one line to insert by hand:\n{_BY_HAND}")

    def _update(self, graph: Graph) -> CallChanges:
        """Return the optimizer's tasks with their calls on stacked weights, matched by shape."""
        shapes = {kind.settings.weight_shape(kind.x) for kind in self._chosen(graph).kinds}
        weight_factor = _WEIGHT_FACTOR[self.neuron]

        def stacked(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(stacked(element) for element in value)
            if not isinstance(value, TensorSpec) or tuple(value.shape) not in shapes:
                return value
            return replace(value, shape=(weight_factor * value.shape[0], *value.shape[1:]))

        tasks = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
        calls = {}
        for number in set(graph.tasks.call[tasks].tolist()) - {-1} if weight_factor > 1 else ():
            call = graph.calls[number]
            parts = [stacked(part) for part in (call.arguments, call.outputs)]
            calls[number] = Call(call.op, *parts)
        return CallChanges.by_call(graph, tasks, calls)

    def _with_larger_state(self, graph: Graph, edited: Graph) -> Graph:
        """Scale the optimizer's state and temporaries by the growth of all parameters."""
        before, after = (
            int(state.memory.nbytes[state.memory.role == Role.PARAMETER].sum())
            for state in (graph, edited)
        )
        if after == before or not before:
            return edited
        memory = edited.memory
        updating = edited.tasks.phase == StepPhase.OPTIMIZER
        temporary = (memory.producer >= 0) & updating[memory.producer]
        grows = (memory.role == Role.OPTIMIZER) | temporary
        nbytes = np.where(grows, memory.nbytes * after // before, memory.nbytes)
        return replace(edited, memory=replace(memory, nbytes=nbytes))

    def _allocate_temporaries(self, edit: Editor, graph: Graph, layers: LayerKinds) -> None:
        """Allocate the memory that passes of layers hold only while they run."""
        # Temporaries of a matmul, such as operands in another layout, grow with the weight's rows.
        memory = graph.memory
        rows = np.flatnonzero(
            (memory.producer == memory.release) & np.isin(memory.producer, layers.task)
        )
        edit.resize(rows, memory.nbytes[rows] * _WEIGHT_FACTOR[self.neuron])
        sizes = np.array([(kind.y.nbytes, kind.x.nbytes) for kind in layers.kinds])
        nbytes = (sizes @ np.array(_TEMPORARIES[self.neuron]).T)[layers.kind]
        first = np.flatnonzero(np.diff(layers.layer, prepend=-1))
        last = np.append(first[1:], len(layers.task)) - 1
        edit.allocate(nbytes[:, 0], Role.TEMPORARY, layers.task[first], layers.task[first])
        trains = last > first
        starts, ends = layers.task[first[trains] + 1], layers.task[last[trains]]
        edit.allocate(nbytes[trains, 1], Role.TEMPORARY, starts, ends)

    def _chosen(self, graph: Graph) -> LayerKinds:
        selection = self.selection
        return layer_kinds(graph).only(lambda layer: layer.module in selection)

    def _calls(self, layer: Match) -> tuple[Call, Call]:
        """Return the micro-benchmark calls of the first-order and of the quadratic layer."""
        passing = "both" if layer.backward else "forward"
        before, after = (
            layer_call(neuron, layer.x, layer.settings.arguments, passing)
            for neuron in ("first_order", self.neuron)
        )
        return before, after
