"""Layers of a recorded step that have a low-bit form, and the tasks directly after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.graph.flow import Flow, Match, matches
from slipstream.graph.layers import layers
from slipstream.techniques.lowbit.cost import LayerShape, linear
from slipstream.techniques.lowbit.recorded import CLIPS
from slipstream.techniques.lowbit.windows import pair

NO_LAYER = "the step has no linear layer, plain or depthwise convolution to convert"
_NORMS = (
    "aten::native_batch_norm", "aten::cudnn_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
)  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class LowBitSite(Match):
    """A layer that has a low-bit form.

    Attributes:
        layer: the properties that determine its time.
        fused: following tasks that are fused into it, see `fused_tasks`.
        bits: bits of its weight and input.
    """

    layer: LayerShape
    fused: tuple[int, ...]
    bits: tuple[int, int] = (8, 8)

    @property
    def task(self) -> int:
        """The task of the matmul or convolution."""
        return self.forward[0]


def low_bit_layers(flow: Flow) -> Iterator[LowBitSite]:
    """Find layers with a parameter as weight that have a low-bit form."""
    for match in matches(flow.graph, layers):
        shape = _shape(match)
        if shape is not None and match.weights:
            yield LowBitSite(
                match.kind, match.module, match.forward, match.backward, match.x, match.y,
                match.weights, match.settings,
                # A model that is itself a layer cannot be replaced.
                refusal=None if match.module else NO_LAYER, layer=shape,
                fused=fused_tasks(flow, match.forward[0]),
            )  # fmt: skip


def _shape(match: Match) -> LayerShape | None:
    settings = match.settings
    if not settings.kernel:
        rows, k = match.x.shape
        return linear(rows, settings.outputs, k)
    if len(match.x.shape) != 4 or settings.transposed:
        return None
    batch, channels, height, width = match.x.shape
    depthwise = 1 < settings.groups == settings.outputs == channels
    if settings.groups != 1 and not depthwise:
        return None
    kernel, dilation = pair(settings.kernel), pair(settings.dilation)
    # A smaller image with an undilated kernel has as many output pixels and multiplications.
    height -= (kernel[0] - 1) * (dilation[0] - 1)
    width -= (kernel[1] - 1) * (dilation[1] - 1)
    return LayerShape(
        (batch, height, width, channels), settings.outputs, kernel, pair(settings.stride),
        pair(settings.padding), depthwise=depthwise,
    )  # fmt: skip


def fused_tasks(flow: Flow, task: int) -> tuple[int, ...]:
    """Return the norm and the ReLU (or ReLU6) that are the only readers in turn of `task`."""
    return tuple(flow.behind(task, _NORMS, CLIPS))
