"""Predictions of shared networks: by formula without contention, and what trees change."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.cluster import Aggregator, Cluster, LinkKind, leaf_spine, ring, star
from slipstream.cluster.errors import ClusterError
from slipstream.engines.aggregation import FabricLoad, FabricOutcome, predict_aggregation

LINK = LinkKind.of("10 Gbit/s", 1.25e9, 1000.0)
ALONE = FabricLoad(1, 4, 1e6, 1e6, 1, 10e6, load=0.0)


def job_ns(outcome: FabricOutcome) -> float:
    return float(outcome.job_ns.mean())


def test_a_job_alone_takes_the_time_of_its_bytes() -> None:
    found = predict_aggregation(Cluster("star", star(4, LINK)), ALONE, seeds=1)
    headers = (4096 + 90) / 4096
    for way, share in (("ring", 1.5), ("aggregated", 1.0)):
        expected = 1e6 + share * 1e6 / 1.25 * headers
        assert job_ns(found.outcomes[way][0]) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("trees", [1, 2, 4])
def test_more_trees_spread_a_job_over_more_uplinks(trees: int) -> None:
    cluster = Cluster("racks", leaf_spine(16, 4, 4, LINK, 2.0))
    load = FabricLoad(1, 16, 1e6, 0.0, 1, 10e6, load=0.0)
    found = predict_aggregation(cluster, load, trees=trees, seeds=1)
    carried = found.outcomes["aggregated"][0].link_bytes
    topology = cluster.topology
    hosts = topology.node_of_device
    ends = np.stack([topology.link_src, topology.link_dst])
    up = np.flatnonzero(~np.isin(ends, hosts).any(axis=0))
    assert carried[up].max() == pytest.approx(1e6 / trees)
    # A host's own cable carries each byte once per direction.
    assert carried.max() == pytest.approx(1e6)


def test_short_flows_are_the_same_and_faster_when_rings_share_uplinks() -> None:
    cluster = Cluster("racks", leaf_spine(32, 8, 2, LINK, 4.0))
    load = FabricLoad(4, 8, 2e6, 1e6, 1, 30e6, 0.05, 5e3)
    found = predict_aggregation(cluster, load, trees=2, seeds=1)
    ring_, tree = found.outcomes["ring"][0], found.outcomes["aggregated"][0]
    assert ring_.flow_ns.size == tree.flow_ns.size > 1000
    assert found.gains(job_ns)[0] > 1.25
    assert found.gains(lambda x: float(x.flow_ns.mean()))[0] > 1.0


def test_a_network_without_switches_is_refused() -> None:
    with pytest.raises((ClusterError, ValueError), match="no switches"):
        predict_aggregation(Cluster("ring", ring(4, LINK)), ALONE, seeds=1)


def test_a_network_in_which_some_switches_aggregate_is_refused() -> None:
    racks = leaf_spine(8, 4, 1, LINK)
    spine = int(racks.link_dst.max())
    some = racks.with_aggregators(Aggregator(64, 4096.0, 1e10), [spine])
    load = FabricLoad(1, 8, 1e5, 0.0, 1, 1e6, load=0.0)
    with pytest.raises(ClusterError, match="does not aggregate"):
        predict_aggregation(Cluster("some", some), load, seeds=1)
