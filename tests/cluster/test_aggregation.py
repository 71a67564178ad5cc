"""Aggregating switches: by formula, in trees of several tiers, and shared by jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cluster import (
    Aggregator,
    Cluster,
    ClusterError,
    Collective,
    Group,
    Job,
    LinkKind,
    Quantity,
    Tasks,
    Topology,
    closed_form_ns,
    fat_tree,
    gpu_hosts,
    leaf_spine,
    simulate,
    star,
    torus,
)
from slipstream.cluster.aggregation import aggregation_tree
from slipstream.errors import InvalidArgumentError

LINK = LinkKind.of("link", 1e9, 1000.0)
AMPLE = Aggregator(4096, 1024.0, 1e12)


def tasks_of(nbytes: float, algo: str = "in_network") -> Tasks:
    tasks = Tasks()
    tasks.communicate(Collective("all_reduce", nbytes, algo=algo))
    return tasks


def both(topology: Topology, nbytes: float, alpha_ns: float = 0.0) -> tuple[float, float]:
    """Return the times by closed form and by simulation."""
    cluster = Cluster("adds up", topology, alpha_ns=Quantity(alpha_ns))
    request = Collective("all_reduce", nbytes, algo="in_network")
    return cluster.cost(request).duration_ns, simulate(cluster, Job(tasks_of(nbytes))).makespan_ns


@pytest.mark.parametrize(
    ("depth", "made"), [(1, star(9, LINK)), (2, leaf_spine(20, 4, 2, LINK)), (3, fat_tree(4, LINK))]
)
@pytest.mark.parametrize(
    ("aggregator", "rate"),
    [
        (AMPLE, 1e9),
        (Aggregator(4096, 1024.0, 0.25e9), 0.25e9),
        # Two slots of 500 bytes per round trip of 1500 ns per hop.
        (Aggregator(2, 500.0, 1e12), None),
    ],
)
def test_up_and_down_the_tree_by_hand(
    depth: int, made: Topology, aggregator: Aggregator, rate: float | None
) -> None:
    rate = rate or 1000.0 / (2 * depth * 1500.0) * 1e9
    slot_ns = aggregator.slot_bytes
    by_hand = 2 * depth * 1000.0 + (2 * depth - 1) * slot_ns + 1e7 / rate * 1e9
    formula = closed_form_ns(
        "all_reduce", "in_network", 1e7, made.devices, alpha_ns=1000.0, bytes_per_s=1e9,
        depth=depth, aggregator=aggregator,
    )  # fmt: skip
    assert float(formula) == pytest.approx(by_hand)
    assert both(made.with_aggregators(aggregator), 1e7) == pytest.approx((by_hand, by_hand))


def test_a_rank_sends_one_message_and_receives_one() -> None:
    quiet, busy = (both(star(4, LINK).with_aggregators(AMPLE), 1e6, a)[0] for a in (0.0, 700.0))
    assert busy - quiet == pytest.approx(2 * 700.0)


def test_every_cable_carries_the_bytes_once_in_each_direction() -> None:
    topology = leaf_spine(16, 4, 2, LINK).with_aggregators(AMPLE)
    cluster = Cluster("adds up", topology)
    cost = cluster.cost(Collective("all_reduce", 1e6, algo="in_network"))
    timeline = simulate(cluster, Job(tasks_of(1e6)))
    assert timeline.link_bytes.tolist() == cost.link_bytes.tolist()
    assert set(cost.link_bytes.tolist()) == {0.0, 1e6}
    # 16 cables and 4 uplinks in both directions, 4 leaves and a spine.
    assert cost.link_bytes.sum() == 45e6
    assert cost.bytes_per_rank == 1e6


def test_switches_that_cannot_aggregate_forward_every_message() -> None:
    plain = leaf_spine(16, 4, 2, LINK)
    spines = [n for n in range(plain.nodes) if plain.node_name(n) in ("switch 4", "switch 5")]
    tree = aggregation_tree(plain.with_aggregators(AMPLE, spines), range(16))
    assert tree.depth == 2
    assert sorted(tree.streams.tolist()) == [1.0] * 33 + [4.0] * 8
    # An uplink is twice a cable: four streams take twice a cable's time.
    predicted, simulated = both(plain.with_aggregators(AMPLE, spines), 1e8)
    assert predicted == pytest.approx(simulated) == pytest.approx(2e8, rel=1e-3)


def test_groups_inside_a_leaf_stay_there_and_others_use_different_spines() -> None:
    topology = leaf_spine(16, 4, 2, LINK).with_aggregators(AMPLE)
    assert aggregation_tree(topology, [0, 1, 2]).depth == 1
    spine_tree, other = (aggregation_tree(topology, [first, first + 4]) for first in (0, 1))
    uplinks = [
        {link for link in tree.links.tolist() if topology.link(link).kind.name.endswith("uplink")}
        for tree in (spine_tree, other)
    ]
    assert not uplinks[0] & uplinks[1]


def test_jobs_share_aggregators() -> None:
    slow = Aggregator(4096, 1024.0, 0.5e9)
    cluster = Cluster("adds up", star(4, LINK).with_aggregators(slow))
    jobs = [Job(tasks_of(1e8), placement=Group.of(pair)) for pair in ((0, 1), (2, 3))]
    alone = simulate(cluster, jobs[:1]).makespan_ns
    assert simulate(cluster, jobs).makespan_ns == pytest.approx(2 * alone, rel=1e-3)


def test_auto_chooses_it_if_it_is_cheapest() -> None:
    topology = star(8, LINK)
    request = Collective("all_reduce", 1e8)
    assert Cluster("plain", topology).cost(request).algo != "in_network"
    adds = Cluster("adds up", topology.with_aggregators(AMPLE))
    assert adds.cost(request).algo == "in_network"
    ring = adds.cost(Collective("all_reduce", 1e8, algo="ring")).duration_ns
    assert ring / adds.cost(request).duration_ns == pytest.approx(1.75, rel=1e-3)
    slow = Cluster("slow", topology.with_aggregators(Aggregator(64, 1024.0, 0.1e9)))
    assert slow.cost(request).algo != "in_network"


def test_a_file_specifies_which_switches_aggregate(tmp_path: Path) -> None:
    text = (
        '[topology]\ngenerator = "star"\ndevices = 4\nlink = "nic"\n'
        "aggregator = { slots = 64, slot_bytes = 1024, bytes_per_s = 5e9 }\n"
        "[links.nic]\nbytes_per_s = 1e9\n"
    )
    path = tmp_path / "c.toml"
    path.write_text(text)
    loaded = Cluster.load(path)
    loaded.save(path)
    for cluster in (loaded, Cluster.load(path)):
        assert cluster.topology.aggregator == Aggregator(64, 1024.0, 5e9)
        assert cluster.topology.links == 9
        assert cluster.cost(Collective("all_reduce", 1e6)).algo == "in_network"
    for value in ("{ slots = 64 }", "3", "{ slots = 0, slot_bytes = 1, bytes_per_s = 1 }"):
        path.write_text(text.replace(text.split("\n")[4], f"aggregator = {value}"))
        with pytest.raises(InvalidArgumentError, match="aggregator"):
            Cluster.load(path)


def test_invalid_trees_are_refused() -> None:
    request = Collective("all_reduce", 1e6, algo="in_network")
    with pytest.raises(ClusterError, match=r"\bswitch\b"):
        Cluster("plain", star(4, LINK)).cost(request)
    with pytest.raises(InvalidArgumentError, match=r"\btorus\b"):
        torus((4, 4), LINK).with_aggregators(AMPLE)
    with pytest.raises(InvalidArgumentError, match="switches: 0 is not"):
        star(4, LINK).with_aggregators(AMPLE, [0])
    with pytest.raises(InvalidArgumentError, match=r"^\S*aggregator: "):
        closed_form_ns("all_reduce", "in_network", 1.0, 2, alpha_ns=1.0, bytes_per_s=1.0)
    adds = star(4, LINK).with_aggregators(AMPLE)
    with pytest.raises(ClusterError, match=r"link 2 \(device 2 -> switch 0\)"):
        Cluster("broken", adds.with_capacity(2, 0.0)).cost(request)
    with pytest.raises(InvalidArgumentError, match=r"\bin_network\b.*\bpackets\b"):
        simulate(Cluster("adds up", adds), Job(tasks_of(1e6)), fidelity="packet")
    # Every host's card is on the path, but only the fabric aggregates, not hosts.
    hosts = gpu_hosts(2, 2, LINK, LINK, LINK).with_aggregators(AMPLE)
    assert aggregation_tree(hosts, range(4)).depth == 2
