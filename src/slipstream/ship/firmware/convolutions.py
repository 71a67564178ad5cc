"""Lower convolutions to steps.

Zero points are folded into biases, scales become integers, and weights take the order that a
processor multiplies fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.ship.firmware.arithmetic import fixed_multiplier
from slipstream.ship.firmware.call import (
    Call,
    Image,
    Pair,
    Window,
    quantization,
    row_distance,
    window,
)
from slipstream.ship.firmware.network import Array
from slipstream.ship.firmware.program import KernelCall

# Limits of the short form of rescaling, and the offset that marks the long form: see
# `slip_narrow` and `slip_to_int8` in kernels/slip_micro.h.
_MAX_SUM = 2**30
_NARROW_SHIFTS = (2, 31)
_WIDE = 64
# Up to this many, copying a channel's rows costs more than it saves; measured on a Cortex-M4.
_MAX_SLOW_PIXELS = 25
_POINT = Window((1, 1), (1, 1), (1, 1), (0, 0))


def conv_2d(call: Call) -> KernelCall:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    weights, scales = call.weights(1, 0)
    if weights.ndim != 4 or weights.shape[0] != channels or weights.shape[3] != image[2]:
        raise call.refuse(f"with weights of shape {list(weights.shape)} on {image[2]} channels")
    over = window(call, image, (out_h, out_w), weights.shape[1:3])
    sums = _sums(call, weights.reshape(channels, -1), scales)
    return _convolution(call, sums, image, (out_h, out_w), over)


def transpose_conv(call: Call) -> KernelCall:
    """Lower TRANSPOSE_CONV; the window is that of the convolution it transposes."""
    image, out = call.image(call.activation(2)), call.image(call.output)
    weights, scales = call.weights(1, 0)
    if weights.ndim != 4 or weights.shape[0] != out[2] or weights.shape[3] != image[2]:
        raise call.refuse(f"with weights of shape {list(weights.shape)} on {image[2]} channels")
    stride = call.option("stride_h"), call.option("stride_w")
    kernel = weights.shape[1:3]
    top, left = (
        call.padding(out[side], kernel[side], stride[side], 1, image[side]) for side in (0, 1)
    )
    if max(*kernel, *stride, top, left) > 255 or max(*image, *out) > 65535:
        raise call.refuse("of a size that needs more than 16 bits")
    source, target = quantization(call.activation(2)), quantization(call.output)
    bias = call.bias(3, out[2])
    largest = abs(bias) + abs(weights.astype(np.int64)).reshape(out[2], -1).sum(1) * 255
    factors = float(source.scale) * scales.astype(np.float64) / float(target.scale)
    pairs = np.array([fixed_multiplier(float(factor)) for factor in factors], np.int64)
    if (largest << np.maximum(pairs[:, 1], 0) >= 2**31).any():
        raise call.refuse("because its sums could overflow 32 bits")
    low, high = call.limits()
    rescale = np.stack([pairs[:, 0], -pairs[:, 1] - _WIDE], 1).reshape(-1)
    return call.step(
        kernel="slip_transpose_conv", struct="slip_transpose", sources=("transpose_conv.c",),
        numbers={
            "in_h": image[0], "in_w": image[1], "in_c": image[2], "out_h": out[0],
            "out_w": out[1], "out_c": out[2], "kernel_h": kernel[0], "kernel_w": kernel[1],
            "stride_h": stride[0], "stride_w": stride[1], "pad_top": top, "pad_left": left,
            "in_zero": source.zero_point, "out_zero": target.zero_point, "low": low, "high": high,
        },
        tables={
            "weights": weights.reshape(-1), "bias": bias.astype(np.int32),
            "rescale": rescale.astype(np.int32),
        },
        inputs=(call.index(2),), distances=(None,),
        macs=image[0] * image[1] * weights.size,
    )  # fmt: skip


def fully_connected(call: Call) -> KernelCall:
    """Lower FULLY_CONNECTED to a 1 x 1 convolution."""
    weights, scales = call.weights(1, 0)
    source, target = call.activation(0), call.output
    if call.option("weights_format") or weights.ndim != 2 or source.size % weights.shape[1]:
        raise call.refuse("with weights in another order")
    channels, depth = weights.shape
    rows = source.size // depth
    if target.size != rows * channels or max(rows, channels, depth) > 65535:
        raise call.refuse(f"with output shape {list(target.shape)}")
    sums = _sums(call, weights, scales)
    return _convolution(call, sums, (rows, 1, depth), (rows, 1), _POINT)


def depthwise(call: Call) -> KernelCall:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    weights, scales = call.weights(1, 3)
    if weights.ndim != 4 or weights.shape[0] != 1 or weights.shape[3] != channels:
        raise call.refuse(f"with weights of shape {list(weights.shape)}")
    if channels % image[2]:
        raise call.refuse(f"from {image[2]} to {channels} channels")
    out = out_h, out_w
    over = window(call, image, out, weights.shape[1:3])
    sums = _sums(call, weights.reshape(-1, channels).T, scales)
    if image[2] == 1:
        # With one input channel it is a convolution, which shares its reads between outputs.
        return _convolution(call, sums, image, out, over)
    taps, stride = sums.weights.shape[1], over.stride
    alone = channels == image[2]
    fast = over.kernel == (3, 3) and stride in ((1, 1), (2, 2)) and over.dilation == (1, 1)
    fast = fast and alone and not call.vectors and out_h * out_w > _MAX_SLOW_PIXELS
    if fast:
        # Four rows of 16-bit numbers and one of sums: see kernels/depthwise.c.
        pitch = ((-(-out_w // 2) * 2 - 1) * stride[1] + 4) // 2 * 2
        scratch = 8 * pitch + 4 * (-(-out_w // 2) * 2)
    else:
        # A pointer per tap and a row of zero points: see kernels/depthwise_any.c.
        scratch = 4 * taps + channels if alone else 0
    distance = None if fast else row_distance(image, out, channels, stride[0], over.padding[0])
    padded = -(-channels // 16) * 16 if call.vectors else channels
    return call.step(
        kernel="slip_depthwise_2d" if fast else "slip_depthwise_any", struct="slip_depthwise",
        sources=("depthwise.c",) if fast else ("depthwise_any.c",),
        numbers={
            "in_h": image[0], "in_w": image[1], "channels": image[2], "out_h": out_h,
            "out_w": out_w, "multiplier": channels // image[2],
            **over.numbers("kernel", "stride", "dilation"), **sums.numbers(call),
        },
        tables={"weights": weights.reshape(-1), **sums.tables(padded)},
        scratch=scratch, distances=(distance,), in_place=fast, macs=out_h * out_w * channels * taps,
    )  # fmt: skip


@dataclass(frozen=True)
class _Sums:
    """Parameters that turn sums of products into codes.

    Attributes:
        weights: int8 [channels, products].
        bias: int64 [channels], the input's zero point folded in.
        rescale: int32 [2 * channels]: see `slip_to_int8`.
        narrow: whether all channels can take the short form.
        limits: smallest and largest code.
    """

    weights: Array
    bias: Array
    rescale: Array
    narrow: bool
    limits: Pair

    def tables(self, channels: int) -> dict[str, Array]:
        """Return bias and rescale, padded to `channels`."""
        return {
            "bias": _padded(self.bias, channels), "rescale": _padded(self.rescale, 2 * channels),
        }  # fmt: skip

    def numbers(self, call: Call) -> dict[str, int]:
        return {
            "in_zero": quantization(call.activation(0)).zero_point,
            "out_zero": quantization(call.output).zero_point,
            "low": self.limits[0], "high": self.limits[1], "narrow": int(self.narrow),
        }  # fmt: skip


def _sums(call: Call, weights: Array, scales: Array) -> _Sums:
    source, target = quantization(call.activation(0)), quantization(call.output)
    wide = weights.astype(np.int64)
    products = abs(wide).sum(1) * 255
    bias = call.bias(2, len(weights)) - source.zero_point * wide.sum(1)
    if (abs(bias) + products >= 2**31).any():
        raise call.refuse("because its sums could overflow 32 bits")
    limits = call.limits()
    factors = float(source.scale) * scales.astype(np.float64) / float(target.scale)
    return _Sums(weights, bias, *_rescales(call, factors, abs(bias) + products, limits), limits)


def _rescales(call: Call, factors: Array, sums: Array, limits: Pair) -> tuple[Array, bool]:
    """Return `rescale` and whether all channels can take the short form.

    Factors are float64 [channels]; sums int64 [channels], upper bounds.
    """
    pairs = np.array([fixed_multiplier(float(factor)) for factor in factors], np.int64)
    multipliers, shifts = pairs[:, 0], -pairs[:, 1]
    if (sums << np.maximum(-shifts, 0) >= 2**31).any():
        raise call.refuse("because its sums could overflow 32 bits")
    low, high = _NARROW_SHIFTS
    short = (low <= shifts) & (shifts <= high) & (sums < _MAX_SUM) & (limits == (-128, 127))
    seconds = np.where(short, 1 << np.clip(32 - shifts, 0, 32), shifts - _WIDE)
    narrow = bool(short.all())
    if call.vectors and not narrow:
        seconds = shifts - _WIDE
    return np.stack([multipliers, seconds], 1).astype(np.int32).reshape(-1), narrow


def pack_pairs(weights: Array) -> Array:
    """Return weights [channels, depth] in the order of `slip_conv_2d`: int8, one dimension.

    Both sizes are multiples of four. Channels come in groups of four; within a group, depths come
    in the order in which bytes are widened (0 and 2, then 1 and 3), and a word holds two depths of
    two channels, the first channel's in its even bytes.
    """
    channels, depth = weights.shape
    # [group, pair of channels, which of them, quad, which depth (low bit: pair), half]
    parts = weights.reshape(channels // 4, 2, 2, depth // 4, 2, 2)
    # Depth within a quad is half * 2 + pair: to [group, quad, pair, pair of channels, half, which].
    return np.ascontiguousarray(parts.transpose(0, 3, 5, 1, 4, 2)).reshape(-1)


def _convolution(call: Call, sums: _Sums, image: Image, out: Pair, over: Window) -> KernelCall:
    channels, depth = sums.weights.shape
    padded = -(-channels // 4) * 4
    deep = -(-depth // 4) * 4
    height, width, in_channels = image
    direct = over.kernel == (1, 1) and over.stride == (1, 1) and deep == in_channels
    if direct:
        # Blocks of two pixels are read before they are written, unlike a single last pixel.
        pixels = out[0] * out[1]
        distance = max(0, pixels * (channels - in_channels))
        if pixels % 2:
            distance = max(distance, pixels * channels - (pixels - 1) * in_channels)
    else:
        distance = row_distance(image, out, channels, over.stride[0], over.padding[0])
    kind = "conv_2d" if call.packed else "conv_plain"
    filled = np.zeros((padded, deep), np.int8)
    filled[:channels, :depth] = sums.weights
    return call.step(
        kernel=f"slip_{kind}", struct="slip_conv",
        sources=("conv.c" if call.packed else "conv_plain.c", "conv.h", "gather.c"),
        numbers={
            "in_h": height, "in_w": width, "in_c": in_channels, "out_h": out[0], "out_w": out[1],
            "out_c": channels, "depth": deep, **over.numbers("kernel", "stride", "dilation"),
            **sums.numbers(call),
        },
        tables={
            "weights": pack_pairs(filled) if call.packed else filled.reshape(-1),
            **sums.tables(padded),
        },
        scratch=_columns(out[0] * out[1], deep, direct, call.vectors), distances=(distance,),
        macs=out[0] * out[1] * channels * depth,
    )  # fmt: skip


def _columns(pixels: int, depth: int, direct: bool, vectors: bool) -> int:
    """Return scratch bytes: two pixels widened to 16 bits, and 8-bit pixels if they are gathered.

    For vectors, 16 depths of the two pixels alternate instead.
    """
    widened = 2 * (-(-depth // 16) * 16) if vectors else 4 * depth
    return (widened if pixels > 1 else 0) + (0 if direct else min(pixels, 2) * depth)


def _padded(values: Array, size: int) -> Array:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return padded
