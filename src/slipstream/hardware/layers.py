"""Layers of a step as products on an accelerator, and the streams of their three passes.

The passes of a training step are forward ``O = A * W``, the gradient of the input ``GA = GO * W'``
and the gradient of the weight ``GW = GO * A``. In each of them one operand is scheduled: its values
are streams of rows of lanes, which a tile's rows read. Zeros that the layer's shape inserts
(padding, lanes without a channel) are structural; dilation zeros of strided layers are never
streamed, because each phase of the stride is a dense product of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Graph
from slipstream.graph.flow import Match, matches
from slipstream.graph.layers import LayerSettings, layers
from slipstream.hardware.kernels import Streams

_Bits = NDArray[np.bool_]
_Phase = tuple[NDArray[np.int64], list[int]]
_MIN_DIMENSIONS, _SPATIAL = 3, 2


class Pass(StrEnum):
    """A pass of a training step."""

    FORWARD = "forward"
    INPUT = "input gradient"
    WEIGHT = "weight gradient"


class Operand(StrEnum):
    """An operand of a pass."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    GRADIENT = "gradient"


OPERANDS = {
    Pass.FORWARD: (Operand.ACTIVATION, Operand.WEIGHT),
    Pass.INPUT: (Operand.GRADIENT, Operand.WEIGHT),
    Pass.WEIGHT: (Operand.GRADIENT, Operand.ACTIVATION),
}
"""The operands of each pass; the sparser one is scheduled, the first if both are equal."""


def result_of(which: Pass) -> Operand:
    """Return the tensor whose shape the result of a pass has."""
    (result,) = set(Operand) - set(OPERANDS[which])
    return result


