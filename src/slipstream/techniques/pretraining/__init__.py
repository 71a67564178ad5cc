"""Pre-training of encoders: heads at labelled tokens, packed batches, LAMB."""

from slipstream.techniques.pretraining.hooks import (
    IGNORED,
    LabelledRows,
    PackedTokens,
    masked_head,
    packed_attention,
    unpad,
)
from slipstream.techniques.pretraining.lamb import FusedLAMB

__all__ = [
    "IGNORED",
    "FusedLAMB",
    "LabelledRows",
    "PackedTokens",
    "masked_head",
    "packed_attention",
    "unpad",
]
