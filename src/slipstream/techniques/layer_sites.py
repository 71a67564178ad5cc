"""Where linear layers and convolutions run in a step, and what makes and times one of a kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.graph import kept

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


@dataclass(frozen=True, eq=False)
class SiteKinds:
    """The sites of a step as arrays: few kinds stand for many sites.

    Attributes:
        kinds: the first site of each kind; the others differ from it in their tasks alone.
        kind: int64 [sites], the index of each site in `kinds`.
        task: int64 [tasks of sites], those of one site after those of another.
        site: int64 [tasks of sites], the index in `kind` of the site of each task.
    """

    kinds: tuple[LayerSite, ...]
    kind: NDArray[np.int64]
    task: NDArray[np.int64]
    site: NDArray[np.int64]

    def only(self, condition: Callable[[LayerSite], bool]) -> SiteKinds:
        """Return the sites of the kinds that meet `condition`."""
        chosen = np.array([condition(kind) for kind in self.kinds], bool)
        sites = chosen[self.kind]
        tasks = sites[self.site]
        return SiteKinds(
            tuple(itertools.compress(self.kinds, chosen)),
            (np.cumsum(chosen) - 1)[self.kind[sites]],
            self.task[tasks],
            (np.cumsum(sites) - 1)[self.site[tasks]],
        )


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
    multiplies = np.array([text.endswith(_BACKWARD) for text in graph.strings], bool)
    backward: dict[int, list[int]] = {}
    # Without a number are tasks that autograd did not record: they belong to no layer's forward.
    for task in np.flatnonzero(
        (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence >= 0) & multiplies[tasks.name]
    ).tolist():
        backward.setdefault(int(tasks.sequence[task]), []).append(task)
    forward = np.flatnonzero((tasks.phase == StepPhase.FORWARD) & (tasks.call >= 0))
    columns = (tasks.call, tasks.name, tasks.scope, tasks.module)
    # Few combinations of codes stand for many tasks.
    codes = list(zip(*(column[forward].tolist() for column in columns), strict=True))
    layers = {numbers: _coded_layer(graph, *numbers) for numbers in dict.fromkeys(codes)}
    sites = []
    for task, numbers in zip(forward.tolist(), codes, strict=True):
        if (layer := layers[numbers]) is not None:
            after = backward.get(int(tasks.sequence[task]), ())
            sites.append(LayerSite(*layer, task, tuple(after)))
    return tuple(sites)


@kept
def site_kinds(graph: Graph) -> SiteKinds:
    """Return `layer_sites` by kind."""
    sites = layer_sites(graph)
    numbers: dict[tuple[Any, ...], int] = {}
    kinds: list[LayerSite] = []
    kind = []
    for site in sites:
        key = site.module, site.x, site.layer, site.weight_bytes, bool(site.backward)
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            kinds.append(site)
        kind.append(number)
    counts = [len(site.tasks) for site in sites]
    task = np.array([task for site in sites for task in site.tasks], np.int64)
    return SiteKinds(
        tuple(kinds), np.array(kind, np.int64), task, np.repeat(np.arange(len(sites)), counts)
    )


def _coded_layer(
    graph: Graph, call: int, name: int, scope: int, module: int
) -> tuple[str, TensorSpec, tuple[Any, ...], int] | None:
    """Return module, input, settings and bytes of the weight of a layer; None if it is not one."""
    enclosing, inside = graph.strings[scope], graph.strings[module].partition(".")[2]
    if not inside or enclosing.partition("/")[0] in RECURRENT:
        return None
    parts = _layer(graph.calls[call], graph.strings[name], enclosing)
    return None if parts is None else (inside, parts[0], parts[2], parts[1].nbytes)


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
