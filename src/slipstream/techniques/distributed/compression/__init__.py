"""Gradient compression: communication hooks for data-parallel training."""

from slipstream.techniques.distributed.compression.acp import ACP
from slipstream.techniques.distributed.compression.auto import Auto
from slipstream.techniques.distributed.compression.blocks import BlockInt, Sign
from slipstream.techniques.distributed.compression.cast import Cast
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream.techniques.distributed.compression.powersgd import PowerSGD
from slipstream.techniques.distributed.compression.topk import RandomK, TopK

__all__ = [
    "ACP",
    "Auto",
    "BlockInt",
    "Cast",
    "Compressor",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
]
