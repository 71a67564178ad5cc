"""Where linear layers and convolutions run in a step, and what makes and times one of a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.graph import kept
from slipstream.surgery import module_of

RECURRENT = ("aten::rnn_tanh", "aten::rnn_relu", "aten::gru", "aten::lstm")
"""Operators of recurrent modules, whose own products are no layers."""
_PRODUCTS = ("aten::addmm", "aten::mm")
_BACKWARD = ("convolution_backward", "aten::mm", "aten::addmm")


@dataclass(frozen=True)
class LayerSite:
    """One call of a layer in the step.

    Attributes:
        x: what it is given.
        layer: its settings: outputs, bias; of a convolution kernel, stride, padding, dilation and
            groups besides.
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
        """Forward, then backward."""
        return (self.forward, *self.backward)


def module_like(x: TensorSpec, layer: tuple[Any, ...]) -> Any:
    """A linear layer or convolution of these settings, with random weights."""
    from torch import nn

    outputs, bias, *convolution = layer
    if not convolution:
        return nn.Linear(x.shape[-1], outputs, bias=bias)
    kernel, stride, padding, dilation, groups = convolution
    return nn.Conv2d(
        x.shape[1], outputs, tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups,
        bias,
    )  # fmt: skip


@kept
def layer_sites(graph: Graph) -> tuple[LayerSite, ...]:
    """Every linear layer and convolution of float32 in the step, in its order."""
    tasks = graph.tasks
    backward: dict[int, list[int]] = {}
    # Without a number are tasks that autograd did not record: they belong to no layer's forward.
    for task in np.flatnonzero(
        (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence >= 0)
    ).tolist():
        if graph.task(task).name.endswith(_BACKWARD):
            backward.setdefault(int(tasks.sequence[task]), []).append(task)
    sites = []
    for task in np.flatnonzero(tasks.phase == StepPhase.FORWARD).tolist():
        view = graph.task(task)
        if view.call is None or view.scope.partition("/")[0] in RECURRENT:
            continue
        parts = _layer(view.call, view.name, view.scope)
        module = module_of(graph, task)
        if parts is None or not module:
            continue
        x, weight, layer = parts
        after = backward.get(view.sequence, ())
        sites.append(LayerSite(module, x, layer, weight.nbytes, task, tuple(after)))
    return tuple(sites)


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


def pass_timer(module: Any, spec: TensorSpec, passing: str) -> Callable[[], object]:
    """A layer's pass as a function of nothing, on random numbers: what a micro-benchmark runs.

    Args:
        module: `torch.nn.Module`.
        passing: ``forward``, or ``both``: with the backward pass of a layer within a model.
    """
    import torch

    x = torch.randn(spec.shape).requires_grad_(passing == "both")
    sources = [x, *module.parameters()]
    gradient = torch.ones_like(module(x))

    def forward() -> object:
        with torch.no_grad():
            return module(x)

    def both() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(module(x), sources, gradient)

    return both if passing == "both" else forward
