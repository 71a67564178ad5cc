"""quadratic: layers of quadratic neurons in the place of linear layers and convolutions.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import UNKNOWN, questions, rescale
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.surgery import Selection, exchange_parameters
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.layer_sites import LayerSite, layer_sites
from slipstream.techniques.quadratic.timing import layer_call
from slipstream.workload import Built, Workload

_BY_HAND = "import slipstream as ss\nss.quadratic.convert(model)  # before the optimizer is made"
# With this neuron's stacked weight: parameters of a layer beside its bias, over the first order's.
_STACKED = {"t2": 1, "t3": 1, "t4": 2, "bilinear": 2, "glu": 2, "t2&4": 3, "ours": 3}


def _weight_shape(site: LayerSite) -> tuple[int, ...]:
    outputs, _, *convolution = site.layer
    if not convolution:
        return outputs, site.x.shape[-1]
    return outputs, site.x.shape[1] // convolution[4], *convolution[0]


@dataclass(frozen=True)
class QuadraticLayers(Settings):
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
        sites = list(layer_sites(graph))
        if not sites:
            return "no linear layer and no convolution of float32 runs in this step"
        return self._selection.why_none(one.module for one in sites)

    def questions(self, graph: Graph) -> Sequence[Call]:
        """Every layer, and the update of its weights, as it is and as it would be."""
        layers = [call for one in self._chosen(graph) for call in self._calls(one)]
        return [*layers, *questions(graph, self._update(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Every layer's product takes as much longer as the whole layer does in a micro-benchmark.

        Weights are as many times as large, and so is what the optimizer does with them and keeps of
        them; what is kept for the backward pass is the same.
        """
        edit = Editor(graph, str(self))
        chosen = self._chosen(graph)
        for one in chosen:
            ratio = context.durations.ratio(*self._calls(one)) or UNKNOWN
            for task in one.tasks:
                edit.scale(task, ratio.value, ratio.provenance, spread=ratio.spread)
            added = (_STACKED[self.neuron] - 1) * one.weight_bytes
            if added:
                edit.allocate(added, Role.PARAMETER, -1, -1)
                if one.backward:
                    edit.allocate(added, Role.GRADIENT, -1, -1)
        rescale(edit, graph, self._update(graph), context.durations)
        edited = edit.apply(f"{len(chosen)} layers of quadratic neurons")
        return self._with_larger_state(graph, edited)

    def minimum_share(self, graph: Graph) -> float:
        """All of it: each layer multiplies at least as much as the one it takes the place of."""
        return 1.0

    def apply(self, built: Built) -> None:
        """Exchange the layers, and let the optimizer train their parameters.

        Raises:
            WorkloadError: the step hides its model, or there is no layer to exchange.
        """
        from slipstream.surgery import exchange
        from slipstream.techniques.quadratic.nn import converted, convertible

        built.need_model(self.name)
        try:
            layers = convertible(built.model, self._selection)
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

    @property
    def _selection(self) -> Selection:
        return Selection(self.only, self.except_)

    def _update(self, graph: Graph) -> dict[int, Call]:
        """By the optimizer's task, what it calls for stacked weights; they are told by shape."""
        shapes = {_weight_shape(one) for one in self._chosen(graph)}
        times = _STACKED[self.neuron]

        def stacked(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(stacked(one) for one in value)
            if not isinstance(value, TensorSpec) or tuple(value.shape) not in shapes:
                return value
            return replace(value, shape=(times * value.shape[0], *value.shape[1:]))

        calls = {}
        for task in np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER).tolist():
            call = graph.task(task).call
            if call is not None and times > 1:
                parts = [stacked(part) for part in (call.arguments, call.outputs)]
                calls[task] = Call(call.op, *parts)
        return calls

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

    def _chosen(self, graph: Graph) -> list[LayerSite]:
        return [one for one in layer_sites(graph) if one.module in self._selection]

    def _calls(self, site: LayerSite) -> list[Call]:
        """The layer as it is and as it would be, as the micro-benchmark times them."""
        passing = "both" if site.backward else "forward"
        return [
            layer_call(neuron, site.x, site.layer, passing)
            for neuron in ("first_order", self.neuron)
        ]
