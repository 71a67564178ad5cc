"""Gradients summed in the network: an aggregator for ranks on shared links.

    import slipstream as ss

    # slipstream cluster aggregate serve --listen 10.0.0.9:4700, then on every rank:
    ss.aggregation.attach(DistributedDataParallel(model), "10.0.0.9:4700")

Source: Gebara, Ghobadi, Costa, "In-network aggregation for shared machine learning clusters",
MLSys 2021.
"""

from __future__ import annotations

from slipstream.engines.aggregation.hook import AggregatedGradients, attach
from slipstream.engines.aggregation.measuring import AllReduceComparison, compare_all_reduce
from slipstream.engines.aggregation.member import AggregatorLostError, JobMember
from slipstream.engines.aggregation.predicting import (
    FabricLoad,
    FabricOutcome,
    FabricPrediction,
    predict_aggregation,
)
from slipstream.engines.aggregation.protocol import TOKEN_VARIABLE, AggregationError
from slipstream.engines.aggregation.server import AggregationServer

__all__ = [
    "TOKEN_VARIABLE",
    "AggregatedGradients",
    "AggregationError",
    "AggregationServer",
    "AggregatorLostError",
    "AllReduceComparison",
    "FabricLoad",
    "FabricOutcome",
    "FabricPrediction",
    "JobMember",
    "attach",
    "compare_all_reduce",
    "predict_aggregation",
]
