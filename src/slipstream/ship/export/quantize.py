"""Quantize a PyTorch model to an int8 network with NHWC images.

Weights have a symmetric grid per output channel, with codes from -127 to 127; activations have one
grid for the range seen in calibration; pooling and reshapes keep the grid of their input; softmax
and sigmoid have scale 1/256 and zero point -128. Sources: Jacob et al., arXiv 1712.05877; the int8
specification of TensorFlow Lite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
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
from slipstream.ship.export.floats import FloatModel, FloatOperator, trace
from slipstream.ship.firmware.network import Array, Network, Operator, Quantization, Tensor

_INT8 = Format(8, signed=True)
_OBSERVERS: dict[str, Callable[[], Observer]] = {
    "minmax": MinMax,
    "percentile": Percentile,
    "mse": lambda: LeastError(_INT8),
}
# Kinds whose outputs have the grid of their input.
_SAME_GRID = ("average_pool", "max_pool", "reshape", "resize")
# Kinds whose outputs have scale 1/256 and zero point -128.
_FIXED_GRID = ("softmax", "logistic")
_MAX_INT32 = 2**31 - 1
_SCALE_BITS = 12


def quantize_model(
    model: torch.nn.Module, calibration: Iterable[torch.Tensor], *, name: str | None = None,
    observer: str = "percentile",
) -> Network:  # fmt: skip
    """Quantize a model in eval mode to int8.

    Args:
        model: a network of the layers that `export.floats` supports; its first dimension is the
            batch. NCHW inputs are NHWC in the network, sequences [N, C, L] are images [N, 1, L, C].
        calibration: batches of any size, as the model takes them.
        name: name of the network; by default that of the class.
        observer: ``minmax``, ``percentile`` (99.99 %) or ``mse``.

    Raises:
        UnsupportedModelError: the model uses unsupported operators.
        InvalidArgumentError: calibration is empty or not finite.
    """
    traced, grids = calibrated(model, calibration, observer=observer)
    return network_of(traced, grids, name or type(model).__name__)


def calibrated(
    model: torch.nn.Module, calibration: Iterable[torch.Tensor], *, observer: str = "percentile"
) -> tuple[FloatModel, dict[str, Quantization]]:
    """Return the float layers of a model and the grids of their values; see `quantize_model`."""
    if observer not in _OBSERVERS:
        raise UnknownNameError("observer", observer, _OBSERVERS)
    batches = [torch.as_tensor(batch).float() for batch in calibration]
    if not batches or not all(len(batch) for batch in batches):
        raise InvalidArgumentError(
            "calibration", "is empty", remedy="pass some inputs of the model"
        )
    if not all(batch.isfinite().all() for batch in batches):
        raise InvalidArgumentError("calibration", "holds NaN or infinity")
    traced = trace(model, batches[0][:1])
    if len(traced.inputs) != 1:
        raise UnsupportedModelError(
            f"the model has {len(traced.inputs)} inputs; only one is supported"
        )
    return traced, _grids(traced, batches, _OBSERVERS[observer])


def network_of(traced: FloatModel, grids: Mapping[str, Quantization], name: str) -> Network:
    """Return the int8 network of float layers whose values have these grids.

    Outputs of pooling and reshapes have the grid of their input.
    """
    of_values = dict(grids)
    for layer in traced.layers:
        if layer.kind in _SAME_GRID:
            of_values[layer.output] = of_values[layer.inputs[0]]
    return _Builder(traced, of_values, name).network()


def _grids(
    traced: FloatModel, batches: list[torch.Tensor], observer: Callable[[], Observer]
) -> dict[str, Quantization]:
    names = {traced.inputs[0], *(layer.output for layer in traced.layers)}
    observers = {name: observer() for name in names}
    # The graph is traced for a batch of 1.
    for sample in (sample for batch in batches for sample in batch.split(1)):
        values = traced.run(sample)
        for name, value_observer in observers.items():
            value_observer.observe(values[name])
    grids = {name: _grid_of(*seen.range()) for name, seen in observers.items()}
    _join(traced, observers, grids)
    for layer in traced.layers:
        if layer.kind in _SAME_GRID:
            grids[layer.output] = grids[layer.inputs[0]]
        elif layer.kind in _FIXED_GRID:
            grids[layer.output] = _quantization(1 / 256, -128)
    return grids


def _join(
    traced: FloatModel, observers: dict[str, Observer], grids: dict[str, Quantization]
) -> None:
    """Give concatenated values, and values sharing their grid, the grid of their widest range."""
    groups = {name: {name} for name in grids}
    for layer in traced.layers:
        if layer.kind == "concat" or layer.kind in _SAME_GRID:
            merged = set[str]().union(*(groups[name] for name in (layer.output, *layer.inputs)))
            groups |= dict.fromkeys(merged, merged)
    fixed = {layer.output for layer in traced.layers if layer.kind in _FIXED_GRID}
    for layer in traced.layers:
        if layer.kind == "concat":
            group = groups[layer.output]
            if group & fixed:
                raise UnsupportedModelError(
                    "softmax and sigmoid outputs have a fixed scale and cannot be concatenated",
                    where=layer.source or layer.output,
                )
            ranges = [observers[name].range() for name in group]
            low = torch.stack([limits[0] for limits in ranges]).min()
            high = torch.stack([limits[1] for limits in ranges]).max()
            grids |= dict.fromkeys(group, _grid_of(low, high))


def _grid_of(low: torch.Tensor, high: torch.Tensor) -> Quantization:
    grid = grid_of_range(low, high, _INT8)
    return _quantization(float(_rounded_up(grid.scale)), int(grid.zero))


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round scales up to 12 significant bits, so that nothing more is clipped.

    Products of two such scales are exact in float32. Runtimes multiply scales of fully connected
    layers in 32 or 64 bits; with these, both give the same bytes.
    """
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ceil(mantissa * 2**_SCALE_BITS), exponent - _SCALE_BITS)