@dataclass(frozen=True)
class LayerShape:
    """A convolution with two spatial dimensions; a linear layer has one row of positions.

    Attributes:
        n: samples.
        c, k: channels of input and output.
        h, w: positions of the input.
        kh, kw: size of the filters.
        stride, padding, dilation: (vertical, horizontal).
        groups: groups of channels.
    """

    n: int
    c: int
    k: int
    h: int
    w: int
    kh: int = 1
    kw: int = 1
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def oh(self) -> int:
        """Rows of the output."""
        return self._outputs(self.h, self.kh, 0)

    @property
    def ow(self) -> int:
        """Columns of the output."""
        return self._outputs(self.w, self.kw, 1)

    def _outputs(self, size: int, kernel: int, axis: int) -> int:
        reach = self.dilation[axis] * (kernel - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    @property
    def macs(self) -> int:
        """Multiplications of one pass, with those by padding."""
        taps = self.c // self.groups * self.kh * self.kw
        return self.n * self.k * self.oh * self.ow * taps

    @property
    def shapes(self) -> dict[Operand, tuple[int, int, int, int]]:
        """Shapes of the operands as stored: NCHW, and KCHW for the weight."""
        return {
            Operand.ACTIVATION: (self.n, self.c, self.h, self.w),
            Operand.WEIGHT: (self.k, self.c // self.groups, self.kh, self.kw),
            Operand.GRADIENT: (self.n, self.k, self.oh, self.ow),
        }


def layer_shape(match: Match) -> LayerShape | None:
    """Return the shape of a layer of a step; None for more than two spatial dimensions."""
    settings: LayerSettings = match.settings
    x, y = match.x.shape, match.y.shape
    if not settings.kernel:
        return LayerShape(1, x[-1], settings.outputs, 1, math.prod(x[:-1]))
    if len(settings.kernel) > _SPATIAL or len(x) < _MIN_DIMENSIONS:
        return None
    kernel, stride, dilation = (
        _pair(values, 1) for values in (settings.kernel, settings.stride, settings.dilation)
    )
    padding = _pair(settings.padding, 0)
    if settings.transposed:
        # The gradient of the input of a convolution from y to x.
        x, y = y, x
    n, c, h, w = (*x[:2], 1, *x[2:]) if len(x) == _MIN_DIMENSIONS else x
    return LayerShape(n, c, y[1], h, w, *kernel, stride, padding, dilation, settings.groups)


def _pair(values: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Return (vertical, horizontal) values; one value of one dimension is horizontal."""
    return values[0] if len(values) > 1 else missing, values[-1]


def layers_of(graph: Graph) -> tuple[tuple[Match, LayerShape], ...]:
    """Return the matrix products of a step that have a parameter as an operand, with shapes."""
    found = ((match, layer_shape(match)) for match in matches(graph, layers))
    return tuple((match, shape) for match, shape in found if shape is not None)


def streams(
    shape: LayerShape, which: Pass, operand: Operand, bits: _Bits, lanes: int, together: int
) -> Iterator[Streams]:
    """Yield the streams of a pass with `operand` scheduled; several if it has phases.

    Args:
        bits: bool, see `LayerShape.shapes`; whether each value is nonzero.
        together: number of streams in a group. Groups do not mix samples or groups of channels.
    """
    yield from _MAKERS[which, operand](shape, bits, lanes, together)


def _words(bits: _Bits, lanes: int) -> NDArray[Any]:
    """Pack the last dimension, `lanes` values per word of 16 or 64 bits."""
    width = 16 if lanes <= 16 else 64
    count = -(-bits.shape[-1] // lanes)
    padded = np.zeros((*bits.shape[:-1], count * lanes), bool)
    padded[..., : bits.shape[-1]] = bits
    rows = np.zeros((*bits.shape[:-1], count, width), bool)
    rows[..., :lanes] = padded.reshape(*bits.shape[:-1], count, lanes)
    packed = np.packbits(rows, axis=-1, bitorder="little")
    return packed.view(np.uint16 if width == 16 else np.uint64)[..., 0]


def _grouped(base: NDArray[np.int64], together: int) -> NDArray[np.int64]:
    """Return int64 [groups, together] of streams [..., n], padded with -1 along the last."""
    missing = -base.shape[-1] % together
    padding = [(0, 0)] * (base.ndim - 1) + [(0, missing)]
    return np.pad(base, padding, constant_values=-1).reshape(-1, together)


def _by_channel(bits: _Bits, groups: int, lanes: int) -> NDArray[Any]:
    """Return words [n, h, w, groups, words] of bits [n, c, h, w]."""
    n, c, h, w = bits.shape
    split = bits.reshape(n, groups, c // groups, h, w)
    return _words(np.ascontiguousarray(split.transpose(0, 3, 4, 1, 2)), lanes)


def _windows(
    words: NDArray[Any], ys: NDArray[np.int64], xs: NDArray[np.int64], taps: NDArray[np.int64],
    columns: int, together: int,
) -> Streams:  # fmt: skip
    """Return streams of windows at (ys, xs), with the rows at `taps`, int64 [taps, 2]."""
    n, h, w, groups, inner = words.shape
    sample, group = np.arange(n) * h, np.arange(groups)
    row = (sample[:, None, None, None] + ys[:, None]) * w + xs
    base = (row[:, None] * groups + group[:, None, None]) * inner
    offset = (taps[:, :1] * w + taps[:, 1:]) * groups * inner + np.arange(inner)
    return Streams(
        words.reshape(-1), _grouped(base.reshape(n, groups, -1), together), offset.ravel(), columns
    )


def _taps(ys: Any, xs: Any) -> NDArray[np.int64]:
    return np.array(list(itertools.product(ys, xs)), np.int64).reshape(-1, 2)


def _forward_activation(
    shape: LayerShape, bits: _Bits, lanes: int, together: int
) -> Iterator[Streams]:
    (ph, pw), (sh, sw), (dh, dw) = shape.padding, shape.stride, shape.dilation
    padded = np.pad(bits, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    taps = _taps(np.arange(shape.kh) * dh, np.arange(shape.kw) * dw)
    yield _windows(
        _by_channel(padded, shape.groups, lanes), np.arange(shape.oh) * sh,
        np.arange(shape.ow) * sw, taps, shape.k // shape.groups, together,
    )  # fmt: skip


def _forward_weight(shape: LayerShape, bits: _Bits, lanes: int, together: int) -> Iterator[Streams]:
    words = _words(np.ascontiguousarray(bits.transpose(0, 2, 3, 1)), lanes)
    length = words[0].size
    base = (np.arange(shape.k) * length).reshape(shape.groups, -1)
    columns = shape.n * shape.oh * shape.ow
    yield Streams(words.reshape(-1), _grouped(base, together), np.arange(length), columns)


def _phases(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Iterator[_Phase]:
    """Yield for each phase of the stride the input positions and the taps that reach them."""
    positions = np.arange(size)
    for phase in range(stride):
        taps = [tap for tap in reversed(range(kernel)) if tap * dilation % stride == phase]
        at = positions[(positions + padding) % stride == phase]
        if taps and len(at):
            yield at, taps


def phases(shape: LayerShape) -> Iterator[tuple[_Phase, _Phase]]:
    """Yield the phases of both strides: (input positions, taps) of rows and of columns."""
    (ph, pw), (sh, sw), (dh, dw) = shape.padding, shape.stride, shape.dilation
    yield from itertools.product(
        _phases(shape.h, shape.kh, sh, ph, dh), _phases(shape.w, shape.kw, sw, pw, dw)
    )


def _input_gradient(shape: LayerShape, bits: _Bits, lanes: int, together: int) -> Iterator[Streams]:
    # Output (y + padding - tap dilation) / stride contributes to input y.
    around = [(0, 0), (0, 0)]
    for size, kernel, outputs, padding, stride, dilation in zip(
        (shape.h, shape.w), (shape.kh, shape.kw), (shape.oh, shape.ow),
        shape.padding, shape.stride, shape.dilation, strict=True,
    ):  # fmt: skip
        before = -(-(kernel - 1) * dilation // stride)
        around.append((before, max((size - 1 + padding) // stride - (outputs - 1), 0)))
    words = _by_channel(np.pad(bits, around), shape.groups, lanes)
    for rows, columns in phases(shape):
        places, offsets = [], []
        for axis, (at, taps) in enumerate((rows, columns)):
            stride, padding = shape.stride[axis], shape.padding[axis]
            phase = int(at[0] + padding) % stride
            places.append((at + padding - phase) // stride + around[2 + axis][0])
            offsets.append([-(tap * shape.dilation[axis] - phase) // stride for tap in taps])
        yield _windows(
            words, places[0], places[1], _taps(*offsets), shape.c // shape.groups, together
        )


def _input_weight(shape: LayerShape, bits: _Bits, lanes: int, together: int) -> Iterator[Streams]:
    inputs, outputs = shape.c // shape.groups, shape.k // shape.groups
    split = bits.reshape(shape.groups, outputs, inputs, shape.kh, shape.kw)
    words = _words(np.ascontiguousarray(split.transpose(0, 2, 3, 4, 1)), lanes)
    inner = words.shape[-1]
    base = (np.arange(shape.c) * shape.kh * shape.kw * inner).reshape(shape.groups, inputs)
    for (ys, tap_rows), (xs, tap_columns) in phases(shape):
        taps = _taps(tap_rows, tap_columns)
        offset = ((taps[:, :1] * shape.kw + taps[:, 1:]) * inner + np.arange(inner)).ravel()
        columns = shape.n * len(ys) * len(xs)
        yield Streams(words.reshape(-1), _grouped(base, together), offset, columns)


def _over_samples(words: NDArray[Any], groups: int, columns: int, together: int) -> Streams:
    """Return streams over samples and positions of words [n, streams, words of a sample]."""
    n, count, inner = words.shape
    base = (np.arange(count) * inner).reshape(groups, -1)
    offset = np.arange(n)[:, None] * count * inner + np.arange(inner)
    return Streams(words.reshape(-1), _grouped(base, together), offset.ravel(), columns)


def _weight_gradient(
    shape: LayerShape, bits: _Bits, lanes: int, together: int
) -> Iterator[Streams]:
    words = _words(bits.reshape(shape.n, shape.k, -1), lanes)
    columns = shape.c // shape.groups * shape.kh * shape.kw
    yield _over_samples(words, shape.groups, columns, together)


def _weight_activation(
    shape: LayerShape, bits: _Bits, lanes: int, together: int
) -> Iterator[Streams]:
    (ph, pw), (sh, sw), (dh, dw) = shape.padding, shape.stride, shape.dilation
    reach = dh * (shape.kh - 1) + 1, dw * (shape.kw - 1) + 1
    parts = []
    for sample in np.pad(bits, ((0, 0), (0, 0), (ph, ph), (pw, pw))):
        seen = np.lib.stride_tricks.sliding_window_view(sample, reach, (1, 2))
        taps = seen[:, ::sh, ::sw, ::dh, ::dw].transpose(0, 3, 4, 1, 2)
        parts.append(_words(taps.reshape(shape.c * shape.kh * shape.kw, -1), lanes))
    yield _over_samples(np.stack(parts), shape.groups, shape.k // shape.groups, together)


_MAKERS: dict[tuple[Pass, Operand], Callable[..., Iterator[Streams]]] = {
    (Pass.FORWARD, Operand.ACTIVATION): _forward_activation,
    (Pass.FORWARD, Operand.WEIGHT): _forward_weight,
    (Pass.INPUT, Operand.GRADIENT): _input_gradient,
    (Pass.INPUT, Operand.WEIGHT): _input_weight,
    (Pass.WEIGHT, Operand.GRADIENT): _weight_gradient,
    (Pass.WEIGHT, Operand.ACTIVATION): _weight_activation,
}
