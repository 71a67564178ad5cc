"""Gradients summed in the network: an aggregator for ranks on shared links.

    import slipstream as ss

    with ss.aggregation.Aggregator("10.0.0.9:4700") as aggregator:  # or `cluster aggregate serve`
        ...
    ss.aggregation.attach(DistributedDataParallel(model), "10.0.0.9:4700")  # on every rank

Source: Gebara, Ghobadi, Costa, "In-network aggregation for shared machine learning clusters",
MLSys 2021.
"""

from __future__ import annotations

from slipstream.engines.aggregation.aggregator import Aggregator
from slipstream.engines.aggregation.hook import AggregatedGradients, attach
from slipstream.engines.aggregation.member import AggregatorLostError, JobMember
from slipstream.engines.aggregation.protocol import TOKEN_VARIABLE, AggregationError

__all__ = [
    "TOKEN_VARIABLE",
    "AggregatedGradients",
    "AggregationError",
    "Aggregator",
    "AggregatorLostError",
    "JobMember",
    "attach",
]
