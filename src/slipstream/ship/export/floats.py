"""Trace a PyTorch model into float layers that have .tflite operators.

`torch.export` lists the operators; batch norms, activations and padding are folded into
neighbouring layers. Images stay NCHW here; linear layers that read a flattened image have their
weights reordered when they are written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from slipstream.ship.errors import UnsupportedModelError

Pair = tuple[int, int]
_EXPORTED = (
    "Conv2d and Conv1d (one group, or one per channel), ConvTranspose2d, Linear, BatchNorm, ReLU, "
    "ReLU6, sigmoid, SiLU, Hardswish, LeakyReLU, average and maximum pooling, adaptive pooling to "
    "1, means over an image, nearest-neighbour upsampling by integer factors, sums, products and "
    "concatenations (of channels) of two tensors, zero padding, flatten, softmax, Dropout"
)


@dataclass(frozen=True)
class FloatOperator:
    """One operator of the exported network.

    Attributes:
        kind: ``conv``, ``linear``, ``add``, ``mul``, ``concat``, ``mean``, ``average_pool``,
            ``max_pool``, ``reshape``, ``resize``, ``transpose``, ``softmax``, ``logistic``,
            ``hard_swish`` or ``leaky_relu``.
        inputs, output: names of values.
        source: qualified name of its module.
        weight, bias: float32; only of convolutions and linear layers.
        kernel, stride, dilation: (height, width).
        padding: (top, bottom, left, right).
        activation: ``none``, ``relu`` or ``relu6``.
        alpha: slope of a leaky ReLU below 0.
    """

    kind: str
    inputs: tuple[str, ...]
    output: str
    source: str = ""
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1
    activation: str = "none"
    alpha: float = 0.0


@dataclass
class FloatModel:
    """Layers in execution order.

    Attributes:
        shapes: shape of each value as in PyTorch, except that [N, C, L] is [N, C, 1, L].
        inputs, outputs: names of values.
        graph: the traced module, run for calibration.
        aliases: names of values that equal another value.
    """

    layers: list[FloatOperator]
    shapes: dict[str, tuple[int, ...]]
    inputs: list[str]
    outputs: list[str]
    graph: torch.fx.GraphModule
    aliases: dict[str, str] = field(default_factory=dict)

    def run(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all values by name for an input of batch size 1; shapes as in `shapes`."""
        values: dict[str, torch.Tensor] = {}

        class RecordingInterpreter(torch.fx.Interpreter):
            def run_node(self, n: Node) -> Any:
                values[n.name] = super().run_node(n)
                return values[n.name]

        with torch.no_grad():
            RecordingInterpreter(self.graph).run(inputs)
        for layer in self.layers:
            if layer.kind == "logistic" and layer.output not in values:
                values[layer.output] = torch.sigmoid(values[layer.inputs[0]])
        return {
            name: value.unsqueeze(2) if isinstance(value, torch.Tensor) and value.dim() == 3
            else value
            for name, value in values.items()
        }  # fmt: skip


def trace(model: torch.nn.Module, example: torch.Tensor) -> FloatModel:
    """Trace a model in eval mode with an example [1, ...]; raises UnsupportedModelError."""
    remedy = f"calibration inputs that the model accepts; these are {list(example.shape[1:])} each"
    try:
        with torch.no_grad():
            model.eval()(example)
        remedy = "a forward pass without branches that depend on values"
        exported = torch.export.export(model, (example,))
    except Exception as error:
        why = next(iter(str(error).splitlines()), "")
        raise UnsupportedModelError(
            f"the model cannot be traced: {type(error).__name__}: {why}",
            where=type(model).__name__,
            remedy=remedy,
        ) from error
    traced = _Tracer(exported).run()
    if not traced.layers:
        raise UnsupportedModelError("the model computes nothing", where=type(model).__name__)
    return traced


