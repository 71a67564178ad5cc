"""Micro-benchmark of ``slipstream::lowbit``: a whole layer, including Python overhead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from slipstream.graph import Call
from slipstream.native import build

OP = "slipstream::lowbit"


def layer_call(
    wbits: int,
    abits: int,
    image: tuple[int, int, int, int],
    n: int,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    reads: str = "floats",
    writes: str = "floats",
    depthwise: bool = False,
) -> Call:
    """Return the call to time a layer, for `slipstream.durations`.

    Args:
        image: images, height, width, channels of the input. A linear layer with m rows of k values
            is an image of 1 x m pixels with k channels.
        n: number of output channels.
        reads, writes: forms of input and output, values of `cost.Form`.
        depthwise: whether each output channel reads only its input channel.
    """
    return _call(wbits, abits, image, n, kernel, stride, padding, reads, writes, depthwise)


def pool_call(
    image: tuple[int, int, int, int], window: tuple[tuple[int, ...], ...], up: bool
) -> Call:
    """Return the call to time max pooling of codes.

    Args:
        image: images, height, width, channels.
        window: kernel, stride, padding, dilation.
        up: whether sizes are rounded up.
    """
    return _call("pool", image, window, up)


def concat_call(pixels: tuple[int, int, int], channels: tuple[int, ...]) -> Call:
    """Return the call to time a concatenation of codes along channels.

    Args:
        pixels: images, height, width.
        channels: channels of each operand.
    """
    return _call("concat", pixels, channels)


def _call(*arguments: object) -> Call:
    # The build of the kernels, whose timings do not apply to others.
    return Call(f"{OP}({build()[:12] or 'python'})", arguments)


def torch_layer_call(
    image: tuple[int, ...],
    weight: tuple[int, ...],
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int], int] | None = None,
    floats: bool = False,
) -> Call:
    """Return the call to time a layer with a ReLU in torch's int8.

    Args:
        image: shape of the input: (images, channels, height, width), or (rows, k).
        weight: shape of the weight.
        window: stride, padding, dilation and groups of a convolution; None for a linear layer,
            quantised dynamically from floats to floats.
        floats: whether the input is channels-first floats, whose quantisation is included.
    """
    return Call(f"{OP}()", ("torch int8", image, weight, window, floats))


def torch_sum_call(shape: tuple[int, ...]) -> Call:
    """Return the call to time the sum of two images with a ReLU in torch's int8."""
    return Call(f"{OP}()", ("torch int8 sum", shape))


