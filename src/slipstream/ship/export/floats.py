"""A PyTorch model as a list of float layers that .tflite has operators for.

`torch.export` gives the operators; batch norms are folded into the convolution before them,
activations into what they follow, padding into convolutions. Images stay NCHW here; what reads them
flattened is reordered when weights are written.
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
    "Conv2d and Conv1d (of one group, or one a channel), ConvTranspose2d, Linear, BatchNorm, ReLU, "
    "ReLU6, sigmoid, SiLU, Hardswish, LeakyReLU, average and maximum pooling, adaptive pooling to "
    "1, means over an image, nearest neighbours by integer factors, sums, products and "
    "concatenations (of channels) of two tensors, zero padding, flatten, softmax, Dropout"
)


@dataclass(frozen=True)
class Layer:
    """One operator to be.

    Attributes:
        kind: ``conv``, ``linear``, ``add``, ``mul``, ``concat``, ``mean``, ``average_pool``,
            ``max_pool``, ``reshape``, ``resize``, ``transpose``, ``softmax``, ``logistic``,
            ``hard_swish`` or ``leaky_relu``.
        inputs: names of values.
        output: the name of its value.
        source: the module it is from.
        weight, bias: float32; of convolutions and linear layers.
        stride, kernel: (height, width).
        padding: (top, bottom, left, right).
        groups: of a convolution.
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
    """Layers in the order they run in.

    Attributes:
        shapes: of values by name, as PyTorch has them; [N, C, L] is [N, C, 1, L].
        inputs, outputs: names of values.
        graph: what computes them all, for calibration.
        aliases: names of values that are another value.
    """

    layers: list[Layer]
    shapes: dict[str, tuple[int, ...]]
    inputs: list[str]
    outputs: list[str]
    graph: torch.fx.GraphModule
    aliases: dict[str, str] = field(default_factory=dict)

    def run(self, given: torch.Tensor) -> dict[str, torch.Tensor]:
        """All values by name, for an input with a batch of 1.

        [N, C, L] is [N, C, 1, L], as in `shapes`.
        """
        values: dict[str, torch.Tensor] = {}

        class Keeping(torch.fx.Interpreter):
            def run_node(self, n: Node) -> Any:
                values[n.name] = super().run_node(n)
                return values[n.name]

        with torch.no_grad():
            Keeping(self.graph).run(given)
        for layer in self.layers:
            if layer.kind == "logistic" and layer.output not in values:
                values[layer.output] = torch.sigmoid(values[layer.inputs[0]])
        return {
            name: value.unsqueeze(2) if isinstance(value, torch.Tensor) and value.dim() == 3
            else value
            for name, value in values.items()
        }  # fmt: skip


def trace(model: torch.nn.Module, example: torch.Tensor) -> FloatModel:
    """The layers of a model in eval mode.

    Args:
        example: an input, with a batch of 1.

    Raises:
        UnsupportedModelError: it cannot be exported, or has what no operator of ours does; all of
            it is named, with its modules.
    """
    remedy = f"calibration that the model takes: these are {list(example.shape[1:])} without batch"
    try:
        with torch.no_grad():
            model.eval()(example)
        remedy = "a forward pass without branches that depend on values"
        exported = torch.export.export(model, (example,))
    except Exception as error:
        why = next(iter(str(error).splitlines()), "")
        raise UnsupportedModelError(
            f"it cannot be traced: {type(error).__name__}: {why}",
            where=type(model).__name__,
            remedy=remedy,
        ) from error
    traced = _Tracer(exported).run()
    if not traced.layers:
        raise UnsupportedModelError("it computes nothing", where=type(model).__name__)
    return traced


