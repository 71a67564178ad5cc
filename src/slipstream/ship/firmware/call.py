"""An operator with checked accessors to its tensors, the argument of lowerings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.firmware.network import Array, Network, Operator, Quantization, Tensor
from slipstream.ship.firmware.program import KernelCall

Pair = tuple[int, int]
"""(height, width)."""
Image = tuple[int, int, int]
"""(height, width, channels)."""


@dataclass(frozen=True)
class Pad:
    """Padding of `tensor` at the start and the end, each (height, width)."""

    tensor: int
    before: Pair = (0, 0)
    after: Pair = (0, 0)


@dataclass(frozen=True)
class Call:
    """An operator with checked accessors to its tensors."""

    network: Network
    number: int
    operator: Operator
    packed: bool
    vectors: bool
    pads: Mapping[int, Pad]

    def refuse(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.operator.kind.upper()} {why}")

    def option(self, name: str) -> int:
        return int(self.operator.options[name])

    def index(self, place: int) -> int:
        inputs = self.operator.inputs
        if place >= len(inputs) or inputs[place] < 0:
            raise self.refuse(f"without input {place}")
        pad = self.pads.get(inputs[place])
        return inputs[place] if pad is None else pad.tensor

    @property
    def pad(self) -> Pad:
        """Explicit padding of the first input."""
        return self.pads.get(self.operator.inputs[0], Pad(self.operator.inputs[0]))

    def activation(self, place: int) -> Tensor:
        """Return a computed int8 tensor with one scale."""
        return self._int8(self.network.tensors[self.index(place)])

    @property
    def output(self) -> Tensor:
        return self._int8(self.network.tensors[self.operator.outputs[0]])

    def _int8(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != "int8":
            raise self.refuse(f"of {tensor.dtype}")
        if tensor.quantization is None or len(tensor.quantization.scales) != 1:
            raise self.refuse("without a scale for its activations")
        scale, zero = tensor.quantization.scale, tensor.quantization.zero_point
        if scale == 0 or not -128 <= zero <= 127:
            raise self.refuse(f"with scale {scale:g} and zero point {zero}")
        if tensor.data is not None:
            raise self.refuse("with a constant instead of an activation")
        return tensor

    def image(self, tensor: Tensor) -> Image:
        if len(tensor.shape) != 4 or tensor.shape[0] != 1:
            raise self.refuse(
                f"with shape {list(tensor.shape)}; NHWC with a batch of 1 is required"
            )
        return tensor.shape[1], tensor.shape[2], tensor.shape[3]

    def weights(self, place: int, axis: int) -> tuple[Array, Array]:
        """Return int8 weights, and a scale for each index along `axis`."""
        tensor = self.network.tensors[self.index(place)]
        if tensor.dtype != "int8" or tensor.data is None or tensor.quantization is None:
            raise self.refuse(f"with {tensor.dtype} weights, or weights that are not constant")
        grid = tensor.quantization
        if grid.zero_points.any():
            raise self.refuse("with weights that have a zero point")
        if len(grid.scales) not in (1, tensor.shape[axis]):
            raise self.refuse("with a number of scales that is not that of channels")
        return tensor.data, np.broadcast_to(grid.scales, tensor.shape[axis])

    def bias(self, place: int, channels: int) -> Array:
        if place >= len(self.operator.inputs) or self.operator.inputs[place] < 0:
            return np.zeros(channels, np.int64)
        tensor = self.network.tensors[self.operator.inputs[place]]
        if tensor.dtype != "int32" or tensor.data is None or tensor.size != channels:
            raise self.refuse(f"with a bias of {tensor.dtype}{list(tensor.shape)}")
        return tensor.data.reshape(-1).astype(np.int64)

    def padding(self, in_size: int, kernel: int, stride: int, dilation: int, out_size: int) -> int:
        """Return the padding before the first element of a convolution in one direction."""
        return _padding(self, in_size, kernel, stride, dilation, out_size)

    def limits(self) -> tuple[int, int]:
        """Return the smallest and largest code after the activation function."""
        output = quantization(self.output)
        kind = self.operator.options["activation"]
        if kind == "none":
            return -128, 127
        if kind not in ("relu", "relu6", "relu_n1_to_1"):
            raise self.refuse(f"with activation {kind}")

        def code(value: float) -> int:
            # In float32, rounded half away from zero, as in the format's own runtimes.
            # Clipped before rounding, because the quotient may be infinite.
            with np.errstate(over="ignore"):
                scaled = np.clip(np.float32(value) / output.scale, -512, 512)
            return output.zero_point + int(
                np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
            )

        low = code(-1.0) if kind == "relu_n1_to_1" else code(0.0)
        high = {"relu": 127, "relu6": code(6.0), "relu_n1_to_1": code(1.0)}[kind]
        return max(-128, low), min(127, high)

    def step(self, **parts: Any) -> KernelCall:
        defaults: dict[str, Any] = {
            "output": self.operator.outputs[0], "operator": self.number,
            "inputs": (self.index(0),),
        }  # fmt: skip
        return KernelCall(**(defaults | parts))


def quantization(tensor: Tensor) -> Quantization:
    assert tensor.quantization is not None  # checked by Call
    return tensor.quantization


@dataclass(frozen=True)
class Window:
    """Kernel, stride, dilation and padding of a convolution or pool."""

    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: Pair

    def numbers(self, *names: str) -> dict[str, int]:
        """Return the named fields of kernels' structs, in their order."""
        pairs = (getattr(self, name) for name in names)
        return {
            f"{name}_{side}": size
            for name, pair in zip(names, pairs, strict=True)
            for side, size in zip(("h", "w"), pair, strict=True)
        } | {"pad_top": self.padding[0], "pad_left": self.padding[1]}


def window(call: Call, image: Image, out: Pair, kernel: tuple[int, ...]) -> Window:
    """Return the window of a convolution or a pool, with the format's padding."""
    stride = call.option("stride_h"), call.option("stride_w")
    options = call.operator.options
    dilation = int(options.get("dilation_h", 1)), int(options.get("dilation_w", 1))
    pad = call.pad
    top, left = (
        pad.before[side]
        + _padding(
            call, image[side] + pad.before[side] + pad.after[side], kernel[side], stride[side],
            dilation[side], out[side],
        )
        for side in (0, 1)
    )  # fmt: skip
    if max(*kernel, *stride, *dilation, top, left) > 255 or max(*image, *out) > 65535:
        raise call.refuse("with a size that needs more than 16 bits")
    return Window((kernel[0], kernel[1]), stride, dilation, (top, left))


def _padding(
    call: Call, in_size: int, kernel: int, stride: int, dilation: int, out_size: int
) -> int:
    """Return the padding before the first element; an odd remainder goes to the end."""
    if stride < 1 or dilation < 1:
        raise call.refuse(f"with stride {stride} and dilation {dilation}")
    reach = (kernel - 1) * dilation + 1
    if call.operator.options["padding"] == "valid":
        expected, padding = (in_size - reach) // stride + 1, 0
    else:
        expected = -(-in_size // stride)
        padding = max((expected - 1) * stride + reach - in_size, 0) // 2
    if expected != out_size or expected < 1:
        raise call.refuse(f"with {out_size} rows or columns of output instead of {expected}")
    return padding


def row_distance(image: Image, out: Pair, channels: int, stride: int, padding: int) -> int:
    """Return by how many bytes an output written by rows may overtake an input read by rows."""
    height, width, depth = image
    largest = 0
    for row in range(out[0]):
        still_read = min(max(0, row * stride - padding), height) * width * depth
        largest = max(largest, (row + 1) * out[1] * channels - still_read)
    return largest
