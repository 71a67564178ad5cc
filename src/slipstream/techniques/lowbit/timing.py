"""What the micro-benchmark runs for ``slipstream::lowbit``: one whole layer, Python included."""

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
    gives: str = "floats",
    depthwise: bool = False,
) -> Call:
    """A layer: to be asked of `slipstream.durations`.

    Args:
        image: images, height, width, channels of the input. A linear layer with m rows of k values
            is one image of 1 x m pixels with k channels.
        n: output channels.
        reads, gives: what comes in and goes out: values of `slipstream.techniques.lowbit.Form`.
        depthwise: whether each of n channels sees itself alone.
    """
    return _call(wbits, abits, image, n, kernel, stride, padding, reads, gives, depthwise)


def pool_call(
    image: tuple[int, int, int, int], window: tuple[tuple[int, ...], ...], up: bool
) -> Call:
    """The greatest codes in windows: of an image as above, with kernel, stride, padding, dilation.

    Args:
        up: whether sizes are rounded up.
    """
    return _call("pool", image, window, up)


def concat_call(pixels: tuple[int, int, int], channels: tuple[int, ...]) -> Call:
    """Codes of images of so many pixels (images, height, width), channel behind channel."""
    return _call("concat", pixels, channels)


def _call(*arguments: object) -> Call:
    # Which build of the kernels answers are of: others are not asked what these take.
    return Call(f"{OP}({build()[:12] or 'python'})", arguments)


def torch_layer_call(
    image: tuple[int, ...],
    weight: tuple[int, ...],
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int], int] | None = None,
    floats: bool = False,
) -> Call:
    """A layer in torch's own int8, its ReLU with it.

    Args:
        image: of the input, as torch has it: (images, channels, height, width), or (rows, k).
        weight: likewise.
        window: stride, padding, dilation and groups of a convolution. A linear layer is as torch
            quantises it dynamically: from floats to floats.
        floats: whether the image comes as floats, channels first, and is rounded by it.
    """
    return Call(f"{OP}()", ("torch int8", image, weight, window, floats))


def torch_sum_call(shape: tuple[int, ...]) -> Call:
    """The sum of two images in torch's own int8, with a ReLU."""
    return Call(f"{OP}()", ("torch int8 sum", shape))


def torch_pool_call(shape: tuple[int, ...], window: tuple[tuple[int, ...], ...], up: bool) -> Call:
    """Maxima over windows, as `pool_call`, in torch's own int8."""
    return Call(f"{OP}()", ("torch int8 pool", shape, window, up))


def timer(call: Call) -> Callable[[], object]:
    """The layer, or the rounding, as a function of nothing, on random numbers."""
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
    reads, gives = call.arguments[7:9]
    module, x = float_layer(call)
    layer = (
        low_bit_class(module).from_float(module, wbits, abits, (0.0, 1.0), least_error=False).eval()
    )
    layer.expect_rows(layer(x).numel() // len(layer.scale))
    if reads == "codes":
        x = CodedTensor(quantise(x, layer.input_codes)[0], layer.input_codes)
    elif reads == "planes":
        x = x.contiguous()
    if gives == "codes":
        layer.output_codes = layer.input_codes
    if gives not in ("sum", "sum of floats"):
        return lambda: layer(x)
    beside = layer(x).clone()
    layer.after_sum = AfterSum(True, layer.input_codes if gives == "sum" else None)
    return lambda: layer(x) + beside


def _codes(*shape: int) -> Any:
    """Any codes of images NHWC, as a tensor NCHW."""
    import torch

    from slipstream.techniques.lowbit.coded import CodedTensor
    from slipstream.techniques.lowbit.convolve import Codes

    image = torch.randint(0, 8, shape, dtype=torch.uint8)
    return CodedTensor(image.permute(0, 3, 1, 2), Codes(3, 1.0))


def _pool(image: Any, window: Any, up: bool) -> Callable[[], object]:
    return _maxima(_codes(*image), window, up)


def _torch_pool(shape: Any, window: Any, up: bool) -> Callable[[], object]:
    return _maxima(_torch_codes(shape), window, up)


def _maxima(x: Any, window: Any, up: bool) -> Callable[[], object]:
    from torch.nn import functional

    kernel, stride, padding, dilation = (tuple(one) for one in window)
    return lambda: functional.max_pool2d(x, kernel, stride, padding, dilation, up)


def _concat(pixels: Any, channels: Any) -> Callable[[], object]:
    import torch

    parts = [_codes(*pixels, count) for count in channels]
    return lambda: torch.cat(parts, 1)


def _torch_layer(image: Any, weight: Any, window: Any, floats: bool) -> Callable[[], object]:
    import torch

    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # It is deprecated in favour of a package that is not a dependency of ours.
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

    one, other = _torch_codes(shape), _torch_codes(shape)
    return lambda: torch.ops.quantized.add_relu(one, other, 2 / 255, 0)


def float_layer(call: Call) -> tuple[Any, Any]:
    """The layer that a low-bit one would replace, and an input in channels-last order."""
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
    """Fake quantisation of so many values, forward and backward, with a scale per channel."""
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
