"""A PyTorch model as an int8 network: calibrated, images as NHWC, nothing left to fold.

Weights have a symmetric grid for each output channel, codes from -127 to 127; activations one grid
each, of the range that calibration saw; poolings and reshapes keep the grid of what they read;
softmax and sigmoid have 1/256 from -128. Sources: Jacob et al., arXiv 1712.05877; the int8
specification of TensorFlow Lite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slipstream.errors import InvalidArgumentError, SlipstreamWarning, UnknownNameError
from slipstream.quant import (
    Format,
    Granularity,
    LeastError,
    MinMax,
    Observer,
    Percentile,
    grid_of_range,
    grid_of_weights,
    quantize,
)
from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.export.floats import FloatModel, Layer, trace
from slipstream.ship.firmware.network import Array, Network, Operator, Quantization, Tensor

_INT8 = Format(8, signed=True)
_OBSERVERS: dict[str, Callable[[], Observer]] = {
    "minmax": MinMax,
    "percentile": Percentile,
    "mse": lambda: LeastError(_INT8),
}
# Kinds whose outputs are codes of what they read.
_KEEPING = ("average_pool", "max_pool", "reshape", "resize")
# Kinds whose outputs have 1/256 from -128.
_FIXED = ("softmax", "logistic")
_MOST_INT32 = 2**31 - 1
_SCALE_BITS = 12


def quantize_model(
    model: torch.nn.Module, calibration: Iterable[torch.Tensor], *, name: str | None = None,
    observer: str = "percentile",
) -> Network:  # fmt: skip
    """An int8 network that computes what `model` does in eval mode.

    Args:
        model: of convolutions, linear layers and what stands between them; its first dimension is
            the batch. Inputs that are NCHW images are NHWC in the network, sequences [N, C, L] are
            images [N, 1, L, C].
        calibration: inputs as the model takes them, batches of any size.
        name: of the network; the class's by default.
        observer: ``minmax``, ``percentile`` (99.99 %) or ``mse``.

    Raises:
        UnsupportedModelError: the model has what no operator of ours does.
        InvalidArgumentError: calibration is empty, or holds no numbers.
    """
    if observer not in _OBSERVERS:
        raise UnknownNameError("observer", observer, _OBSERVERS)
    batches = [torch.as_tensor(batch).float() for batch in calibration]
    if not batches or not all(len(batch) for batch in batches):
        raise InvalidArgumentError("calibration", "is empty", remedy="some inputs of the model")
    if not all(batch.isfinite().all() for batch in batches):
        raise InvalidArgumentError("calibration", "holds NaN or infinity")
    traced = trace(model, batches[0][:1])
    if len(traced.inputs) != 1:
        raise UnsupportedModelError(f"it has {len(traced.inputs)} inputs; one is exported")
    grids = _grids(traced, batches, _OBSERVERS[observer])
    return _Builder(traced, grids, name or type(model).__name__).network()


def _grids(
    traced: FloatModel, batches: list[torch.Tensor], observer: Callable[[], Observer]
) -> dict[str, Quantization]:
    """A grid for each value."""
    names = {traced.inputs[0], *(layer.output for layer in traced.layers)}
    observers = {name: observer() for name in names}
    # The graph is made for a batch of 1.
    for one in (one for batch in batches for one in batch.split(1)):
        values = traced.run(one)
        for name, watching in observers.items():
            watching.observe(values[name])
    grids = {name: _grid_of(*one.range()) for name, one in observers.items()}
    _join(traced, observers, grids)
    for layer in traced.layers:
        if layer.kind in _KEEPING:
            grids[layer.output] = grids[layer.inputs[0]]
        elif layer.kind in _FIXED:
            grids[layer.output] = _quantization(1 / 256, -128)
    return grids


def _join(
    traced: FloatModel, observers: dict[str, Observer], grids: dict[str, Quantization]
) -> None:
    """Give what is concatenated one grid: of the widest range among the tensors and what keeps it.

    Raises:
        UnsupportedModelError: one of the tensors has a grid that is fixed.
    """
    groups = {name: {name} for name in grids}
    for layer in traced.layers:
        if layer.kind == "concat" or layer.kind in _KEEPING:
            whole = set[str]().union(*(groups[name] for name in (layer.output, *layer.inputs)))
            groups |= dict.fromkeys(whole, whole)
    fixed = {layer.output for layer in traced.layers if layer.kind in _FIXED}
    for layer in traced.layers:
        if layer.kind == "concat":
            group = groups[layer.output]
            if group & fixed:
                raise UnsupportedModelError(
                    "a concatenation of what softmax or sigmoid computes, whose scale is fixed",
                    where=layer.source or layer.output,
                )
            ranges = [observers[name].range() for name in group]
            low = torch.stack([one[0] for one in ranges]).min()
            high = torch.stack([one[1] for one in ranges]).max()
            grids |= dict.fromkeys(group, _grid_of(low, high))


def _grid_of(low: torch.Tensor, high: torch.Tensor) -> Quantization:
    grid = grid_of_range(low, high, _INT8)
    return _quantization(float(_short(grid.scale)), int(grid.zero))


def _short(scales: torch.Tensor) -> torch.Tensor:
    """Scales of 12 significant bits, rounded up so that nothing more is clipped.

    Products of two of them are exact in float32. Runtimes differ in whether they multiply scales of
    fully connected layers in 32 bits or 64; with these, they give the same bytes.
    """
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ceil(mantissa * 2**_SCALE_BITS), exponent - _SCALE_BITS)


def _quantization(scale: float, zero: int) -> Quantization:
    return Quantization(np.array([scale], np.float32), np.array([zero], np.int64))


class _Builder:
    """Layers to operators: weights are reordered, paddings named, reshapes left out."""

    def __init__(self, traced: FloatModel, grids: dict[str, Quantization], name: str) -> None:
        self._traced, self._grids, self._name = traced, grids, name
        self._tensors: list[Tensor] = []
        self._operators: list[Operator] = []
        self._index: dict[str, int] = {}
        # By value that is a flattened image: channels, height and width of the image.
        self._flattened: dict[str, tuple[int, int, int]] = {}

    def network(self) -> Network:
        """The network of all layers."""
        traced = self._traced
        inputs = tuple(self._value(name) for name in traced.inputs)
        for layer in traced.layers:
            getattr(self, f"_{layer.kind}")(layer)
        outputs = tuple(self._index[name] for name in traced.outputs)
        return Network(self._name, tuple(self._tensors), tuple(self._operators), inputs, outputs)

    def _value(self, name: str) -> int:
        """A tensor for a value; images become NHWC."""
        shape = self._traced.shapes[name]
        if len(shape) == 4:
            shape = (shape[0], shape[2], shape[3], shape[1])
        self._index[name] = len(self._tensors)
        self._tensors.append(Tensor(name, shape, "int8", self._grids[name]))
        return self._index[name]

    def _constant(self, name: str, data: Array, grid: Quantization | None = None) -> int:
        self._tensors.append(Tensor(name, data.shape, str(data.dtype), grid, data))
        return len(self._tensors) - 1

    def _operator(
        self, kind: str, layer: Layer, constants: tuple[int, ...] = (), **options: Any
    ) -> None:
        inputs = tuple(self._index[name] for name in layer.inputs)
        output = self._value(layer.output)
        operator = Operator(kind, (*inputs, *constants), (output,), options, layer.source)
        self._operators.append(operator)

    def _weights(self, layer: Layer, weight: torch.Tensor, axis: int) -> tuple[int, int]:
        """Tensors of weights, channels first as given and along `axis` as stored, and of bias."""
        grid = grid_of_weights(weight, _INT8, Granularity(axis=0))
        grid = replace(grid, scale=_short(grid.scale))
        codes = quantize(weight, grid).numpy().astype(np.int8)
        scales = grid.scale.numpy().astype(np.float32)
        moved = np.ascontiguousarray(np.moveaxis(codes, 0, axis))
        zeros = np.zeros(len(scales), np.int64)
        name = layer.source or layer.output
        weights = self._constant(f"{name}.weight", moved, Quantization(scales, zeros, axis))
        of_bias = (self._grids[layer.inputs[0]].scale * scales).astype(np.float32)
        real = np.zeros(len(scales)) if layer.bias is None else layer.bias.double().numpy()
        rounded = np.round(real / of_bias.astype(np.float64))
        clipped = np.clip(rounded, -_MOST_INT32, _MOST_INT32)
        if (clipped != rounded).any():
            warnings.warn(
                f"the bias of {name} does not fit into 32 bits and is clipped",
                SlipstreamWarning, stacklevel=2,
            )  # fmt: skip
        quantization = Quantization(of_bias, zeros, 0)
        return weights, self._constant(f"{name}.bias", clipped.astype(np.int32), quantization)

    def _conv(self, layer: Layer) -> None:
        assert layer.weight is not None  # as traced
        # [out, in, h, w] to [out, h, w, in].
        weight = layer.weight.permute(0, 2, 3, 1)
        layer, padding = self._padded(layer)
        options = {
            "padding": padding, "stride_h": layer.stride[0], "stride_w": layer.stride[1],
            "dilation_h": layer.dilation[0], "dilation_w": layer.dilation[1],
            "activation": layer.activation,
        }  # fmt: skip
        if layer.groups == 1:
            self._operator("conv_2d", layer, self._weights(layer, weight, 0), **options)
            return
        # A channel each: [out, h, w, 1] to [1, h, w, out].
        multiplier = weight.shape[0] // layer.groups
        weights = self._weights(layer, weight.squeeze(3), 2)
        stored = self._tensors[weights[0]]
        assert stored.data is not None and stored.quantization is not None  # noqa: PT018
        grid = Quantization(stored.quantization.scales, stored.quantization.zero_points, 3)
        data = stored.data[None]
        self._tensors[weights[0]] = Tensor(stored.name, data.shape, "int8", grid, data)
        self._operator("depthwise_conv_2d", layer, weights, multiplier=multiplier, **options)

    def _padded(self, layer: Layer) -> tuple[Layer, str]:
        """A convolution and its padding's name; where it has none, with a PAD before it.

        Firmware of ours takes it into the convolution.
        """
        given = layer.inputs[0]
        shape = self._traced.shapes[given]
        name = _padding_name(layer, (shape[2], shape[3]))
        if name:
            return layer, name
        top, bottom, left, right = layer.padding
        sides = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        padded = f"{layer.output}.padded"
        high, wide = shape[2] + top + bottom, shape[3] + left + right
        self._traced.shapes[padded] = (shape[0], shape[1], high, wide)
        self._grids[padded] = self._grids[given]
        paddings = self._constant(f"{padded}.sides", sides)
        self._operator("pad", replace(layer, output=padded), (paddings,))
        return replace(layer, inputs=(padded,)), "valid"

    def _linear(self, layer: Layer) -> None:
        assert layer.weight is not None  # as traced
        weight = layer.weight
        image = self._flattened.get(layer.inputs[0])
        if image is not None:
            # Columns come as NCHW flattens; memory is NHWC.
            weight = weight.reshape(-1, *image).permute(0, 2, 3, 1).reshape(weight.shape)
        self._operator(
            "fully_connected", layer, self._weights(layer, weight, 0), activation=layer.activation,
            weights_format=0,
        )  # fmt: skip

    def _add(self, layer: Layer) -> None:
        self._operator("add", layer, activation=layer.activation)

    def _mul(self, layer: Layer) -> None:
        self._operator("mul", layer, activation=layer.activation)

    def _concat(self, layer: Layer) -> None:
        # Channels are last.
        axis = len(self._traced.shapes[layer.output]) - 1
        self._operator("concatenation", layer, axis=axis, activation="none")

    def _transpose(self, layer: Layer) -> None:
        assert layer.weight is not None  # as traced
        weight = layer.weight.permute(0, 2, 3, 1)
        valid = not any(layer.padding)
        shape = self._traced.shapes[layer.output]
        wanted = np.array([1, shape[2], shape[3], shape[1]], np.int32)
        constants = self._weights(layer, weight, 0)
        size = self._constant(f"{layer.output}.shape", wanted)
        source = self._index[layer.inputs[0]]
        options = {
            "padding": "valid" if valid else "same", "stride_h": layer.stride[0],
            "stride_w": layer.stride[1], "activation": layer.activation,
        }  # fmt: skip
        output = self._value(layer.output)
        inputs = (size, constants[0], source, constants[1])
        self._operators.append(Operator("transpose_conv", inputs, (output,), options, layer.source))

    def _resize(self, layer: Layer) -> None:
        shape = self._traced.shapes[layer.output]
        size = self._constant(f"{layer.output}.shape", np.array(shape[2:], np.int32))
        self._operator("resize_nearest_neighbor", layer, (size,), half_pixel_centers=0)

    def _mean(self, layer: Layer) -> None:
        axes = self._constant(f"{layer.output}.axes", np.array([1, 2], np.int32))
        keep = len(self._traced.shapes[layer.output]) == 4
        self._operator("mean", layer, (axes,), keep_dims=int(keep))

    def _logistic(self, layer: Layer) -> None:
        self._operator("logistic", layer)

    def _hard_swish(self, layer: Layer) -> None:
        self._operator("hard_swish", layer)

    def _leaky_relu(self, layer: Layer) -> None:
        self._operator("leaky_relu", layer, alpha=layer.alpha)

    def _pool(self, kind: str, layer: Layer) -> None:
        shape = self._traced.shapes[layer.inputs[0]]
        padding = _padding_name(layer, (shape[2], shape[3]))
        if not padding:
            raise UnsupportedModelError(
                f"a pooling with padding {layer.padding} around {shape[2]} x {shape[3]}, which is "
                "not TensorFlow's SAME",
                where=layer.source or layer.output,
            )
        self._operator(
            kind, layer, padding=padding,
            stride_h=layer.stride[0], stride_w=layer.stride[1], filter_h=layer.kernel[0],
            filter_w=layer.kernel[1], activation=layer.activation,
        )  # fmt: skip

    def _average_pool(self, layer: Layer) -> None:
        self._pool("average_pool_2d", layer)

    def _max_pool(self, layer: Layer) -> None:
        self._pool("max_pool_2d", layer)

    def _softmax(self, layer: Layer) -> None:
        self._operator("softmax", layer, beta=1.0)

    def _reshape(self, layer: Layer) -> None:
        """Left out: fully connected layers take any shape of their size."""
        given, to = layer.inputs[0], layer.output
        shape = self._traced.shapes[given]
        readers = [one for one in self._traced.layers if to in one.inputs]
        alone = to not in self._traced.outputs and all(one.kind == "linear" for one in readers)
        if len(shape) == 4 and shape[2] * shape[3] > 1:
            if not alone:
                raise UnsupportedModelError(
                    "a flattened image is read by something else than a linear layer",
                    where=layer.source or to,
                )
            self._flattened[to] = (shape[1], shape[2], shape[3])
        elif given in self._flattened:
            self._flattened[to] = self._flattened[given]
        if alone:
            self._index[to] = self._index[given]
            return
        shape = self._traced.shapes[to]
        if len(shape) == 4:
            if math.prod(shape[2:]) > 1:
                raise UnsupportedModelError(
                    f"a reshape to the image {list(shape)}", where=layer.source or to
                )
            shape = (shape[0], 1, 1, shape[1])
        wanted = np.array(shape, np.int32)
        self._operator("reshape", layer, (self._constant(f"{to}.shape", wanted),))


def _padding_name(layer: Layer, image: tuple[int, int]) -> str:
    """``same`` or ``valid``; empty where it is neither."""
    if not any(layer.padding):
        return "valid"
    for side in (0, 1):
        before, after = layer.padding[2 * side : 2 * side + 2]
        reach = (layer.kernel[side] - 1) * layer.dilation[side] + 1
        size, stride = image[side], layer.stride[side]
        out = (size + before + after - reach) // stride + 1
        total = max((out - 1) * stride + reach - size, 0)
        # What lies behind the last window is never read.
        if out != -(-size // stride) or before != total // 2:
            return ""
    return "same"