class _Tracer:
    def __init__(self, exported: Any) -> None:
        # As a module, it has the parameters as attributes.
        self._module = exported.module(check_guards=False)
        self._model = FloatModel([], {}, [], [], self._module)
        self._unsupported: dict[str, list[str]] = {}

    def run(self) -> FloatModel:
        model = self._model
        for node in self._module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape = tuple(int(size) for size in value.shape)
                model.shapes[node.name] = (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape
            if node.op == "placeholder":
                model.inputs.append(node.name)
            elif node.op == "output":
                model.outputs = [self.value(read) for read in node.all_input_nodes]
            elif node.op == "call_function":
                self._call(node)
        if self._unsupported:
            listed = [f"{what} ({', '.join(where)})" for what, where in self._unsupported.items()]
            raise UnsupportedModelError(
                "unsupported operators: " + "; ".join(listed),
                operators=tuple(sorted(self._unsupported)),
                remedy=f"use only {_EXPORTED}",
            )
        return model

    def _call(self, node: Node) -> None:
        name = _operator_name(node)
        if name not in _RULES:
            if node.users:
                self._unsupported.setdefault(name, []).append(_module_of(node) or node.name)
            return
        try:
            _RULES[name](self, node)
        except UnsupportedModelError as error:
            where = _module_of(node) or node.name
            self._unsupported.setdefault(f"{name} {error.what}", []).append(where)

    # Helpers of the rules below.

    def value(self, node: Any) -> str:
        """Return the name of a node's value, with aliases resolved."""
        name = str(node.name)
        while name in self._model.aliases:
            name = self._model.aliases[name]
        return name

    def constant(self, node: Any) -> torch.Tensor | None:
        """Return a parameter or buffer as float32; None for None."""
        if node is None:
            return None
        if not isinstance(node, Node) or node.op != "get_attr":
            raise UnsupportedModelError("with weights that are not parameters")
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        weights: torch.Tensor = value.detach().float()
        return weights

    def shape(self, node: Any) -> tuple[int, ...]:
        return self._model.shapes[node.name]

    def add(self, node: Node, kind: str, inputs: tuple[Any, ...], **parts: Any) -> None:
        if any(not isinstance(read, Node) or read.op == "get_attr" for read in inputs):
            raise UnsupportedModelError("with a constant operand")
        names = tuple(self.value(read) for read in inputs)
        self._model.layers.append(FloatOperator(kind, names, node.name, _module_of(node), **parts))

    def add_named(self, name: str, kind: str, inputs: tuple[str, ...], node: Node) -> None:
        """Append a layer with a value named `name` that has the shape of `node`."""
        self._model.shapes[name] = self._model.shapes[node.name]
        self._model.layers.append(FloatOperator(kind, inputs, name, _module_of(node)))

    def alias(self, node: Node, other: Any) -> None:
        self._model.aliases[node.name] = self.value(other)

    def producer(self, node: Any, *kinds: str) -> int:
        """Return the index of the layer that computes `node`; -1 if another node reads it too."""
        name = self.value(node)
        for index, layer in enumerate(self._model.layers):
            if layer.output == name and (layer.kind in kinds or not kinds) and len(node.users) == 1:
                return index
        return -1

    def fuse_activation(self, node: Node, activation: str) -> None:
        index = self.producer(
            node.args[0], "conv", "linear", "add", "mul", "transpose", "average_pool", "max_pool"
        )
        layers = self._model.layers
        name = self.value(node.args[0])
        if any(layer.output == name and layer.activation == activation for layer in layers):
            self.alias(node, node.args[0])  # twice is the same as once
            return
        if index < 0 or layers[index].activation != "none":
            raise UnsupportedModelError("without a preceding layer that only it reads")
        self._replace(node, index, activation=activation)

    def _replace(self, node: Node, index: int, **parts: Any) -> None:
        """Change fields of a layer, which now computes `node`."""
        layer = self._model.layers[index]
        self._model.layers[index] = replace(layer, output=node.name, **parts)

    def fold_norm(self, node: Node) -> None:
        """Fold a batch norm into the convolution or linear layer before it."""
        index = self.producer(node.args[0], "conv", "linear")
        if index < 0 or self._model.layers[index].activation != "none":
            raise UnsupportedModelError("without a preceding convolution that only it reads")
        layer = self._model.layers[index]
        gamma, beta, mean, variance = (self.constant(argument) for argument in node.args[1:5])
        eps = next(value for value in node.args[5:] if isinstance(value, float) and value < 0.05)
        assert layer.weight is not None and mean is not None and variance is not None  # noqa: PT018
        factor = torch.rsqrt(variance + eps) * (1.0 if gamma is None else gamma)
        weight = layer.weight * factor.reshape(-1, *[1] * (layer.weight.dim() - 1))
        shift = (torch.zeros_like(mean) if layer.bias is None else layer.bias) - mean
        bias = shift * factor + (0.0 if beta is None else beta)
        self._replace(node, index, weight=weight, bias=bias)

    def padding_before(self, node: Any) -> tuple[Any, tuple[int, int, int, int]]:
        """Return a convolution's input and sides once explicit padding before it is folded in."""
        if isinstance(node, Node) and _operator_name(node) in ("pad", "constant_pad_nd"):
            # `_pad` adds no layer and leaves the folding to the convolution.
            sides = [*node.args[1], 0, 0, 0, 0][:4]  # type: ignore[misc]
            left, right, top, bottom = (int(side) for side in sides)
            return node.args[0], (top, bottom, left, right)
        return node, (0, 0, 0, 0)


def _operator_name(node: Any) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname)
    return getattr(target, "__name__", str(target))


