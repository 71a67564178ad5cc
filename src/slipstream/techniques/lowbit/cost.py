"""How long a low-bit layer takes: a model with a few constants, fitted to this machine.

    time = overhead + products / rate (or weight bytes / bandwidth, where that is more)
           + rounding, gathering and packing of the input + unpacking of the weights
           + what is done to the output, by the forms of both

Products of few rows are bound by the way of the weights, and unpack each weight for little work;
those of many rows by the multiplication. Each regime has constants of its own. What is done around
a product does not depend on the bits: it is fitted once per machine, to some dozen layers in eight
bits. What a product takes is fitted for each pair of bits, to some of these layers. They are asked
of `slipstream.durations` before any prediction.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.graph import Call, TensorSpec
from slipstream.techniques.lowbit.timing import layer_call
from slipstream.techniques.lowbit.windows import Convolution

if TYPE_CHECKING:
    from slipstream.durations import Durations

FEW_ROWS = 8
_STREAM_FLOATS = 32 << 20
_SUM = "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"
# Numbers from which on a layer takes a sum along: with fewer, the way there through Python costs
# more than passing over memory twice.
LEAST_SUM = 1 << 15
# Of single layers the model was not fitted to; the fit's own residuals say less.
_LEAST_SPREAD = 0.08


# Weights that together are more than this come from memory in every pass; less stay in a cache.
_CACHE_BYTES = 8 << 20


class Form(enum.StrEnum):
    """In which form activations come to a layer or leave it."""

    FLOATS = "floats"
    PLANES = "planes"  # floats with channels first in memory, as a layer reads them only by a copy
    CODES = "codes"
    SUM = "sum"  # floats and codes of a sum that the layer takes along
    SUM_FLOATS = "sum of floats"


@dataclass(frozen=True)
class LayerShape:
    """What of a layer its time depends on.

    Attributes:
        image: images, height, width, channels of the input, as in `layer_call`.
        n: output channels.
        kernel, stride, padding: of a convolution.
        depthwise: whether each channel sees itself alone.
        reads, gives: the forms of input and output.
    """

    image: tuple[int, int, int, int]
    n: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    reads: Form = Form.FLOATS
    gives: Form = Form.FLOATS
    depthwise: bool = False

    @property
    def rows(self) -> int:
        """Rows of the matrix product."""
        return self._shape.rows

    @property
    def k(self) -> int:
        """Its inner dimension."""
        return self._shape.columns

    @property
    def _shape(self) -> Convolution:
        return Convolution(
            self.image, self.kernel, self.stride, self.padding, depthwise=self.depthwise
        )

    @property
    def products(self) -> int:
        """Multiplications."""
        return self.rows * self.n * self.k

    def call(self, wbits: int, abits: int) -> Call:
        """The question how long it takes."""
        return layer_call(
            wbits, abits, self.image, self.n, self.kernel, self.stride, self.padding,
            str(self.reads), str(self.gives), self.depthwise,
        )  # fmt: skip

    def features(self) -> list[float]:
        """What each constant of its regime is multiplied with; products are the last."""
        rounded = 0 if self.reads is Form.CODES else math.prod(self.image)
        handed = 1.0 if self.reads is Form.CODES or self.gives is not Form.FLOATS else 0.0
        if self.depthwise:
            outputs = self.rows * self.n
            return [
                1.0, handed, rounded, rounded * (self.reads is Form.PLANES), self.rows * self.k,
                outputs * (self.gives is not Form.CODES),
                outputs * (self.gives in (Form.CODES, Form.SUM)), self.products,
            ]  # fmt: skip
        if self.rows <= FEW_ROWS:
            return [1.0, handed, self.rows * self.k, self.n * self.k, self.products]
        pointwise = self.kernel == (1, 1) and self.stride == (1, 1)
        gathered = 0 if pointwise else self.rows * self.k
        # Pixels beside each other are copied at once.
        runs = 0 if pointwise else self.rows * self.kernel[0]
        outputs = self.rows * self.n
        sums = self.gives in (Form.SUM, Form.SUM_FLOATS)
        # Vectors of 16 columns two at a time, and k in fours.
        padded = self.rows * -(-self.n // 32) * 32 * -(-self.k // 4) * 4
        return [
            1.0, handed, rounded, rounded * (self.reads is Form.PLANES), runs, gathered,
            self.rows * self.k, outputs * (self.gives is not Form.CODES),
            outputs * (self.gives in (Form.CODES, Form.SUM)), outputs * sums,
            self.n * self.k, padded,
        ]  # fmt: skip


def linear(rows: int, n: int, k: int) -> LayerShape:
    """A linear layer on `rows` rows of k values."""
    return LayerShape((1, 1, rows, k), n)


def _square(size: int, channels: int, n: int, kernel: int = 3, stride: int = 1) -> LayerShape:
    return LayerShape(
        (1, size, size, channels), n, (kernel, kernel), (stride, stride),
        (kernel // 2, kernel // 2),
    )  # fmt: skip


def _between(layer: LayerShape, gives: Form = Form.CODES, reads: Form = Form.CODES) -> LayerShape:
    return replace(layer, reads=reads, gives=gives)


# Mostly product: timed for every pair of bits.
PRODUCTS = (
    linear(1, 256, 512), linear(1, 1024, 1024), linear(1, 2048, 2048), linear(4, 512, 512),
    linear(8, 1024, 512), linear(3, 64, 2048),
    linear(32, 512, 256), linear(64, 1000, 512), linear(256, 512, 512), linear(1024, 64, 256),
    linear(30, 1500, 1000), _square(14, 256, 256), _square(7, 256, 512),
    _between(_square(14, 192, 256)), _between(_square(7, 384, 512)), _between(_square(28, 96, 128)),
    _between(_square(14, 512, 128, 1)),
)  # fmt: skip
# Timed in eight bits, besides those.
AROUND = (
    linear(1, 32, 64), linear(8, 256, 256), linear(1, 1000, 512), _between(linear(1, 1024, 1024)),
    _between(linear(2, 256, 512)),
    linear(12, 64, 64), linear(256, 64, 64), linear(3000, 256, 64),
    _square(56, 32, 32), _square(28, 128, 64),
    _square(56, 64, 128, 1, 2), _square(112, 3, 32, 7, 2), _square(40, 12, 200, 5),
    replace(_square(112, 3, 32, 7, 2), reads=Form.PLANES),
    replace(_square(160, 3, 64, 3, 2), reads=Form.PLANES),
    _between(_square(56, 32, 48)), _between(_square(28, 96, 96)), _between(_square(56, 16, 64, 1)),
    _between(_square(28, 192, 32, 1)), _between(_square(56, 64, 96, 1), Form.FLOATS),
    _between(_square(56, 24, 144, 1), reads=Form.FLOATS), _between(_square(7, 160, 960, 1)),
    _between(_square(56, 48, 64), Form.SUM), _between(_square(14, 256, 320), Form.SUM),
    _between(_square(28, 64, 256, 1), Form.SUM), _between(_square(20, 96, 128), Form.SUM_FLOATS),
)  # fmt: skip
CALIBRATED = PRODUCTS + AROUND


def _by_channel(
    size: int, channels: int, stride: int = 1, kernel: int = 3, gives: Form = Form.CODES
) -> LayerShape:
    return replace(
        _between(_square(size, channels, channels, kernel, stride), gives), depthwise=True
    )


# Timed in eight bits where a step has such layers.
DEPTHWISE = (
    _by_channel(112, 32), _by_channel(56, 96, 2), _by_channel(28, 144), _by_channel(14, 384),
    _by_channel(7, 960), _by_channel(14, 240, 1, 5), _by_channel(28, 72, 2, 5),
    _by_channel(32, 48, gives=Form.FLOATS), _by_channel(14, 128, gives=Form.FLOATS),
    replace(_by_channel(28, 96, gives=Form.FLOATS), reads=Form.FLOATS),
    replace(_by_channel(14, 256, gives=Form.FLOATS), reads=Form.PLANES),
    replace(_by_channel(56, 64), reads=Form.FLOATS),
)  # fmt: skip
_EIGHT = (8, 8)
# Features whose constants are of a product: its unpacking and its multiplications; of many rows,
# also the packing of activations.
_OF_FEW, _OF_MANY = (-2, -1), (6, -2, -1)


def required_timings(wbits: int, abits: int, depthwise: bool = False) -> list[Call]:
    """What has to be measured here before layers of these bits can be predicted.

    Args:
        depthwise: whether there are depthwise ones among them.
    """
    asked = [layer.call(wbits, abits) for layer in PRODUCTS]
    asked += [layer.call(*_EIGHT) for layer in CALIBRATED + DEPTHWISE * depthwise]
    return [*dict.fromkeys(asked), _stream()]


@dataclass(frozen=True)
class Costs:
    """The fitted constants of one pair of bits.

    Attributes:
        few, many: nanoseconds per feature (see `LayerShape.features`), of few rows and of more.
        by_channel: likewise of depthwise layers, in eight bits; empty where none were asked for.
        bytes_per_ns: what memory gives.
        spread: relative size of the fit's residuals, at least 0.08.
        wbits: of a weight.
    """

    few: tuple[float, ...]
    many: tuple[float, ...]
    by_channel: tuple[float, ...]
    bytes_per_ns: float
    spread: float
    wbits: int

    @classmethod
    def fitted(
        cls, durations: Durations, wbits: int, abits: int, depthwise: bool = False
    ) -> Costs | None:
        """From the answers to `required_timings`; None when one was not measured."""
        stream = durations.lookup(_stream())
        around = _timed(durations, CALIBRATED, _EIGHT)
        timed = _timed(durations, PRODUCTS, (wbits, abits))
        channels = _timed(durations, DEPTHWISE * depthwise, _EIGHT)
        if stream is None or around is None or timed is None or channels is None:
            return None
        constants = []
        for few, which in ((True, _OF_FEW), (False, _OF_MANY)):
            fit = _fit([one for one in around if (one[0].rows <= FEW_ROWS) is few])
            if (wbits, abits) != _EIGHT:
                fit = _fit([one for one in timed if (one[0].rows <= FEW_ROWS) is few], fit, which)
            constants.append(fit)
        bytes_per_ns = 4 * _STREAM_FLOATS / stream.nanoseconds
        by_channel = _fit(channels) if depthwise else ()
        costs = cls(constants[0], constants[1], by_channel, bytes_per_ns, 0.0, wbits)
        errors = [math.log(costs.nanoseconds(layer) / ns) for layer, ns in timed]
        spread = max(_LEAST_SPREAD, math.sqrt(float(np.mean(np.square(errors)))))
        return replace(costs, spread=spread)

    def nanoseconds(self, layer: LayerShape, cold: bool = False) -> float:
        """How long `layer` takes.

        Args:
            cold: its weights come from memory, since those of other layers have driven them out.
        """
        constants = self.few if layer.rows <= FEW_ROWS else self.many
        if layer.depthwise:
            constants = self.by_channel
        parts = [a * b for a, b in zip(constants, layer.features(), strict=True)]
        if layer.depthwise or not (cold or come_from_memory(self.weight_bytes(layer))):
            return sum(parts)
        streamed = self.weight_bytes(layer) / self.bytes_per_ns
        # Unpacking goes on beside the loads as well.
        computed = sum(parts[-2:])
        return sum(parts) - computed + max(computed, streamed)

    def weight_bytes(self, layer: LayerShape) -> float:
        """What the packed weights of `layer` take."""
        return layer.n * layer.k * self.wbits / 8


def come_from_memory(nbytes: float) -> bool:
    """Whether weights of so many bytes, all read in every pass, do not stay in a cache."""
    return nbytes > _CACHE_BYTES


def _timed(
    durations: Durations, layers: Sequence[LayerShape], bits: tuple[int, int]
) -> list[tuple[LayerShape, float]] | None:
    """Layers with their nanoseconds; None when one was not measured."""
    timings = []
    for layer in layers:
        answer = durations.lookup(layer.call(*bits))
        if answer is None:
            return None
        timings.append((layer, answer.nanoseconds))
    return timings


def _fit(
    timed: Sequence[tuple[LayerShape, float]],
    known: Sequence[float] | None = None,
    which: Sequence[int] = (),
) -> tuple[float, ...]:
    """Non-negative constants of least relative error.

    Args:
        known: constants, of which only those at the places `which` are fitted anew; None: all.
    """
    from scipy.optimize import nnls

    times = np.array([ns for _, ns in timed])
    features = np.array([layer.features() for layer, _ in timed]) / times[:, None]
    constants = np.zeros(features.shape[1]) if known is None else np.array(known)
    places = list(range(len(constants)) if known is None else which)
    constants[places] = 0.0
    left = np.ones(len(times)) - features @ constants
    # Columns of one size, for the sake of the solver.
    sizes = np.maximum(np.abs(features[:, places]).max(axis=0), 1e-300)
    solution, _ = nnls(features[:, places] / sizes, left)
    constants[places] = solution / sizes
    return tuple(float(one) for one in constants)


def _stream() -> Call:
    spec = TensorSpec("float32", (_STREAM_FLOATS,), (1,))
    return Call(_SUM, (spec, None), (TensorSpec("float32", (), ()),))
