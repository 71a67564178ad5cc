"""Matrix multiplication with weights and activations of 1 to 8 bits; layers, training, export.

Names are imported on first use, so that the technique predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.lowbit.dense_rows import bit_rows, from_bit_rows
    from slipstream.techniques.lowbit.dispatch import Shape
    from slipstream.techniques.lowbit.export import to_onnx
    from slipstream.techniques.lowbit.kernels import PackedWeights, pack_weights
    from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear
    from slipstream.techniques.lowbit.operators import linear, matmul
    from slipstream.techniques.lowbit.qat import (
        added_parameters,
        convert,
        load,
        prepare_training,
        quantise_model,
    )
    from slipstream.techniques.lowbit.technique import LowBit
    from slipstream.techniques.lowbit.tuning import autotune

_HOMES = {
    "dense_rows": ("bit_rows", "from_bit_rows"),
    "dispatch": ("Shape",),
    "export": ("to_onnx",),
    "kernels": ("PackedWeights", "pack_weights"),
    "nn": ("LowBitConv2d", "LowBitLinear"),
    "operators": ("linear", "matmul"),
    "qat": ("added_parameters", "convert", "load", "prepare_training", "quantise_model"),
    "technique": ("LowBit",),
    "tuning": ("autotune",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LowBit",
    "LowBitConv2d",
    "LowBitLinear",
    "PackedWeights",
    "Shape",
    "added_parameters",
    "autotune",
    "bit_rows",
    "convert",
    "from_bit_rows",
    "linear",
    "load",
    "matmul",
    "pack_weights",
    "prepare_training",
    "quantise_model",
    "to_onnx",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