class _Tracer:
    def __init__(self, exported: Any) -> None:
        # As a module: parameters are attributes of it.
        self._module = exported.module(check_guards=False)
        self._made = FloatModel([], {}, [], [], self._module)
        self._problems: dict[str, list[str]] = {}

    def run(self) -> FloatModel:
        """All nodes in turn."""
        model = self._made
        for node in self._module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape = tuple(int(size) for size in value.shape)
                model.shapes[node.name] = (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape
            if node.op == "placeholder":
                model.inputs.append(node.name)
            elif node.op == "output":
                model.outputs = [self._name(one) for one in node.all_input_nodes]
            elif node.op == "call_function":
                self._call(node)
        if self._problems:
            told = [f"{what} ({', '.join(where)})" for what, where in self._problems.items()]
            raise UnsupportedModelError(
                "no operator of ours does " + "; ".join(told),
                operators=tuple(sorted(self._problems)),
                remedy=f"what is exported: {_EXPORTED}",
            )
        return model

    def _call(self, node: Node) -> None:
        name = _operator_name(node)
        if name not in _RULES:
            if node.users:
                self._problems.setdefault(name, []).append(_module_of(node) or node.name)
            return
        try:
            _RULES[name](self, node)
        except UnsupportedModelError as error:
            where = _module_of(node) or node.name
            self._problems.setdefault(f"{name} {error.what}", []).append(where)

    # What rules are made of.

    def _name(self, node: Any) -> str:
        """The value of a node, through what changes nothing."""
        name = str(node.name)
        while name in self._made.aliases:
            name = self._made.aliases[name]
        return name

    def constant(self, node: Any) -> torch.Tensor | None:
        """A parameter or buffer; None where there is none."""
        if node is None:
            return None
        if not isinstance(node, Node) or node.op != "get_attr":
            raise UnsupportedModelError("with weights that are computed")
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        weights: torch.Tensor = value.detach().float()
        return weights

    def shape(self, node: Any) -> tuple[int, ...]:
        """Of a value."""
        return self._made.shapes[node.name]

    def add(self, node: Node, kind: str, inputs: tuple[Any, ...], **parts: Any) -> None:
        """Append a layer."""
        if any(not isinstance(one, Node) or one.op == "get_attr" for one in inputs):
            raise UnsupportedModelError("of a constant")
        names = tuple(self._name(one) for one in inputs)
        self._made.layers.append(Layer(kind, names, node.name, _module_of(node), **parts))

    def value(self, node: Any) -> str:
        """Return the name of a node's value."""
        return self._name(node)

    def add_named(self, name: str, kind: str, inputs: tuple[str, ...], node: Node) -> None:
        """Append a layer whose value has the shape of `node`, by the names of values."""
        self._made.shapes[name] = self._made.shapes[node.name]
        self._made.layers.append(Layer(kind, inputs, name, _module_of(node)))

    def alias(self, node: Node, other: Any) -> None:
        """`node` is the same value as `other`."""
        self._made.aliases[node.name] = self._name(other)

    def last(self, node: Any, *kinds: str) -> int:
        """The layer that alone makes what `node` alone reads; where of `layers` it stands."""
        name = self._name(node)
        for number, layer in enumerate(self._made.layers):
            if layer.output == name and (layer.kind in kinds or not kinds) and len(node.users) == 1:
                return number
        return -1

    def fuse_activation(self, node: Node, activation: str) -> None:
        """Into the layer before it."""
        number = self.last(
            node.args[0], "conv", "linear", "add", "mul", "transpose", "average_pool", "max_pool"
        )
        layers = self._made.layers
        if number < 0 or layers[number].activation != "none":
            raise UnsupportedModelError("that does not follow a layer of its own")
        self._replace(node, number, activation=activation)

    def _replace(self, node: Node, number: int, **parts: Any) -> None:
        """A layer with other parts, that makes what `node` is."""
        layer = self._made.layers[number]
        self._made.layers[number] = replace(layer, output=node.name, **parts)

    def fold_norm(self, node: Node) -> None:
        """Batch norm into the convolution or linear layer before it."""
        number = self.last(node.args[0], "conv", "linear")
        if number < 0 or self._made.layers[number].activation != "none":
            raise UnsupportedModelError("that does not follow a convolution of its own")
        layer = self._made.layers[number]
        gamma, beta, mean, variance = (self.constant(one) for one in node.args[1:5])
        eps = next(one for one in node.args[5:] if isinstance(one, float) and one < 0.05)
        assert layer.weight is not None and mean is not None and variance is not None  # noqa: PT018
        factor = torch.rsqrt(variance + eps) * (1.0 if gamma is None else gamma)
        weight = layer.weight * factor.reshape(-1, *[1] * (layer.weight.dim() - 1))
        shift = (torch.zeros_like(mean) if layer.bias is None else layer.bias) - mean
        bias = shift * factor + (0.0 if beta is None else beta)
        self._replace(node, number, weight=weight, bias=bias)

    def padding_before(self, node: Any) -> tuple[Any, tuple[int, int, int, int]]:
        """What a convolution reads once explicit padding before it is folded in."""
        if isinstance(node, Node) and _operator_name(node) in ("pad", "constant_pad_nd"):
            # The rule of `pad` has left it to us.
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
    """The innermost module's qualified name, as the model has it."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(value[0]) for value in stack.values()]
    return names[-1].removeprefix("L['self'].") if names else ""


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    numbers = [int(one) for one in value]
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _arguments(node: Node, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, in the order of `defaults`."""
    arguments = dict(defaults)
    arguments.update(zip(defaults, node.args, strict=False))
    arguments.update(node.kwargs)
    return arguments


def _flat(value: Any) -> Any:
    """Numbers of a layer over [N, C, L] as those over [N, C, 1, L]."""
    if isinstance(value, str):
        return value
    size = value if isinstance(value, int) else value[0]
    return (1, int(size))


def _conv(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {
        "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1,
        "groups": 1,
    })  # fmt: skip
    weight = tracer.constant(given["weight"])
    assert weight is not None  # a convolution has weights
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
        given |= {name: _flat(given[name]) for name in ("stride", "dilation")}
        if not isinstance(given["padding"], str):
            given["padding"] = (0, _flat(given["padding"])[1])
    source, explicit = tracer.padding_before(given["input"])
    sides = _sides(given["padding"], _pair(weight.shape[2:]), _pair(given["dilation"]))
    padding = tuple(a + b for a, b in zip(explicit, sides, strict=True))
    channels = tracer.shape(source)[1]
    groups = int(given["groups"])
    if groups not in (1, channels):
        raise UnsupportedModelError(f"with {groups} groups")
    tracer.add(
        node, "conv", (source,), weight=weight, bias=tracer.constant(given["bias"]),
        kernel=_pair(weight.shape[2:]), stride=_pair(given["stride"]), padding=padding,
        dilation=_pair(given["dilation"]), groups=groups,
    )  # fmt: skip


def _sides(padding: Any, kernel: Pair, dilation: Pair) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of a convolution's padding, which may be a name."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        # Of stride 1; what is odd goes to the end.
        high, wide = ((size - 1) * step for size, step in zip(kernel, dilation, strict=True))
        return high // 2, high - high // 2, wide // 2, wide - wide // 2
    high, wide = _pair(padding)
    return high, high, wide, wide


def _linear(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {"input": None, "weight": None, "bias": None})
    if len(tracer.shape(node)) != 2:
        raise UnsupportedModelError(f"of the shape {list(tracer.shape(node))}")
    weight = tracer.constant(given["weight"])
    bias = tracer.constant(given["bias"])
    tracer.add(node, "linear", (given["input"],), weight=weight, bias=bias)


def _transpose(tracer: _Tracer, node: Node) -> None:
    """A transposed convolution as TensorFlow's SAME or VALID; rows of zeros make the kernel fit."""
    given = _arguments(node, {
        "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0,
        "output_padding": 0, "groups": 1, "dilation": 1,
    })  # fmt: skip
    weight = tracer.constant(given["weight"])
    assert weight is not None  # a convolution has weights
    stride, padding, more = (_pair(given[name]) for name in ("stride", "padding", "output_padding"))
    if int(given["groups"]) != 1 or _pair(given["dilation"]) != (1, 1):
        raise UnsupportedModelError("with groups or dilation")
    kernel = _pair(weight.shape[2:])
    sizes = []
    for side in (0, 1):
        # SAME gives in * stride, cut by (kernel - stride) // 2 before.
        grown = kernel[side] + more[side]
        same = grown - stride[side] == 2 * padding[side]
        valid = not padding[side] and grown >= stride[side]
        if not same and not valid:
            raise UnsupportedModelError(f"with padding {padding} and output padding {more}")
        sizes.append(grown)
    # [in, out, h, w], zeros behind.
    weight = functional.pad(weight, (0, more[1], 0, more[0]))
    tracer.add(
        node, "transpose", (given["input"],), weight=weight.transpose(0, 1),
        bias=tracer.constant(given["bias"]), kernel=(sizes[0], sizes[1]), stride=stride,
        padding=(padding[0], padding[0], padding[1], padding[1]),
    )  # fmt: skip


def _resize(tracer: _Tracer, node: Node) -> None:
    before, after = tracer.shape(node.args[0]), tracer.shape(node)
    if len(after) != 4 or any(after[side] % before[side] for side in (2, 3)):
        raise UnsupportedModelError("by other than whole factors")
    tracer.add(node, "resize", (node.args[0],))


def _mul(tracer: _Tracer, node: Node) -> None:
    a, b = node.args[:2]
    if not isinstance(b, Node):
        raise UnsupportedModelError("of something else than two tensors")
    shapes = sorted((tracer.shape(a), tracer.shape(b)), key=math.prod)
    gate = (shapes[1][0], shapes[1][1], 1, 1)[: len(shapes[1])]
    if shapes[0] not in (shapes[1], gate):
        raise UnsupportedModelError(f"of the shapes {list(shapes[1])} and {list(shapes[0])}")
    tracer.add(node, "mul", (a, b))


def _concat(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {"tensors": (), "dim": 0})
    dimensions = len(node.meta["val"].shape)
    if int(given["dim"]) % dimensions != 1 or len(given["tensors"]) != 2:
        raise UnsupportedModelError("of more than two tensors, or not of their channels")
    tracer.add(node, "concat", tuple(given["tensors"]))


def _silu(tracer: _Tracer, node: Node) -> None:
    """x * sigmoid(x), in two layers."""
    source = tracer.value(node.args[0])
    tracer.add_named(f"{node.name}.gate", "logistic", (source,), node)
    tracer.add_named(node.name, "mul", (source, f"{node.name}.gate"), node)


def _leaky_relu(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {"input": None, "negative_slope": 0.01})
    tracer.add(node, "leaky_relu", (given["input"],), alpha=float(given["negative_slope"]))


def _add(tracer: _Tracer, node: Node) -> None:
    a, b = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(b, Node):
        raise UnsupportedModelError("of something else than two tensors")
    if tracer.shape(a) != tracer.shape(b):
        raise UnsupportedModelError("of two shapes")
    tracer.add(node, "add", (a, b))


def _pool(kind: str) -> Callable[[_Tracer, Node], None]:
    def rule(tracer: _Tracer, node: Node) -> None:
        given = _arguments(node, {"input": None, "kernel": None, "stride": [], "padding": 0})
        if _operator_name(node).endswith("1d"):
            given["stride"] = _flat(given["stride"] or given["kernel"])
            given["kernel"] = _flat(given["kernel"])
            given["padding"] = (0, _flat(given["padding"])[1])
        kernel = _pair(given["kernel"])
        high, wide = _pair(given["padding"])
        if (high or wide) and kind == "average_pool":
            raise UnsupportedModelError("with padding")
        if len(node.args) > 4:
            raise UnsupportedModelError("with dilation or rounding up")
        tracer.add(
            node, kind, (given["input"],), kernel=kernel, stride=_pair(given["stride"] or kernel),
            padding=(high, high, wide, wide),
        )  # fmt: skip

    return rule


def _global_pool(tracer: _Tracer, node: Node) -> None:
    shape = tracer.shape(node.args[0])
    if _operator_name(node) == "mean":
        given: Any = node.args[1]
        sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        dims = [int(dim) % len(sizes) for dim in given]
        if len(sizes) < 3 or sorted(dims) != list(range(2, len(sizes))):
            raise UnsupportedModelError("over other dimensions than height and width")
        tracer.add(node, "mean", (node.args[0],))
        return
    if set(_pair(node.args[1])) != {1}:
        raise UnsupportedModelError("to more than one pixel")
    kernel = (shape[2], shape[3])
    tracer.add(node, "average_pool", (node.args[0],), kernel=kernel, stride=kernel)


def _reshape(tracer: _Tracer, node: Node) -> None:
    tracer.add(node, "reshape", (node.args[0],))


def _softmax(tracer: _Tracer, node: Node) -> None:
    dimensions = len(tracer.shape(node))
    if dimensions != 2 or int(node.args[1]) % dimensions != 1:  # type: ignore[arg-type]
        raise UnsupportedModelError("over another dimension than the last of two")
    tracer.add(node, "softmax", (node.args[0],))


def _relu6(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {"input": None, "min": -1.0, "max": 1.0})
    if _operator_name(node).startswith("hardtanh") and (given["min"], given["max"]) != (0.0, 6.0):
        raise UnsupportedModelError(f"from {given['min']} to {given['max']}")
    tracer.fuse_activation(node, "relu6")


def _pad(tracer: _Tracer, node: Node) -> None:
    given = _arguments(node, {"input": None, "pad": None, "mode": "constant", "value": 0.0})
    into = all(_operator_name(user) in ("conv2d", "conv1d") for user in node.users)
    if given["mode"] != "constant" or (given["value"] or 0.0) or not into:
        raise UnsupportedModelError("with something else than zeros, or not before a convolution")


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
