"""quadratic: layers of quadratic neurons in the place of linear layers and convolutions.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import Changed, ratio_columns, required_timings, rescale
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.flow import Match
from slipstream.graph.layers import LayerKinds, layer_kinds
from slipstream.surgery import exchange_parameters
from slipstream.technique import Choosing, CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.quadratic.timing import layer_call
from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = "import slipstream as ss\nss.quadratic.convert(model)  # before the optimizer is made"
# Tensors of the size of a layer's output and of its input that `Quadratic` computes and frees
# within a pass, forward and backward.
_WITHIN = {
    "t2": ((0, 1), (0, 3)), "t3": ((1, 0), (3, 0)), "t4": ((2, 0), (6, 0)),
    "bilinear": ((2, 0), (6, 0)), "glu": ((3, 0), (7, 0)), "t2&4": ((3, 1), (7, 3)),
    "ours": ((3, 0), (5, 0)),
}  # fmt: skip
# With this neuron's stacked weight: parameters of a layer beside its bias, over the first order's.
_STACKED = {"t2": 1, "t3": 1, "t4": 2, "bilinear": 2, "glu": 2, "t2&4": 3, "ours": 3}


@dataclass(frozen=True)
class QuadraticLayers(Choosing):
    """Linear layers and convolutions with quadratic neurons.

    Attributes:
        neuron: how projections are put together, see `slipstream.quadratic.NEURONS`.
        init: ``first_order`` begins as the layer that was there; ``random`` anew.
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
        "Xu et al. 2022: other functions, of more parameters for each layer; they pay where fewer "
        "layers then do",
        "compare with a first-order model of as many parameters, and of as much time",
    )

    def __post_init__(self) -> None:
        if self.neuron not in _STACKED:
            raise UnknownNameError("neuron", self.neuron, _STACKED)
        if self.init not in ("first_order", "random"):
            raise InvalidArgumentError("init", f"'{self.init}' is neither first_order nor random")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no layer of the step can be exchanged."""
        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        return self.why_none_of(
            layer_kinds(graph).kinds,
            "no linear layer and no convolution of float32 runs in this step",
        )

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Every layer, and the update of its weights, as it is and as it would be."""
        layers = [call for kind in self._chosen(graph).kinds for call in self._calls(kind)]
        return [*layers, *required_timings(graph, self._update(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Every layer's product takes as much longer as the whole layer does in a micro-benchmark.

        Weights are as many times as large, and so is what the optimizer does with them and keeps of
        them; what is kept for the backward pass is the same. Projections add to the peak only while
        a layer's pass runs.
        """
        edit = Editor(graph, str(self))
        layers = self._chosen(graph)
        pairs = (self._calls(kind) for kind in layers.kinds)
        factor, provenance, spread = ratio_columns(context.durations, pairs)
        kind = layers.kind[layers.layer]
        edit.scale(layers.task, factor[kind], provenance[kind], spread=spread[kind])
        times = _STACKED[self.neuron]
        if times > 1:
            weights = [each.settings.weight_shape(each.x) for each in layers.kinds]
            added = np.array([(times - 1) * 4 * math.prod(shape) for shape in weights])
            count = np.array([1 + bool(each.backward) for each in layers.kinds])[layers.kind]
            # A parameter for each layer, followed by its gradient.
            layer = np.repeat(np.arange(len(layers.kind)), count)
            role = np.where(np.diff(layer, prepend=-1), Role.PARAMETER, Role.GRADIENT)
            edit.allocate(added[layers.kind[layer]], role, -1, -1)
        self._allocate_within(edit, graph, layers)
        rescale(edit, graph, self._update(graph), context.durations)
        edited = edit.apply(f"{len(layers.kind)} layers of quadratic neurons")
        return self._with_larger_state(graph, edited)

    def minimum_share(self, graph: Graph) -> float:
        """All of it: each layer multiplies at least as much as the one it takes the place of."""
        return 1.0

    def apply(self, built: BuiltWorkload) -> None:
        """Exchange the layers, and let the optimizer train their parameters.

        Raises:
            WorkloadError: the step hides its model, or there is no layer to exchange.
        """
        from slipstream.surgery import exchange
        from slipstream.techniques.quadratic.nn import converted, convertible

        built.need_model(self.name)
        try:
            layers = convertible(built.model, self.selection)
        except InvalidArgumentError as error:
            raise WorkloadError(f"quadratic: {error.what}", remedy=error.remedy) from error
        for name, layer in layers.items():
            quadratic = converted(layer, self.neuron, self.init)
            exchange(built.model, name, quadratic)
            if built.optimizer is not None:
                old, new = list(layer.parameters()), list(quadratic.parameters())
                exchange_parameters(built.optimizer, old, *new)

    def code(self, workload: Workload) -> CodeChange | None:
        """By hand: one line before the optimizer is made."""
        return CodeChange("", f"one line, by hand:\n{_BY_HAND}")

    def _update(self, graph: Graph) -> Changed:
        """Return the optimizer's tasks, with their calls for stacked weights, found by shape."""
        shapes = {kind.settings.weight_shape(kind.x) for kind in self._chosen(graph).kinds}
        times = _STACKED[self.neuron]

        def stacked(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(stacked(one) for one in value)
            if not isinstance(value, TensorSpec) or tuple(value.shape) not in shapes:
                return value
            return replace(value, shape=(times * value.shape[0], *value.shape[1:]))

        tasks = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
        calls = {}
        for number in set(graph.tasks.call[tasks].tolist()) - {-1} if times > 1 else ():
            call = graph.calls[number]
            parts = [stacked(part) for part in (call.arguments, call.outputs)]
            calls[number] = Call(call.op, *parts)
        return Changed.by_call(graph, tasks, calls)

    def _with_larger_state(self, graph: Graph, edited: Graph) -> Graph:
        """What the optimizer keeps and works with grows as its parameters do, all in all."""
        before, after = (
            int(one.memory.nbytes[one.memory.role == Role.PARAMETER].sum())
            for one in (graph, edited)
        )
        if after == before or not before:
            return edited
        memory = edited.memory
        updating = edited.tasks.phase == StepPhase.OPTIMIZER
        working = (memory.producer >= 0) & updating[memory.producer]
        grows = (memory.role == Role.OPTIMIZER) | working
        nbytes = np.where(grows, memory.nbytes * after // before, memory.nbytes)
        return replace(edited, memory=replace(memory, nbytes=nbytes))

    def _allocate_within(self, edit: Editor, graph: Graph, layers: LayerKinds) -> None:
        """Add the memory that passes of layers hold only while they run."""
        # What a product itself needs, such as operands in another layout, grows with its rows.
        memory = graph.memory
        rows = np.flatnonzero(
            (memory.producer == memory.release) & np.isin(memory.producer, layers.task)
        )
        edit.resize(rows, memory.nbytes[rows] * _STACKED[self.neuron])
        sizes = np.array([(kind.y.nbytes, kind.x.nbytes) for kind in layers.kinds])
        nbytes = (sizes @ np.array(_WITHIN[self.neuron]).T)[layers.kind]
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
        """Return the layer with linear and with quadratic neurons, to be micro-benchmarked."""
        passing = "both" if layer.backward else "forward"
        before, after = (
            layer_call(neuron, layer.x, layer.settings.arguments, passing)
            for neuron in ("first_order", self.neuron)
        )
        return before, after