def _quantization(scale: float, zero: int) -> Quantization:
    return Quantization(np.array([scale], np.float32), np.array([zero], np.int64))


class _Builder:
    """Convert layers to operators: reorder weights, name paddings, drop reshapes."""

    def __init__(self, traced: FloatModel, grids: dict[str, Quantization], name: str) -> None:
        self._traced, self._grids, self._name = traced, grids, name
        self._tensors: list[Tensor] = []
        self._operators: list[Operator] = []
        self._index: dict[str, int] = {}
        # Channels, height and width of flattened images, by value name.
        self._flattened: dict[str, tuple[int, int, int]] = {}

    def network(self) -> Network:
        traced = self._traced
        inputs = tuple(self._value(name) for name in traced.inputs)
        for layer in traced.layers:
            getattr(self, f"_{layer.kind}")(layer)
        outputs = tuple(self._index[name] for name in traced.outputs)
        return Network(self._name, tuple(self._tensors), tuple(self._operators), inputs, outputs)

    def _value(self, name: str) -> int:
        """Add the tensor of a value; images become NHWC."""
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
        self, kind: str, layer: FloatOperator, constants: tuple[int, ...] = (), **options: Any
    ) -> None:
        inputs = tuple(self._index[name] for name in layer.inputs)
        output = self._value(layer.output)
        operator = Operator(kind, (*inputs, *constants), (output,), options, layer.source)
        self._operators.append(operator)

    def _weights(self, layer: FloatOperator, weight: torch.Tensor, axis: int) -> tuple[int, int]:
        """Add weights, stored with channels along `axis`, and int32 bias; return their indices."""
        grid = grid_of_weights(weight, _INT8, Granularity(axis=0))
        grid = replace(grid, scale=_rounded_up(grid.scale))
        codes = quantize(weight, grid).numpy().astype(np.int8)
        scales = grid.scale.numpy().astype(np.float32)
        moved = np.ascontiguousarray(np.moveaxis(codes, 0, axis))
        zeros = np.zeros(len(scales), np.int64)
        name = layer.source or layer.output
        weights = self._constant(f"{name}.weight", moved, Quantization(scales, zeros, axis))
        bias_scales = (self._grids[layer.inputs[0]].scale * scales).astype(np.float32)
        real = np.zeros(len(scales)) if layer.bias is None else layer.bias.double().numpy()
        rounded = np.round(real / bias_scales.astype(np.float64))
        clipped = np.clip(rounded, -_MAX_INT32, _MAX_INT32)
        if (clipped != rounded).any():
            warnings.warn(
                f"the bias of {name} exceeds 32 bits and is clipped",
                SlipstreamWarning, stacklevel=2,
            )  # fmt: skip
        quantization = Quantization(bias_scales, zeros, 0)
        return weights, self._constant(f"{name}.bias", clipped.astype(np.int32), quantization)

    def _conv(self, layer: FloatOperator) -> None:
        assert layer.weight is not None  # set by the tracer
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
        # Depthwise: [out, h, w, 1] to [1, h, w, out].
        multiplier = weight.shape[0] // layer.groups
        weights = self._weights(layer, weight.squeeze(3), 2)
        stored = self._tensors[weights[0]]
        assert stored.data is not None and stored.quantization is not None  # noqa: PT018
        grid = Quantization(stored.quantization.scales, stored.quantization.zero_points, 3)
        data = stored.data[None]
        self._tensors[weights[0]] = Tensor(stored.name, data.shape, "int8", grid, data)
        self._operator("depthwise_conv_2d", layer, weights, multiplier=multiplier, **options)

    def _padded(self, layer: FloatOperator) -> tuple[FloatOperator, str]:
        """Return a convolution and its padding's name, after adding a PAD if it has none.

        Our firmware folds the PAD into the convolution.
        """
        source = layer.inputs[0]
        shape = self._traced.shapes[source]
        name = _padding_name(layer, (shape[2], shape[3]))
        if name:
            return layer, name
        top, bottom, left, right = layer.padding
        sides = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        padded = f"{layer.output}.padded"
        high, wide = shape[2] + top + bottom, shape[3] + left + right
        self._traced.shapes[padded] = (shape[0], shape[1], high, wide)
        self._grids[padded] = self._grids[source]
        paddings = self._constant(f"{padded}.sides", sides)
        self._operator("pad", replace(layer, output=padded), (paddings,))
        return replace(layer, inputs=(padded,)), "valid"

    def _linear(self, layer: FloatOperator) -> None:
        assert layer.weight is not None  # set by the tracer
        weight = layer.weight
        image = self._flattened.get(layer.inputs[0])
        if image is not None:
            # Columns are in NCHW order; memory is NHWC.
            weight = weight.reshape(-1, *image).permute(0, 2, 3, 1).reshape(weight.shape)
        self._operator(
            "fully_connected", layer, self._weights(layer, weight, 0), activation=layer.activation,
            weights_format=0,
        )  # fmt: skip

    def _add(self, layer: FloatOperator) -> None:
        self._operator(layer.kind, layer, activation=layer.activation)

    _mul = _add

    def _concat(self, layer: FloatOperator) -> None:
        # Channels are last.
        axis = len(self._traced.shapes[layer.output]) - 1
        self._operator("concatenation", layer, axis=axis, activation="none")

    def _transpose(self, layer: FloatOperator) -> None:
        assert layer.weight is not None  # set by the tracer
        weight = layer.weight.permute(0, 2, 3, 1)
        valid = not any(layer.padding)
        shape = self._traced.shapes[layer.output]
        output_shape = np.array([1, shape[2], shape[3], shape[1]], np.int32)
        constants = self._weights(layer, weight, 0)
        size = self._constant(f"{layer.output}.shape", output_shape)
        source = self._index[layer.inputs[0]]
        options = {
            "padding": "valid" if valid else "same", "stride_h": layer.stride[0],
            "stride_w": layer.stride[1], "activation": layer.activation,
        }  # fmt: skip
        output = self._value(layer.output)
        inputs = (size, constants[0], source, constants[1])
        self._operators.append(Operator("transpose_conv", inputs, (output,), options, layer.source))

    def _resize(self, layer: FloatOperator) -> None:
        shape = self._traced.shapes[layer.output]
        size = self._constant(f"{layer.output}.shape", np.array(shape[2:], np.int32))
        self._operator("resize_nearest_neighbor", layer, (size,), half_pixel_centers=0)

    def _mean(self, layer: FloatOperator) -> None:
        axes = self._constant(f"{layer.output}.axes", np.array([1, 2], np.int32))
        keep = len(self._traced.shapes[layer.output]) == 4
        self._operator("mean", layer, (axes,), keep_dims=int(keep))

    def _logistic(self, layer: FloatOperator) -> None:
        self._operator(layer.kind, layer)

    _hard_swish = _logistic

    def _leaky_relu(self, layer: FloatOperator) -> None:
        self._operator("leaky_relu", layer, alpha=layer.alpha)

    def _average_pool(self, layer: FloatOperator) -> None:
        shape = self._traced.shapes[layer.inputs[0]]
        padding = _padding_name(layer, (shape[2], shape[3]))
        if not padding:
            raise UnsupportedModelError(
                f"pooling with padding {layer.padding} around {shape[2]} x {shape[3]} is "
                "not TensorFlow's SAME",
                where=layer.source or layer.output,
            )
        self._operator(
            f"{layer.kind}_2d", layer, padding=padding,
            stride_h=layer.stride[0], stride_w=layer.stride[1], filter_h=layer.kernel[0],
            filter_w=layer.kernel[1], activation=layer.activation,
        )  # fmt: skip

    _max_pool = _average_pool

    def _softmax(self, layer: FloatOperator) -> None:
        self._operator("softmax", layer, beta=1.0)

    def _reshape(self, layer: FloatOperator) -> None:
        """Skip a reshape that only linear layers read; they take any shape of that size."""
        source, target = layer.inputs[0], layer.output
        shape = self._traced.shapes[source]
        readers = [reader for reader in self._traced.layers if target in reader.inputs]
        skipped = target not in self._traced.outputs and all(r.kind == "linear" for r in readers)
        if len(shape) == 4 and shape[2] * shape[3] > 1:
            if not skipped:
                raise UnsupportedModelError(
                    "only linear layers can read a flattened image",
                    where=layer.source or target,
                )
            self._flattened[target] = (shape[1], shape[2], shape[3])
        elif source in self._flattened:
            self._flattened[target] = self._flattened[source]
        if skipped:
            self._index[target] = self._index[source]
            return
        shape = self._traced.shapes[target]
        if len(shape) == 4:
            if math.prod(shape[2:]) > 1:
                raise UnsupportedModelError(
                    f"reshaping to an image, {list(shape)}, is not supported",
                    where=layer.source or target,
                )
            shape = (shape[0], 1, 1, shape[1])
        sizes = np.array(shape, np.int32)
        self._operator("reshape", layer, (self._constant(f"{target}.shape", sizes),))


def _padding_name(layer: FloatOperator, image: tuple[int, int]) -> str:
    """Return ``same`` or ``valid``; empty if it is neither."""
    if not any(layer.padding):
        return "valid"
    for side in (0, 1):
        before, after = layer.padding[2 * side : 2 * side + 2]
        reach = (layer.kernel[side] - 1) * layer.dilation[side] + 1
        size, stride = image[side], layer.stride[side]
        out = (size + before + after - reach) // stride + 1
        total = max((out - 1) * stride + reach - size, 0)
        # Padding after the last window is never read.
        if out != -(-size // stride) or before != total // 2:
            return ""
    return "same"
