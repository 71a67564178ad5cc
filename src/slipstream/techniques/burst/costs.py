"""Times of a chain of layers on a cluster, for the planner."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from slipstream.cluster import Cluster, Collective, Group
from slipstream.techniques.burst.planner import BurstLayer, Floats


def device_options(workers: int, samples: int) -> tuple[int, ...]:
    """Return the numbers of devices that divide a batch evenly, from 1 to `workers`."""
    return tuple(g for g in range(1, min(workers, samples) + 1) if samples % g == 0)


def burst_layers(
    cluster: Cluster,
    devices: Sequence[int],
    names: Sequence[str],
    times_ns: Floats,
    gradient_bytes: Sequence[float],
    output_bytes: Sequence[float],
) -> list[BurstLayer]:
    """Return the layers of a chain on the first devices of a cluster.

    Gradients are assumed not to overlap with computation, so that plans with many parameters on
    many devices are estimated too slow rather than too fast.

    Args:
        devices: the options.
        times_ns: float64 [layers, options], forward and backward pass of a device's share.
        gradient_bytes: of each layer's parameters.
        output_bytes: of each layer's output for the whole batch.
    """

    @functools.cache
    def reduced(nbytes: float) -> Floats:
        groups = [Group.of(np.arange(g)) for g in devices]
        return np.array(
            [cluster.cost(Collective("all_reduce", nbytes, group)).duration_ns for group in groups]
        )

    @functools.cache
    def moved(nbytes: float) -> Floats:
        one_way = np.array(
            [[cluster.cost(reshard(nbytes, a, b)).duration_ns for b in devices] for a in devices]
        )
        both: Floats = one_way + one_way.T
        return both

    columns = zip(names, np.asarray(times_ns), gradient_bytes, output_bytes, strict=True)
    return [
        BurstLayer(name, times + reduced(gradients), moved(outputs))
        for name, times, gradients, outputs in columns
    ]


def reshard(nbytes: float, senders: int, receivers: int) -> Collective:
    """Return the move of a batch from the first `senders` devices to the first `receivers`."""
    return Collective("reshard", nbytes, Group.of(np.arange(senders)), servers=(*range(receivers),))
