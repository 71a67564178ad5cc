"""Pre-training of encoders: heads at labelled tokens, packed batches, LAMB, sharded corpora, ranks.

Modules are imported on first use, because the techniques predict without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
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
    from slipstream.techniques.pretraining.training import (
        PretrainingConfig,
        TrainingPhase,
        pretrain,
    )

_HOMES = {
    "hooks": (
        "IGNORED", "LabelledRows", "PackedTokens", "masked_head", "packed_attention", "unpad",
    ),
    "lamb": ("FusedLAMB",),
    "shards": ("CorpusError", "MaskedBatches", "ShardedTokens", "write_shards"),
    "training": ("PretrainingConfig", "TrainingPhase", "pretrain"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
