"""The layers of a recorded step that have a low-bit form, and what runs right behind them."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.graph import Call
from slipstream.techniques.dataflow import Dataflow
from slipstream.techniques.lowbit.cost import LayerShape, linear
from slipstream.techniques.lowbit.recorded import CLIPS
from slipstream.techniques.lowbit.windows import pair

CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution")
_NORMS = (
    "aten::native_batch_norm", "aten::cudnn_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
)  # fmt: skip
_STRIDE, _PADDING, _DILATION, _TRANSPOSED, _GROUPS = 3, 4, 5, 6, 8


@dataclass(frozen=True)
class Window:
    """How a convolution goes over its images."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, call: Call) -> Window | None:
        """Of a convolution of images; None where it is transposed."""
        mkldnn = call.name == "aten::mkldnn_convolution"
        padding, stride, dilation, groups = (
            (3, 4, 5, 6) if mkldnn else (_PADDING, _STRIDE, _DILATION, _GROUPS)
        )
        if len(call.inputs[0].shape) != 4 or (not mkldnn and call.arguments[_TRANSPOSED]):
            return None
        return cls(
            pair(call.arguments[stride]), pair(call.arguments[padding]),
            pair(call.arguments[dilation]), call.arguments[groups],
        )  # fmt: skip


@dataclass(frozen=True)
class LowBitSite:
    """A layer's task, its shape and bits, and the tasks behind it that it does as well."""

    task: int
    layer: LayerShape
    bits: tuple[int, int]
    behind: tuple[int, ...]


def layer_of(call: Call, inputs: list[int], parameters: set[int]) -> LayerShape | None:
    """The layer `call` is, if it multiplies with a parameter and has a low-bit form."""
    if call.name in CONVOLUTIONS:
        image, weight = call.inputs[0], call.inputs[1]
        window = Window.of(call)
        if window is None or (parameters and inputs[1] not in parameters):
            return None
        n, channels, *kernel = weight.shape
        depthwise = 1 < window.groups == n == image.shape[1]
        if window.groups != 1 and not depthwise:
            return None
        channels = image.shape[1]
        wide = tuple((k - 1) * d + 1 for k, d in zip(kernel, window.dilation, strict=True))
        batch, _, height, width = image.shape
        if window.dilation != (1, 1):
            # The same number of output pixels and products as with a kernel without gaps.
            over = [full - k for full, k in zip(wide, kernel, strict=True)]
            height, width = height - over[0], width - over[1]
        return LayerShape(
            (batch, height, width, channels), n, pair(kernel), window.stride, window.padding,
            depthwise=depthwise,
        )  # fmt: skip
    if call.name in ("aten::addmm", "aten::mm"):
        place = 2 if call.name == "aten::addmm" else 1
        if parameters and inputs[place] not in parameters:
            return None
        rows, k = call.inputs[place - 1].shape
        return linear(rows, call.inputs[place].shape[1], k)
    return None


def behind(flow: Dataflow, task: int) -> list[int]:
    """A norm and a ReLU (or ReLU6) that read nothing but what the one before made, and alone."""
    followers: list[int] = []
    for names in (_NORMS, CLIPS):
        last = followers[-1] if followers else task
        readers = flow.readers[last]
        if len(readers) != 1 or flow.views[last]:
            continue
        call = flow.call(readers[0])
        if call is not None and call.name in names and flow.makers[readers[0]][0] == last:
            followers.append(readers[0])
    return followers
