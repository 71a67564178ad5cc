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
from slipstream.techniques.pretraining.training import PretrainingConfig, TrainingPhase, pretrain

__all__ = [
    "IGNORED",
    "CorpusError",
    "FusedLAMB",
    "LabelledRows",
    "MaskedBatches",
    "PackedTokens",
    "PretrainingConfig",
    "ShardedTokens",
    "TrainingPhase",
    "masked_head",
    "packed_attention",
    "pretrain",
    "unpad",
    "write_shards",
]
