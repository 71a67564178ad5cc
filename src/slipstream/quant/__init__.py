"""Quantization: real numbers to codes of 1 to 8 bits and back, with calibration and training.

    import slipstream as ss

    ranges = ss.quant.calibrate(model, batches)           # ranges of modules' inputs
    grid = ranges["conv1"].grid(ss.quant.Format(8))       # a scale and a zero point
    codes = ss.quant.quantize(x, grid)
    restored = ss.quant.dequantize(codes, grid)

Used by low-bit layers, int8 export and compressed embeddings.
"""

from slipstream.quant.calibration import Calibration, Range, calibrate, call_model
from slipstream.quant.codes import (
    binarize,
    code_weights,
    dequantize,
    grid_of_weights,
    quantize,
    round_nearest,
    round_stochastic,
)
from slipstream.quant.fake import BinaryWeights, FakeQuantize, fake_quantize
from slipstream.quant.format import Format, Granularity
from slipstream.quant.grid import Grid, grid_of_range
from slipstream.quant.observers import (
    LeastError,
    MinMax,
    Observer,
    Percentile,
)

__all__ = [
    "BinaryWeights",
    "Calibration",
    "FakeQuantize",
    "Format",
    "Granularity",
    "Grid",
    "LeastError",
    "MinMax",
    "Observer",
    "Percentile",
    "Range",
    "binarize",
    "calibrate",
    "call_model",
    "code_weights",
    "dequantize",
    "fake_quantize",
    "grid_of_range",
    "grid_of_weights",
    "quantize",
    "round_nearest",
    "round_stochastic",
]
