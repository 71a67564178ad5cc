"""What the micro-benchmark runs for ``slipstream::lowbit``: one whole layer, Python included."""

from __future__ import annotations

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
) -> Call:
    """A layer: to be asked of `slipstream.durations`.

    Args:
        image: images, height, width, channels of the input. A linear layer with m rows of k values
            is one image of 1 x m pixels with k channels.
        n: output channels.
        reads, gives: what comes in and goes out: values of `slipstream.techniques.lowbit.Form`.
    """
    return _call(wbits, abits, image, n, kernel, stride, padding, reads, gives)


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


def timer(call: Call) -> Callable[[], object]:
    """The layer, or the rounding, as a function of nothing, on random numbers."""
    others: dict[Any, Callable[..., Callable[[], object]]] = {
        "rounding": _rounding,
        "pool": _pool,
        "concat": _concat,
    }
    if (other := others.get(call.arguments[0])) is not None:
        return other(*call.arguments[1:])
    from slipstream.techniques.lowbit.coded import CodedTensor
    from slipstream.techniques.lowbit.convolve import quantise
    from slipstream.techniques.lowbit.layer import AfterSum
    from slipstream.techniques.lowbit.nn import low_bit_class

    wbits, abits = call.arguments[:2]
    reads, gives = call.arguments[7:]
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
    from torch.nn import functional

    x = _codes(*image)
    kernel, stride, padding, dilation = (tuple(one) for one in window)
    return lambda: functional.max_pool2d(x, kernel, stride, padding, dilation, up)


def _concat(pixels: Any, channels: Any) -> Callable[[], object]:
    import torch

    parts = [_codes(*pixels, count) for count in channels]
    return lambda: torch.cat(parts, 1)


def float_layer(call: Call) -> tuple[Any, Any]:
    """The layer that a low-bit one would replace, and an input in channels-last order."""
    import torch
    from torch import nn

    image, n, kernel, stride, padding = call.arguments[2:7]
    images, height, width, channels = image
    if tuple(kernel) == (1, 1) and tuple(stride) == (1, 1) and height == 1:
        return nn.Linear(channels, n).eval(), torch.rand(images * width, channels)
    module = nn.Conv2d(channels, n, tuple(kernel), tuple(stride), tuple(padding)).eval()
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