def _module_of(node: Node) -> str:
    """Return the qualified name of the innermost module; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(value[0]) for value in stack.values()]
    return names[-1].removeprefix("L['self'].") if names else ""


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    numbers = [int(number) for number in value]
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _arguments(node: Node, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, in the order of `defaults`."""
    arguments = dict(defaults)
    arguments.update(zip(defaults, node.args, strict=False))
    arguments.update(node.kwargs)
    return arguments


def _flat(value: Any) -> Any:
    """Return a setting of a layer over [N, C, L] for [N, C, 1, L]."""
    if isinstance(value, str):
        return value
    size = value if isinstance(value, int) else value[0]
    return (1, int(size))


def _conv(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {
        "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1,
        "groups": 1,
    })  # fmt: skip
    weight = tracer.constant(arguments["weight"])
    assert weight is not None  # a convolution has weights
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
        arguments |= {name: _flat(arguments[name]) for name in ("stride", "dilation")}
        if not isinstance(arguments["padding"], str):
            arguments["padding"] = (0, _flat(arguments["padding"])[1])
    source, explicit = tracer.padding_before(arguments["input"])
    sides = _sides(arguments["padding"], _pair(weight.shape[2:]), _pair(arguments["dilation"]))
    padding = tuple(a + b for a, b in zip(explicit, sides, strict=True))
    channels = tracer.shape(source)[1]
    groups = int(arguments["groups"])
    if groups not in (1, channels):
        raise UnsupportedModelError(f"with {groups} groups")
    tracer.add(
        node, "conv", (source,), weight=weight, bias=tracer.constant(arguments["bias"]),
        kernel=_pair(weight.shape[2:]), stride=_pair(arguments["stride"]), padding=padding,
        dilation=_pair(arguments["dilation"]), groups=groups,
    )  # fmt: skip