def torch_pool_call(shape: tuple[int, ...], window: tuple[tuple[int, ...], ...], up: bool) -> Call:
    """Return the call to time max pooling in torch's int8, see `pool_call`."""
    return Call(f"{OP}()", ("torch int8 pool", shape, window, up))


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the call on random values."""
    others: dict[Any, Callable[..., Callable[[], object]]] = {
        "rounding": _rounding,
        "pool": _pool,
        "concat": _concat,
        "torch int8": _torch_layer,
        "torch int8 sum": _torch_sum,
        "torch int8 pool": _torch_pool,
    }
    if (other := others.get(call.arguments[0])) is not None:
        return other(*call.arguments[1:])
    from slipstream.techniques.lowbit.coded import CodedTensor
    from slipstream.techniques.lowbit.convolve import quantise
    from slipstream.techniques.lowbit.layer import AfterSum
    from slipstream.techniques.lowbit.nn import low_bit_class

    wbits, abits = call.arguments[:2]
    reads, writes = call.arguments[7:9]
    module, x = float_layer(call)
    layer = (
        low_bit_class(module).from_float(module, wbits, abits, (0.0, 1.0), least_error=False).eval()
    )
    layer.expect_rows(layer(x).numel() // len(layer.scale))
    if reads == "codes":
        x = CodedTensor(quantise(x, layer.input_codes)[0], layer.input_codes)
    elif reads == "planes":
        x = x.contiguous()
    if writes == "codes":
        layer.output_codes = layer.input_codes
    if writes not in ("sum", "sum of floats"):
        return lambda: layer(x)
    addend = layer(x).clone()
    layer.after_sum = AfterSum(True, layer.input_codes if writes == "sum" else None)
    return lambda: layer(x) + addend


def _codes(*shape: int) -> Any:
    """Return random codes of NHWC images as a tensor NCHW."""
    import torch

    from slipstream.techniques.lowbit.coded import CodedTensor
    from slipstream.techniques.lowbit.convolve import Codes

    image = torch.randint(0, 8, shape, dtype=torch.uint8)
    return CodedTensor(image.permute(0, 3, 1, 2), Codes(3, 1.0))


def _pool(image: Any, window: Any, up: bool) -> Callable[[], object]:
    return _max_pooling(_codes(*image), window, up)


def _torch_pool(shape: Any, window: Any, up: bool) -> Callable[[], object]:
    return _max_pooling(_torch_codes(shape), window, up)


def _max_pooling(x: Any, window: Any, up: bool) -> Callable[[], object]:
    from torch.nn import functional

    kernel, stride, padding, dilation = (tuple(size) for size in window)
    return lambda: functional.max_pool2d(x, kernel, stride, padding, dilation, up)


def _concat(pixels: Any, channels: Any) -> Callable[[], object]:
    import torch

    parts = [_codes(*pixels, count) for count in channels]
    return lambda: torch.cat(parts, 1)


def _torch_layer(image: Any, weight: Any, window: Any, floats: bool) -> Callable[[], object]:
    import torch

    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # Deprecated in favour of a package that is not a dependency.
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "x86"
        try:
            return _torch_int8(image, weight, window, floats)
        finally:
            torch.backends.quantized.engine = engine


def _torch_int8(image: Any, weight: Any, window: Any, floats: bool) -> Callable[[], object]:
    import torch
    from torch.ao.nn import intrinsic, quantized

    outputs = weight[0]
    values = torch.randn(tuple(weight))
    if window is None:
        packed: Any = quantized.dynamic.Linear(weight[1], outputs)
        coded = torch.quantize_per_tensor(values, 0.02, 0, torch.qint8)
        packed.set_weight_bias(coded, torch.zeros(outputs))
        rows = torch.rand(tuple(image))
        return lambda: packed(rows)
    stride, padding, dilation, groups = window
    layer: Any = intrinsic.quantized.ConvReLU2d(
        weight[1] * groups, outputs, tuple(weight[2:]), tuple(stride), tuple(padding),
        tuple(dilation), groups,
    )  # fmt: skip
    grid = torch.full((outputs,), 0.02), torch.zeros(outputs, dtype=torch.int64)
    layer.set_weight_bias(
        torch.quantize_per_channel(values, *grid, 0, torch.qint8), torch.zeros(outputs)
    )
    x = torch.rand(tuple(image))
    if floats:
        return lambda: layer(torch.quantize_per_tensor(x, 1 / 255, 0, torch.quint8))
    codes = _torch_codes(image)
    return lambda: layer(codes)


def _torch_codes(shape: Any) -> Any:
    import torch

    x = torch.quantize_per_tensor(torch.rand(tuple(shape)), 1 / 255, 0, torch.quint8)
    return x.contiguous(memory_format=torch.channels_last)


def _torch_sum(shape: Any) -> Callable[[], object]:
    import torch

    left, right = _torch_codes(shape), _torch_codes(shape)
    return lambda: torch.ops.quantized.add_relu(left, right, 2 / 255, 0)


def float_layer(call: Call) -> tuple[Any, Any]:
    """Return the float layer of a call, and a channels-last input."""
    import torch
    from torch import nn

    image, n, kernel, stride, padding = call.arguments[2:7]
    depthwise = call.arguments[9]
    images, height, width, channels = image
    if tuple(kernel) == (1, 1) and tuple(stride) == (1, 1) and height == 1 and not depthwise:
        return nn.Linear(channels, n).eval(), torch.rand(images * width, channels)
    module = nn.Conv2d(
        channels, n, tuple(kernel), tuple(stride), tuple(padding), groups=n if depthwise else 1
    ).eval()
    x = torch.rand(images, channels, height, width)
    return module, x.to(memory_format=torch.channels_last)


def rounding_call(values: int, channels: int) -> Call:
    """Return the call to time fake quantisation, forward and backward, with a scale per channel."""
    return Call(f"{OP}()", ("rounding", values, channels))


def _rounding(values: int, channels: int) -> Callable[[], object]:
    import torch

    from slipstream.quant import FakeQuantize, Format, Granularity, grid_of_weights

    x = torch.randn(channels, values // channels, requires_grad=True)
    granularity = Granularity.of("tensor" if channels == 1 else "channel")
    fake = FakeQuantize(grid_of_weights(x, Format(3, signed=True), granularity))
    gradient = torch.ones_like(x)

    def work() -> None:
        with torch.enable_grad():
            fake(x).backward(gradient)

    return work
