"""Pre-training of encoders: heads at labelled tokens, packed batches, LAMB, sharded corpora."""

from slipstream.techniques.pretraining.hooks import (
    IGNORED,
    LabelledRows,
    PackedTokens,
    masked_head,
    packed_attention,
    unpad,
)
from slipstream.techniques.pretraining.lamb import FusedLAMB
from slipstream.techniques.pretraining.shards import (
    CorpusError,
    MaskedBatches,
    ShardedTokens,
    write_shards,
)

__all__ = [
    "IGNORED",
    "CorpusError",
    "FusedLAMB",
    "LabelledRows",
    "MaskedBatches",
    "PackedTokens",
    "ShardedTokens",
    "masked_head",
    "packed_attention",
    "unpad",
    "write_shards",
]
