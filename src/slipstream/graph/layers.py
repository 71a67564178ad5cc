"""Layers of a recorded step: matmuls and convolutions with a weight, as `Match`es."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.call import Call, TensorSpec
from slipstream.graph.flow import Flow, Match, matches
from slipstream.graph.graph import Graph, cached_per_graph
from slipstream.graph.values import StepPhase

RECURRENT = ("aten::rnn_tanh", "aten::rnn_relu", "aten::gru", "aten::lstm")
"""Operators of recurrent modules, whose matmuls ``nn.Linear`` does not run."""
CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
"""Convolutions with these arguments: input, weight, bias, stride, padding, dilation, transposed,
output padding, groups."""
MKLDNN_CONVOLUTION = "aten::mkldnn_convolution"
MATMULS = ("aten::mm", "aten::addmm")
_GRADIENTS = ("convolution_backward", "mkldnn_rnn_layer_backward", *MATMULS)


class LayerSettings(NamedTuple):
    """Settings of a linear layer, which has no kernel, or of a convolution."""

    outputs: int
    bias: bool
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Settings that a micro-benchmark of the layer takes; outputs and bias if it is linear."""
        return self[:7] if self.kernel else self[:2]

    def weight_shape(self, x: TensorSpec) -> tuple[int, ...]:
        """Return the shape of the weight of a layer that reads `x` and is not transposed."""
        inputs = x.shape[1] // self.groups if self.kernel else x.shape[-1]
        return self.outputs, inputs, *self.kernel


def layers(flow: Flow) -> Iterator[Match]:
    """Find what ``nn.Linear`` and ``nn.Conv2d`` run, other convolutions, and matmuls of parameters.

    The kinds are ``linear``, ``conv2d``, ``convolution`` and ``matmul``; the settings are
    `LayerSettings`. The backward tasks are those that multiply. The weight is missing if the
    storages of the task are unknown, or if it is computed in the step; if no parameter is known,
    every weight counts as one.
    """
    graph, columns = flow.graph, flow.graph.tasks
    names = (*CONVOLUTIONS, MKLDNN_CONVOLUTION, *MATMULS)
    tasks = flow.calling(names, StepPhase.OTHER, StepPhase.FORWARD)
    codes = zip(
        *(column[tasks].tolist() for column in (columns.call, columns.scope, columns.module)),
        strict=True,
    )
    gradient = multiplying(flow)
    described: dict[tuple[int, int, int], tuple[Any, ...] | None] = {}
    for task, code in zip(tasks.tolist(), codes, strict=True):
        # A few combinations of codes cover many tasks.
        if code not in described:
            call, scope, module = code
            layer = _layer(graph.calls[call], graph.strings[scope])
            inside = graph.strings[module].partition(".")[2]
            described[code] = None if layer is None else (inside, *layer)
        parts = described[code]
        if parts is None:
            continue
        module_name, kind, place, x, y, weight, settings = parts
        storages = flow.operands(task)[0][place : place + 1]
        if flow.parameters.isdisjoint(storages) and flow.parameters:
            storages = []
        if storages or kind in ("linear", "conv2d"):
            backward = tuple(back for back in flow.backward[task] if gradient[back])
            weights = dict.fromkeys(storages, weight)
            yield Match(kind, module_name, (task,), backward, x, y, weights, settings)


def multiplying(flow: Flow) -> list[bool]:
    """Return, by task, whether it computes a gradient of a layer."""
    named = [call.name.endswith(_GRADIENTS) for call in flow.graph.calls]
    flags: list[bool] = np.array([*named, False])[flow.graph.tasks.call].tolist()
    return flags


def _layer(
    call: Call, scope: str
) -> tuple[str, int, TensorSpec, TensorSpec, TensorSpec, LayerSettings] | None:
    """Return kind, place of the weight, input, output, weight and settings of a layer."""
    if len(call.inputs) < 2 or not call.outputs:
        return None
    plain = scope.partition("/")[0] not in RECURRENT
    if call.name in MATMULS:
        place = len(call.inputs) - 1
        x, matrix = call.inputs[place - 1 :]
        inputs, outputs = matrix.shape
        weight = TensorSpec(matrix.dtype, (outputs, inputs), (inputs, 1), matrix.device)
        innermost = scope.rpartition("/")[2] in ("aten::linear", "aten::matmul")
        kind = "linear" if plain and innermost and "linear" in scope else "matmul"
        settings = LayerSettings(outputs, call.name == "aten::addmm")
        return kind, place, x, call.outputs[0], weight, settings
    (x, weight), arguments = call.inputs[:2], call.arguments
    if call.name == MKLDNN_CONVOLUTION:
        padding, stride, dilation, groups = arguments[3:7]
        transposed = False
    else:
        stride, padding, dilation, transposed, _, groups = arguments[3:9]
    kind = "conv2d" if plain and "conv2d" in scope and len(x.shape) == 4 else "convolution"
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    settings = LayerSettings(
        outputs, len(call.inputs) > 2, weight.shape[2:], _sizes(stride), _sizes(padding),
        _sizes(dilation), groups, bool(transposed),
    )  # fmt: skip
    return kind, 1, x, call.outputs[0], weight, settings


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@cached_per_graph
def module_layers(graph: Graph) -> tuple[Match, ...]:
    """Return the calls of float32 ``nn.Linear`` and ``nn.Conv2d`` modules, in program order."""
    return tuple(
        match
        for match in matches(graph, layers)
        if match.kind in ("linear", "conv2d") and match.module and match.x.dtype == "float32"
    )


@dataclass(frozen=True, eq=False)
class LayerKinds:
    """The layers of a step as arrays: a few kinds cover many layers.

    Attributes:
        kinds: the first layer of each kind; the others differ from it only in their tasks.
        kind: int64 [layers], the index of each layer in `kinds`.
        task: int64 [tasks of layers], those of one layer after those of another.
        layer: int64 [tasks of layers], the index in `kind` of the layer of each task.
    """

    kinds: tuple[Match, ...]
    kind: NDArray[np.int64]
    task: NDArray[np.int64]
    layer: NDArray[np.int64]

    def only(self, condition: Callable[[Match], bool]) -> LayerKinds:
        """Return the layers of the kinds that meet `condition`."""
        chosen = np.array([condition(kind) for kind in self.kinds], bool)
        layers = chosen[self.kind]
        tasks = layers[self.layer]
        return LayerKinds(
            tuple(itertools.compress(self.kinds, chosen)),
            (np.cumsum(chosen) - 1)[self.kind[layers]],
            self.task[tasks],
            (np.cumsum(layers) - 1)[self.layer[tasks]],
        )


@cached_per_graph
def layer_kinds(graph: Graph) -> LayerKinds:
    """Return `module_layers` by kind."""
    found = module_layers(graph)
    numbers: dict[tuple[Any, ...], int] = {}
    kinds: list[Match] = []
    kind = []
    for match in found:
        key = match.module, match.x, match.settings, bool(match.backward)
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            kinds.append(match)
        kind.append(number)
    task = np.array([task for match in found for task in match.tasks], np.int64)
    layer = np.repeat(np.arange(len(found)), [len(match.tasks) for match in found])
    return LayerKinds(tuple(kinds), np.array(kind, np.int64), task, layer)