def _sides(padding: Any, kernel: Pair, dilation: Pair) -> tuple[int, int, int, int]:
    """Return (top, bottom, left, right) of a convolution's padding, which may be a name."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        # PyTorch allows "same" for stride 1 only and pads the odd row or column at the end.
        high, wide = ((size - 1) * step for size, step in zip(kernel, dilation, strict=True))
        return high // 2, high - high // 2, wide // 2, wide - wide // 2
    high, wide = _pair(padding)
    return high, high, wide, wide


def _linear(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {"input": None, "weight": None, "bias": None})
    if len(tracer.shape(node)) != 2:
        raise UnsupportedModelError(f"with shape {list(tracer.shape(node))}")
    weight = tracer.constant(arguments["weight"])
    bias = tracer.constant(arguments["bias"])
    tracer.add(node, "linear", (arguments["input"],), weight=weight, bias=bias)


def _transpose(tracer: _Tracer, node: Node) -> None:
    """Add a transposed convolution as SAME or VALID; rows of zeros make the kernel fit."""
    arguments = _arguments(node, {
        "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0,
        "output_padding": 0, "groups": 1, "dilation": 1,
    })  # fmt: skip
    weight = tracer.constant(arguments["weight"])
    assert weight is not None  # a convolution has weights
    stride, padding, extra = (
        _pair(arguments[name]) for name in ("stride", "padding", "output_padding")
    )
    if int(arguments["groups"]) != 1 or _pair(arguments["dilation"]) != (1, 1):
        raise UnsupportedModelError("with groups or dilation")
    kernel = _pair(weight.shape[2:])
    sizes = []
    for side in (0, 1):
        # SAME yields in * stride values, after cropping (kernel - stride) // 2 at the start.
        grown = kernel[side] + extra[side]
        same = grown - stride[side] == 2 * padding[side]
        valid = not padding[side] and grown >= stride[side]
        if not same and not valid:
            raise UnsupportedModelError(f"with padding {padding} and output padding {extra}")
        sizes.append(grown)
    # [in, out, h, w], zeros at the end.
    weight = functional.pad(weight, (0, extra[1], 0, extra[0]))
    tracer.add(
        node, "transpose", (arguments["input"],), weight=weight.transpose(0, 1),
        bias=tracer.constant(arguments["bias"]), kernel=(sizes[0], sizes[1]), stride=stride,
        padding=(padding[0], padding[0], padding[1], padding[1]),
    )  # fmt: skip


def _resize(tracer: _Tracer, node: Node) -> None:
    before, after = tracer.shape(node.args[0]), tracer.shape(node)
    if len(after) != 4 or any(after[side] % before[side] for side in (2, 3)):
        raise UnsupportedModelError("by factors that are not integers")
    tracer.add(node, "resize", (node.args[0],))


def _mul(tracer: _Tracer, node: Node) -> None:
    a, b = node.args[:2]
    if not isinstance(b, Node):
        raise UnsupportedModelError("with operands that are not two tensors")
    shapes = sorted((tracer.shape(a), tracer.shape(b)), key=math.prod)
    gate = (shapes[1][0], shapes[1][1], 1, 1)[: len(shapes[1])]
    if shapes[0] not in (shapes[1], gate):
        raise UnsupportedModelError(f"with shapes {list(shapes[1])} and {list(shapes[0])}")
    tracer.add(node, "mul", (a, b))


def _concat(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {"tensors": (), "dim": 0})
    dimensions = len(node.meta["val"].shape)
    if int(arguments["dim"]) % dimensions != 1 or len(arguments["tensors"]) != 2:
        raise UnsupportedModelError("of more than two tensors, or along another axis than channels")
    tracer.add(node, "concat", tuple(arguments["tensors"]))


def _silu(tracer: _Tracer, node: Node) -> None:
    source = tracer.value(node.args[0])
    tracer.add_named(f"{node.name}.gate", "logistic", (source,), node)
    tracer.add_named(node.name, "mul", (source, f"{node.name}.gate"), node)


def _leaky_relu(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {"input": None, "negative_slope": 0.01})
    tracer.add(node, "leaky_relu", (arguments["input"],), alpha=float(arguments["negative_slope"]))


def _add(tracer: _Tracer, node: Node) -> None:
    a, b = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(b, Node):
        raise UnsupportedModelError("with operands that are not two tensors, or with alpha")
    if tracer.shape(a) != tracer.shape(b):
        raise UnsupportedModelError("with different shapes")
    tracer.add(node, "add", (a, b))


def _pool(kind: str) -> Callable[[_Tracer, Node], None]:
    def rule(tracer: _Tracer, node: Node) -> None:
        arguments = _arguments(node, {"input": None, "kernel": None, "stride": [], "padding": 0})
        if _operator_name(node).endswith("1d"):
            arguments["stride"] = _flat(arguments["stride"] or arguments["kernel"])
            arguments["kernel"] = _flat(arguments["kernel"])
            arguments["padding"] = (0, _flat(arguments["padding"])[1])
        kernel = _pair(arguments["kernel"])
        high, wide = _pair(arguments["padding"])
        if (high or wide) and kind == "average_pool":
            raise UnsupportedModelError("with padding")
        if len(node.args) > 4:
            raise UnsupportedModelError("with dilation or ceil_mode")
        tracer.add(
            node, kind, (arguments["input"],), kernel=kernel,
            stride=_pair(arguments["stride"] or kernel), padding=(high, high, wide, wide),
        )  # fmt: skip

    return rule


def _global_pool(tracer: _Tracer, node: Node) -> None:
    shape = tracer.shape(node.args[0])
    if _operator_name(node) == "mean":
        dimensions: Any = node.args[1]
        sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        dims = [int(dim) % len(sizes) for dim in dimensions]
        if len(sizes) < 3 or sorted(dims) != list(range(2, len(sizes))):
            raise UnsupportedModelError("over dimensions other than height and width")
        tracer.add(node, "mean", (node.args[0],))
        return
    if set(_pair(node.args[1])) != {1}:
        raise UnsupportedModelError("to more than 1 x 1")
    kernel = (shape[2], shape[3])
    tracer.add(node, "average_pool", (node.args[0],), kernel=kernel, stride=kernel)


def _reshape(tracer: _Tracer, node: Node) -> None:
    tracer.add(node, "reshape", (node.args[0],))


def _softmax(tracer: _Tracer, node: Node) -> None:
    dimensions = len(tracer.shape(node))
    if dimensions != 2 or int(node.args[1]) % dimensions != 1:  # type: ignore[arg-type]
        raise UnsupportedModelError("on inputs that are not [n, classes], or not over classes")
    tracer.add(node, "softmax", (node.args[0],))


def _relu6(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {"input": None, "min": -1.0, "max": 1.0})
    if _operator_name(node).startswith("hardtanh") and (arguments["min"], arguments["max"]) != (
        0.0,
        6.0,
    ):
        raise UnsupportedModelError(f"with limits {arguments['min']} and {arguments['max']}")
    tracer.fuse_activation(node, "relu6")


def _pad(tracer: _Tracer, node: Node) -> None:
    arguments = _arguments(node, {"input": None, "pad": None, "mode": "constant", "value": 0.0})
    foldable = all(_operator_name(user) in ("conv2d", "conv1d") for user in node.users)
    if arguments["mode"] != "constant" or (arguments["value"] or 0.0) or not foldable:
        raise UnsupportedModelError("with values other than zero, or not before a convolution")


def _same(tracer: _Tracer, node: Node) -> None:
    tracer.alias(node, node.args[0])


_RULES: dict[str, Callable[[_Tracer, Node], None]] = {
    "conv2d": _conv,
    "linear": _linear,
    "add": _add,
    "add_": _add,
    "mul": _mul,
    "mul_": _mul,
    "cat": _concat,
    "concat": _concat,
    "sigmoid": lambda tracer, node: tracer.add(node, "logistic", (node.args[0],)),
    "silu": _silu,
    "silu_": _silu,
    "hardswish": lambda tracer, node: tracer.add(node, "hard_swish", (node.args[0],)),
    "hardswish_": lambda tracer, node: tracer.add(node, "hard_swish", (node.args[0],)),
    "leaky_relu": _leaky_relu,
    "leaky_relu_": _leaky_relu,
    "conv1d": _conv,
    "conv_transpose2d": _transpose,
    "upsample_nearest2d": _resize,
    "avg_pool1d": _pool("average_pool"),
    "max_pool1d": _pool("max_pool"),
    "adaptive_avg_pool1d": _global_pool,
    "unsqueeze": _reshape,
    "batch_norm": _Tracer.fold_norm,
    "_native_batch_norm_legit_no_training": _Tracer.fold_norm,
    "relu": lambda tracer, node: tracer.fuse_activation(node, "relu"),
    "relu_": lambda tracer, node: tracer.fuse_activation(node, "relu"),
    "relu6": _relu6,
    "hardtanh": _relu6,
    "hardtanh_": _relu6,
    "avg_pool2d": _pool("average_pool"),
    "max_pool2d": _pool("max_pool"),
    "adaptive_avg_pool2d": _global_pool,
    "mean": _global_pool,
    "flatten": _reshape,
    "view": _reshape,
    "reshape": _reshape,
    "squeeze": _reshape,
    "softmax": _softmax,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "dropout": _same,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    operator.getitem.__name__: _same,
}
