"""Cost model of a low-bit layer's time, with constants fitted to this machine.

    time = overhead + max(multiplications / rate, weight bytes / bandwidth)
           + rounding, gathering and packing of the input + unpacking of the weights
           + epilogue, by the forms of input and output

A product of few rows is bound by reading and unpacking weights, one of many rows by multiplication;
each regime has separate constants. Work around a product does not depend on bits: it is fitted once
per machine, to some dozen layers in eight bits. Products are fitted for each pair of bits, to some
of these layers. `slipstream.durations` measures them before any prediction.
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
# Minimum number of elements for which a layer fuses a sum: with fewer, the Python overhead exceeds
# another pass over memory.
MIN_SUM_ELEMS = 1 << 15
# Minimum relative error for layers to which the model was not fitted; residuals underestimate it.
_MIN_SPREAD = 0.08


# Weights that take more bytes than this together are read from memory in every pass.
_CACHE_BYTES = 8 << 20


class Form(enum.StrEnum):
    """Form of a layer's input or output."""

    FLOATS = "floats"
    PLANES = "planes"  # channels-first floats, which a layer copies before reading
    CODES = "codes"
    SUM = "sum"  # floats and codes of a fused sum
    SUM_FLOATS = "sum of floats"


@dataclass(frozen=True)
class LayerShape:
    """Properties of a layer that determine its time.

    Attributes:
        image: images, height, width, channels of the input, as in `layer_call`.
        n: number of output channels.
        kernel, stride, padding: geometry of a convolution.
        reads, writes: forms of input and output.
        depthwise: whether each output channel reads only its input channel.
    """

    image: tuple[int, int, int, int]
    n: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    reads: Form = Form.FLOATS
    writes: Form = Form.FLOATS
    depthwise: bool = False

    @property
    def rows(self) -> int:
        """Number of rows of the matmul."""
        return self._shape.rows

    @property
    def k(self) -> int:
        """Inner dimension of the matmul."""
        return self._shape.columns

    @property
    def _shape(self) -> Convolution:
        return Convolution(
            self.image, self.kernel, self.stride, self.padding, depthwise=self.depthwise
        )

    @property
    def products(self) -> int:
        """Number of multiplications."""
        return self.rows * self.n * self.k

    def call(self, wbits: int, abits: int) -> Call:
        """Return the call to time the layer."""
        return layer_call(
            wbits, abits, self.image, self.n, self.kernel, self.stride, self.padding,
            str(self.reads), str(self.writes), self.depthwise,
        )  # fmt: skip

    def features(self) -> list[float]:
        """Return the factor of each constant of the layer's regime; multiplications are last."""
        quantised = 0 if self.reads is Form.CODES else math.prod(self.image)
        exchanged = 1.0 if self.reads is Form.CODES or self.writes is not Form.FLOATS else 0.0
        if self.depthwise:
            outputs = self.rows * self.n
            return [
                1.0, exchanged, quantised, quantised * (self.reads is Form.PLANES),
                self.rows * self.k, outputs * (self.writes is not Form.CODES),
                outputs * (self.writes in (Form.CODES, Form.SUM)), self.products,
            ]  # fmt: skip
        if self.rows <= FEW_ROWS:
            return [1.0, exchanged, self.rows * self.k, self.n * self.k, self.products]
        pointwise = self.kernel == (1, 1) and self.stride == (1, 1)
        gathered = 0 if pointwise else self.rows * self.k
        # Adjacent pixels are copied together.
        runs = 0 if pointwise else self.rows * self.kernel[0]
        outputs = self.rows * self.n
        sums = self.writes in (Form.SUM, Form.SUM_FLOATS)
        # Kernels process 32 columns together, and k in blocks of 4.
        padded = self.rows * -(-self.n // 32) * 32 * -(-self.k // 4) * 4
        return [
            1.0, exchanged, quantised, quantised * (self.reads is Form.PLANES), runs, gathered,
            self.rows * self.k, outputs * (self.writes is not Form.CODES),
            outputs * (self.writes in (Form.CODES, Form.SUM)), outputs * sums,
            self.n * self.k, padded,
        ]  # fmt: skip


def linear(rows: int, n: int, k: int) -> LayerShape:
    """Return the shape of a linear layer on `rows` rows of k values."""
    return LayerShape((1, 1, rows, k), n)


def _square(size: int, channels: int, n: int, kernel: int = 3, stride: int = 1) -> LayerShape:
    return LayerShape(
        (1, size, size, channels), n, (kernel, kernel), (stride, stride),
        (kernel // 2, kernel // 2),
    )  # fmt: skip


def _coded(layer: LayerShape, writes: Form = Form.CODES, reads: Form = Form.CODES) -> LayerShape:
    return replace(layer, reads=reads, writes=writes)


# Layers dominated by the product, timed for every pair of bits.
PRODUCTS = (
    linear(1, 256, 512), linear(1, 1024, 1024), linear(1, 2048, 2048), linear(4, 512, 512),
    linear(8, 1024, 512), linear(3, 64, 2048),
    linear(32, 512, 256), linear(64, 1000, 512), linear(256, 512, 512), linear(1024, 64, 256),
    linear(30, 1500, 1000), _square(14, 256, 256), _square(7, 256, 512),
    _coded(_square(14, 192, 256)), _coded(_square(7, 384, 512)), _coded(_square(28, 96, 128)),
    _coded(_square(14, 512, 128, 1)),
)  # fmt: skip
# Further layers, timed in eight bits.
AROUND = (
    linear(1, 32, 64), linear(8, 256, 256), linear(1, 1000, 512), _coded(linear(1, 1024, 1024)),
    _coded(linear(2, 256, 512)),
    linear(12, 64, 64), linear(256, 64, 64), linear(3000, 256, 64),
    _square(56, 32, 32), _square(28, 128, 64),
    _square(56, 64, 128, 1, 2), _square(112, 3, 32, 7, 2), _square(40, 12, 200, 5),
    replace(_square(112, 3, 32, 7, 2), reads=Form.PLANES),
    replace(_square(160, 3, 64, 3, 2), reads=Form.PLANES),
    _coded(_square(56, 32, 48)), _coded(_square(28, 96, 96)), _coded(_square(56, 16, 64, 1)),
    _coded(_square(28, 192, 32, 1)), _coded(_square(56, 64, 96, 1), Form.FLOATS),
    _coded(_square(56, 24, 144, 1), reads=Form.FLOATS), _coded(_square(7, 160, 960, 1)),
    _coded(_square(56, 48, 64), Form.SUM), _coded(_square(14, 256, 320), Form.SUM),
    _coded(_square(28, 64, 256, 1), Form.SUM), _coded(_square(20, 96, 128), Form.SUM_FLOATS),
)  # fmt: skip
CALIBRATED = PRODUCTS + AROUND


def _by_channel(
    size: int, channels: int, stride: int = 1, kernel: int = 3, writes: Form = Form.CODES
) -> LayerShape:
    return replace(
        _coded(_square(size, channels, channels, kernel, stride), writes), depthwise=True
    )


# Layers timed in eight bits if a step has depthwise layers.
DEPTHWISE = (
    _by_channel(112, 32), _by_channel(56, 96, 2), _by_channel(28, 144), _by_channel(14, 384),
    _by_channel(7, 960), _by_channel(14, 240, 1, 5), _by_channel(28, 72, 2, 5),
    _by_channel(32, 48, writes=Form.FLOATS), _by_channel(14, 128, writes=Form.FLOATS),
    replace(_by_channel(28, 96, writes=Form.FLOATS), reads=Form.FLOATS),
    replace(_by_channel(14, 256, writes=Form.FLOATS), reads=Form.PLANES),
    replace(_by_channel(56, 64), reads=Form.FLOATS),
)  # fmt: skip
_EIGHT = (8, 8)
# Indices of features whose constants depend on bits: unpacking and multiplication, and with many
# rows the packing of activations.
_FEW_BIT_FEATURES, _MANY_BIT_FEATURES = (-2, -1), (6, -2, -1)


def required_timings(wbits: int, abits: int, depthwise: bool = False) -> list[Call]:
    """Return the calls to measure before layers of these bits can be predicted.

    Args:
        depthwise: whether there are depthwise layers.
    """
    calls = [layer.call(wbits, abits) for layer in PRODUCTS]
    calls += [layer.call(*_EIGHT) for layer in CALIBRATED + DEPTHWISE * depthwise]
    return [*dict.fromkeys(calls), _stream()]


@dataclass(frozen=True)
class Costs:
    """Fitted constants for a pair of bits.

    Attributes:
        few, many: nanoseconds per feature (see `LayerShape.features`), for few and many rows.
        by_channel: the same for depthwise layers in eight bits; empty if not requested.
        bytes_per_ns: memory bandwidth.
        spread: relative size of the fit's residuals, at least 0.08.
        wbits: bits per weight.
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
        """Fit constants to the `required_timings`; return None if one was not measured."""
        stream = durations.lookup(_stream())
        calibration = _timed(durations, CALIBRATED, _EIGHT)
        products = _timed(durations, PRODUCTS, (wbits, abits))
        channels = _timed(durations, DEPTHWISE * depthwise, _EIGHT)
        if stream is None or calibration is None or products is None or channels is None:
            return None
        constants = []
        for is_few, refitted in ((True, _FEW_BIT_FEATURES), (False, _MANY_BIT_FEATURES)):
            fit = _fit([timing for timing in calibration if (timing[0].rows <= FEW_ROWS) is is_few])
            if (wbits, abits) != _EIGHT:
                fit = _fit(
                    [timing for timing in products if (timing[0].rows <= FEW_ROWS) is is_few],
                    fit,
                    refitted,
                )
            constants.append(fit)
        bytes_per_ns = 4 * _STREAM_FLOATS / stream.nanoseconds
        by_channel = _fit(channels) if depthwise else ()
        costs = cls(constants[0], constants[1], by_channel, bytes_per_ns, 0.0, wbits)
        errors = [math.log(costs.nanoseconds(layer) / ns) for layer, ns in products]
        spread = max(_MIN_SPREAD, math.sqrt(float(np.mean(np.square(errors)))))
        return replace(costs, spread=spread)

    def nanoseconds(self, layer: LayerShape, cold: bool = False) -> float:
        """Predict the time of `layer` in nanoseconds.

        Args:
            cold: whether its weights are read from memory, because other layers evict them.
        """
        constants = self.few if layer.rows <= FEW_ROWS else self.many
        if layer.depthwise:
            constants = self.by_channel
        parts = [a * b for a, b in zip(constants, layer.features(), strict=True)]
        if layer.depthwise or not (cold or exceed_cache(self.weight_bytes(layer))):
            return sum(parts)
        streamed = self.weight_bytes(layer) / self.bytes_per_ns
        # Unpacking overlaps the loads, too.
        computed = sum(parts[-2:])
        return sum(parts) - computed + max(computed, streamed)

    def weight_bytes(self, layer: LayerShape) -> float:
        """Return the bytes of the packed weights of `layer`."""
        return layer.n * layer.k * self.wbits / 8


def exceed_cache(nbytes: float) -> bool:
    """Return whether weights of `nbytes`, all read in every pass, exceed the cache."""
    return nbytes > _CACHE_BYTES


def _timed(
    durations: Durations, layers: Sequence[LayerShape], bits: tuple[int, int]
) -> list[tuple[LayerShape, float]] | None:
    """Return layers with their nanoseconds; None if one was not measured."""
    timings = []
    for layer in layers:
        answer = durations.lookup(layer.call(*bits))
        if answer is None:
            return None
        timings.append((layer, answer.nanoseconds))
    return timings


def _fit(
    timed: Sequence[tuple[LayerShape, float]],
    fixed: Sequence[float] | None = None,
    refitted: Sequence[int] = (),
) -> tuple[float, ...]:
    """Fit non-negative constants by least relative error.

    Args:
        fixed: earlier constants, of which only those at the indices `refitted` are fitted again;
            None to fit all.
    """
    from scipy.optimize import nnls

    times = np.array([ns for _, ns in timed])
    features = np.array([layer.features() for layer, _ in timed]) / times[:, None]
    constants = np.zeros(features.shape[1]) if fixed is None else np.array(fixed)
    columns = list(range(len(constants)) if fixed is None else refitted)
    constants[columns] = 0.0
    residual = np.ones(len(times)) - features @ constants
    # Normalised columns improve the solver's conditioning.
    sizes = np.maximum(np.abs(features[:, columns]).max(axis=0), 1e-300)
    solution, _ = nnls(features[:, columns] / sizes, residual)
    constants[columns] = solution / sizes
    return tuple(float(constant) for constant in constants)


def _stream() -> Call:
    spec = TensorSpec("float32", (_STREAM_FLOATS,), (1,))
    return Call(_SUM, (spec, None), (TensorSpec("float32", (), ()),))
