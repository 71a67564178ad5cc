"""quadratic: layers of quadratic neurons in the place of linear layers and convolutions.

Source: Xu et al., "QuadraLib: A Performant Quadratic Neural Network Library for Architecture
Optimization and Design Exploration", MLSys 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.surgery import Selection, exchange_parameters, module_of
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.quadratic.timing import layer_call
from slipstream.workload import Built, Workload

_PRODUCTS = ("aten::addmm", "aten::mm")
_BY_HAND = "import slipstream as ss\nss.quadratic.convert(model)  # before the optimizer is made"
# With this neuron's stacked weight: parameters of a layer beside its bias, over the first order's.
_STACKED = {"t2": 1, "t3": 1, "t4": 2, "bilinear": 2, "glu": 2, "t2&4": 3, "ours": 3}


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
        found = list(_sites(graph))
        if not found:
            return "no linear layer and no convolution of float32 runs in this step"
        return self._selection.why_none(one.module for one in found)

    def questions(self, graph: Graph) -> Sequence[Call]:
        """Every layer as it is and as it would be."""
        return [one.call(n) for one in self._chosen(graph) for n in ("first_order", self.neuron)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Every layer's product takes as much longer as the whole layer does in a micro-benchmark.

        Weights are as many times as large; what is kept for the backward pass is the same.
        """
        edit = Editor(graph, str(self))
        chosen = self._chosen(graph)
        for one in chosen:
            ratio = context.durations.ratio(one.call("first_order"), one.call(self.neuron))
            if ratio is not None:
                for task in one.tasks:
                    edit.scale(task, ratio.value, ratio.provenance, spread=ratio.spread)
            added = (_STACKED[self.neuron] - 1) * one.weight_bytes
            if added:
                edit.allocate(added, Role.PARAMETER, -1, -1)
                if one.backward:
                    edit.allocate(added, Role.GRADIENT, -1, -1)
        return edit.apply(f"{len(chosen)} layers of quadratic neurons")

    def apply(self, built: Built) -> None:
        """Exchange the layers, and let the optimizer train their parameters.

        Raises:
            WorkloadError: the step hides its model, or there is no layer to exchange.
        """
        from torch import nn

        from slipstream.surgery import place
        from slipstream.techniques.quadratic.nn import converted

        built.need_model(self.name)
        model = built.model
        found = {n: m for n, m in model.named_modules() if n and type(m) in (nn.Linear, nn.Conv2d)}
        if not found:
            raise WorkloadError("the model has no nn.Linear and no nn.Conv2d in it")
        self._selection.need_some(self.name, found)
        for name, layer in found.items():
            if name in self._selection:
                made = converted(layer, self.neuron, self.init)
                place(model, name, made)
                if built.optimizer is not None:
                    old, new = list(layer.parameters()), list(made.parameters())
                    exchange_parameters(built.optimizer, old, *new)

    def code(self, workload: Workload) -> CodeChange | None:
        """By hand: one line before the optimizer is made."""
        return CodeChange("", f"one line, by hand:\n{_BY_HAND}")

    @property
    def _selection(self) -> Selection:
        return Selection(self.only, self.except_)

    def _chosen(self, graph: Graph) -> list[_Site]:
        return [one for one in _sites(graph) if one.module in self._selection]


@dataclass(frozen=True)
class _Site:
    """One call of a layer in the step.

    Attributes:
        layer: as of `layer_call`.
        forward, backward: the tasks that multiply.
    """

    module: str
    x: TensorSpec
    layer: tuple[Any, ...]
    weight_bytes: int
    forward: int
    backward: tuple[int, ...]

    @property
    def tasks(self) -> tuple[int, ...]:
        return (self.forward, *self.backward)

    def call(self, neuron: str) -> Call:
        """The layer's passes, as the micro-benchmark times them."""
        return layer_call(neuron, self.x, self.layer, "both" if self.backward else "forward")


def _sites(graph: Graph) -> Iterator[_Site]:
    tasks = graph.tasks
    backward: dict[int, list[int]] = {}
    for task in range(len(graph)):
        if tasks.phase[task] == StepPhase.BACKWARD:
            backward.setdefault(int(tasks.sequence[task]), []).append(task)
    for task in range(len(graph)):
        view = graph.task(task)
        if view.phase != StepPhase.FORWARD or view.call is None:
            continue
        found = _layer(view.call, view.name, view.scope)
        module = module_of(graph, task)
        if found is None or not module:
            continue
        x, weight, layer = found
        after = [
            other
            for other in backward.get(view.sequence, ())
            if graph.task(other).name.endswith(("convolution_backward", "aten::mm", "aten::addmm"))
        ]
        yield _Site(module, x, layer, weight.nbytes, task, tuple(after))


def _layer(
    call: Call, name: str, scope: str
) -> tuple[TensorSpec, TensorSpec, tuple[Any, ...]] | None:
    """The input, the weight and the settings of a layer; None of what is none."""
    if "conv2d" in scope and "convolution" in name:
        x, weight = call.inputs[:2]
        if len(x.shape) != 4 or x.dtype != "float32":
            return None
        bias = len(call.inputs) > 2
        settings = [one for one in call.arguments if isinstance(one, (list, tuple, int))]
        lists = [tuple(one) for one in settings if isinstance(one, (list, tuple))]
        groups = x.shape[1] // weight.shape[1]
        # mkldnn has padding first, convolution stride; an output padding behind both.
        mkldnn = name.startswith("aten::mkldnn")
        padding, stride = (lists[0], lists[1]) if mkldnn else (lists[1], lists[0])
        kernel = weight.shape[2:]
        return x, weight, (weight.shape[0], bias, kernel, stride, padding, lists[2], groups)
    if name in _PRODUCTS and scope.rpartition("/")[2] in ("aten::linear", "aten::matmul"):
        x, weight = call.inputs[-2:]
        if x.dtype == "float32" and len(x.shape) == 2 and "linear" in scope:
            return x, weight, (weight.shape[1], name == "aten::addmm")
    return None
