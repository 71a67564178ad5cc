"""Caches of files and objects that learn from traces what will be read again.

    import slipstream as ss

    trace = ss.storage.import_trace("spans.json")
    ss.storage.predict_cache(trace, "10%").table().print()
    cache = ss.storage.ShardCache("/fast", "200GB", "s3://bucket/shards")

Source: Zhou and Maas, "Learning on Distributed Traces for Data Center Storage Systems", MLSys 2021.
"""

from __future__ import annotations

from slipstream.engines.storage.importing import import_trace
from slipstream.engines.storage.policies import POLICIES, CachePolicy
from slipstream.engines.storage.predictor import AccessForecast, AccessPredictor
from slipstream.engines.storage.proving import ReplayOutcome, ReplayProof, prove_cache
from slipstream.engines.storage.recording import record_trace
from slipstream.engines.storage.shard_cache import (
    CacheCounts,
    CachedDataset,
    ShardCache,
    throttled,
)
from slipstream.engines.storage.simulating import (
    CacheOutcome,
    CachePrediction,
    EpochGroup,
    StorageOrigin,
    StorageProfile,
    predict_cache,
    profile_storage,
    simulate,
)
from slipstream.engines.storage.tiering import (
    PriceSheet,
    StorageTier,
    TierOutcome,
    TierPrediction,
    predict_tiers,
)
from slipstream.engines.storage.traces import AccessTrace, TraceError

__all__ = [
    "POLICIES",
    "AccessForecast",
    "AccessPredictor",
    "AccessTrace",
    "CacheCounts",
    "CacheOutcome",
    "CachePolicy",
    "CachePrediction",
    "CachedDataset",
    "EpochGroup",
    "PriceSheet",
    "ReplayOutcome",
    "ReplayProof",
    "ShardCache",
    "StorageOrigin",
    "StorageProfile",
    "StorageTier",
    "TierOutcome",
    "TierPrediction",
    "TraceError",
    "import_trace",
    "predict_cache",
    "predict_tiers",
    "profile_storage",
    "prove_cache",
    "record_trace",
    "simulate",
    "throttled",
]
