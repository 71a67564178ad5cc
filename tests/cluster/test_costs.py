"""Costs of collectives: formulas, phases on a topology, and the simulator agree."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.cluster import (
    Cluster,
    ClusterError,
    Collective,
    Group,
    Job,
    LinkKind,
    Mesh,
    Quantity,
    Tasks,
    closed_form_ns,
    gpu_hosts,
    presets,
    ring,
    simulate,
    star,
    torus,
)
from slipstream.cluster.patterns import ALGORITHMS, phases, tree_parents
from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream_bench.systems.cluster.bars import bad_inputs
from slipstream_bench.systems.cluster.uncontended import uncontended_cases

LINK = LinkKind.of("link", 1e9, 1000.0)


def alone(cluster: Cluster, collective: Collective) -> float:
    tasks = Tasks()
    tasks.communicate(collective)
    return simulate(cluster, Job(tasks)).makespan_ns


def test_a_ring_by_hand() -> None:
    # Four ranks: 6 messages of 2 us (up and down the star), 1.5 S through every link.
    cost = Cluster("four", star(4, LINK)).cost(Collective("all_reduce", 1e6, algo="ring"))
    assert cost.duration_ns == pytest.approx(6 * 2000 + 1.5e6)
    assert cost.latency_ns == 12000
    assert cost.bytes_per_rank == 1.5e6
    assert cost.link_bytes.tolist() == [1.5e6] * 8
    assert cost.interval is None


def test_simulation_and_closed_form_agree_without_contention() -> None:
    count = 0
    for name, simulated, formula, latency in uncontended_cases(full=False):
        if "n=4096" in name or "n=1024" in name:
            continue
        assert abs(simulated - formula) <= 1e-3 * formula + latency, name
        count += 1
    assert count > 80


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_phases_move_what_the_algorithm_moves(kind: str, n: int) -> None:
    for algo in ALGORITHMS[kind]:
        # Aggregating switches belong to a network, which phases do not know.
        if (kind == "p2p" and n != 2) or algo == "in_network":
            continue
        if algo == "halving_doubling" and kind != "all_reduce" and n & (n - 1):
            with pytest.raises(InvalidArgumentError, match="power of two"):
                phases(kind, algo, (n,))
            continue
        total = sum(float(p.share.sum()) for p in phases(kind, algo, (n,), 16, 2))
        # The minimum that must cross between ranks; an all-reduce moves 2 (n - 1) S in total.
        least = {
            "all_reduce": 2 * (n - 1), "reduce_scatter": n - 1, "all_gather": n - 1,
            "broadcast": n - 1, "all_to_all": n - 1, "p2p": 1, "halo": 2 * (n - 1),
            "reshard": 1 - 2 / math.lcm(n, 2),
        }[kind]  # fmt: skip
        assert total >= least - 1e-9, algo
        if algo in ("ring", "line", "ring2", "tree", "dealt"):
            assert total == pytest.approx(least), algo


@pytest.mark.parametrize(("n", "receivers"), [(1, 4), (4, 1), (4, 2), (2, 6), (6, 4)])
def test_a_reshard_moves_the_rows_that_change_devices(n: int, receivers: int) -> None:
    rows, cluster = 24, Cluster("star", star(8, LINK))
    collective = Collective("reshard", rows, Group.of(range(n)), servers=tuple(range(receivers)))
    cost = cluster.cost(collective)
    sent = [sum(row % n == rank != row % receivers for row in range(rows)) for rank in range(n)]
    received = [
        sum(row % receivers == rank != row % n for row in range(rows)) for rank in range(receivers)
    ]
    assert cost.bytes_per_rank == pytest.approx(max(sent))
    assert cost.link_bytes.max() == pytest.approx(max(sent + received))
    with pytest.raises(InvalidArgumentError, match="needs receivers"):
        cluster.cost(Collective("reshard", rows, Group.of(range(n))))


@pytest.mark.parametrize(("n", "longer"), [(2, 3 / 2), (4, 7 / 6), (8, 15 / 14)])
def test_gloo_gathers_half_a_piece_later(n: int, longer: float) -> None:
    cluster = Cluster("star", star(n, LinkKind.of("link", 1e9)))
    durations = {
        algo: cluster.cost(Collective("all_gather", 1e6, algo=algo)) for algo in ("ring", "gloo")
    }
    assert durations["gloo"].duration_ns == pytest.approx(longer * durations["ring"].duration_ns)
    assert durations["gloo"].bytes_per_rank == durations["ring"].bytes_per_rank
    # The library's algorithm is not the cheapest.
    assert cluster.cost(Collective("all_gather", 1e6)).algo != "gloo"
    # One cable of a tenth: the ring is limited by it, and so is the algorithm listed first.
    capacity = cluster.topology.capacity.copy()
    capacity[0] /= 10
    unlike = Cluster("unlike", replace(cluster.topology, capacity=capacity))
    ring_ns, gloo_ns = (
        unlike.cost(Collective("all_gather", 1e6, algo=algo)).duration_ns for algo in durations
    )
    assert gloo_ns == pytest.approx(longer * ring_ns)
    assert ring_ns == pytest.approx(10 * durations["ring"].duration_ns)


@pytest.mark.parametrize("n", [2, 3, 6, 7, 16, 33])
def test_both_trees_span_and_no_rank_is_inside_both(n: int) -> None:
    trees = tree_parents(n)
    for parent in trees:
        assert np.count_nonzero(parent < 0) == 1
        for rank in range(n):
            seen = rank
            for _ in range(n):
                seen = int(parent[seen]) if parent[seen] >= 0 else seen
            assert parent[seen] < 0
    if n % 2 == 0:
        inside = [set(parent[parent >= 0].tolist()) for parent in trees]
        roots = {int(np.flatnonzero(parent < 0)[0]) for parent in trees}
        assert (inside[0] & inside[1]) <= roots


def test_the_two_dimensional_formula_matches_the_multipod() -> None:
    pod = Cluster.load("tpu-v3-multipod")
    cost = pod.cost(Collective("all_reduce", 102e6, algo="2d"))
    rate, alpha, x, y = 82.0, 1500.0, 128, 32
    formula = 2 * ((y - 1) / y * 102e6 / (2 * rate) + y / 2 * alpha) + 2 * (
        (x - 1) / x * 102e6 / y / rate + (x - 1) * alpha
    )
    assert cost.algo == "line*ring2"
    assert cost.duration_ns == pytest.approx(formula)
    assert cost.duration_ns < pod.cost(Collective("all_reduce", 102e6, algo="ring")).duration_ns / 4


def test_hosts_of_several_devices_reduce_locally_first() -> None:
    cluster = Cluster("hosts", gpu_hosts(4, 8, LinkKind.of("nv", 100e9), LINK, LINK))
    found = {a: cluster.cost(Collective("all_reduce", 1e9, algo=a)) for a in ("ring", "ring*ring")}
    # All eight devices of a host share one card: by dimensions it carries 2 (4 - 1) / 4 of S.
    assert found["ring*ring"].bottleneck.startswith("host")
    assert float(found["ring*ring"].link_bytes.max()) == pytest.approx(1.75e9)
    assert found["ring*ring"].duration_ns < found["ring"].duration_ns


def test_batched_costs_equal_single_ones_bitwise() -> None:
    cluster = Cluster("sixteen", star(16, LINK), alpha_ns=Quantity(500.0))
    rng = np.random.default_rng(0)
    size, ranks = 10 ** rng.uniform(0, 9, 300), rng.integers(1, 17, 300)
    names, which = ("ring", "auto"), rng.integers(0, 2, 300)
    many = cluster.cost_many_ns("all_reduce", size, ranks, names, which)
    for i in range(300):
        group = Group.of(range(ranks[i]))
        cost = cluster.cost(Collective("all_reduce", float(size[i]), group, names[which[i]]))
        assert many[i] == cost.duration_ns
    with pytest.raises(InvalidArgumentError, match="the cluster has 16"):
        cluster.cost_many_ns("all_reduce", [1.0], [17])
    with pytest.raises(InvalidArgumentError, match="nbytes: contains"):
        cluster.cost_many_ns("all_reduce", [np.nan], [2])


def test_a_formula_takes_arrays_and_refuses_invalid_values() -> None:
    settings: Any = {"alpha_ns": 1e3, "bytes_per_s": 1e9}
    got = closed_form_ns("all_reduce", "ring", [0.0, 1e6], [4, 4], **settings)
    assert got.tolist() == [6e3, 6e3 + 1.5e6]
    assert closed_form_ns("all_reduce", "tree", 1e6, 1, **settings) == 0.0
    with pytest.raises(InvalidArgumentError, match="nbytes"):
        closed_form_ns("all_reduce", "ring", -1.0, 4, **settings)
    with pytest.raises(UnknownNameError, match=r"\ball_reduce\b.*'tre'[^\n]*\n.*\btree\b"):
        closed_form_ns("all_reduce", "tre", 1.0, 4, **settings)


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(SlipstreamError):
        bad_inputs()[name]()


def test_a_link_without_capacity_is_named() -> None:
    whole = star(4, LINK)
    broken = Cluster("broken", whole.with_capacity(2, 0.0))
    with pytest.raises(ClusterError, match=r"link 2 \(device 2 -> switch 0\)"):
        alone(broken, Collective("all_reduce", 1e6, algo="ring"))
    # No message goes there.
    assert alone(broken, Collective("all_reduce", 1e6, Group.of([0, 1]), "ring")) > 0.0


def test_meshes_and_groups() -> None:
    cluster = Cluster("mesh", torus((4, 6), LINK))
    mesh = cluster.mesh((4, 3, 2), ("dp", "tp", "pp"))
    assert mesh["tp"].members.shape == (8, 3)
    assert mesh["tp"].members[0].tolist() == [0, 2, 4]
    assert mesh["dp", "pp"].shape == (4, 2)
    assert mesh.all().members.tolist() == [list(range(24))]
    assert mesh["dp"].only(1).members.tolist() == [[1, 7, 13, 19]]
    with pytest.raises(UnknownNameError, match="unknown axis 'dq'"):
        mesh["dq"]
    with pytest.raises(InvalidArgumentError, match="the cluster has 24"):
        cluster.mesh((5, 5), ("a", "b"))
    with pytest.raises(InvalidArgumentError, match=r"\bdevice 3\b.*\btwice\b"):
        Group.of([1, 3, 3])


def test_a_mesh_goes_to_torch_and_back() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        ours = Mesh(np.arange(8).reshape(4, 2), ("dp", "tp"))
        back = Mesh.from_device_mesh(ours.to_device_mesh())
    finally:
        dist.destroy_process_group()
    assert back.axes == ours.axes
    assert back.devices.tolist() == ours.devices.tolist()


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_saves_and_costs_the_same(name: str, tmp_path: Any) -> None:
    cluster = Cluster.load(name)
    if cluster.devices <= 64:
        cluster.save(tmp_path / "c.toml")
        again = Cluster.load(tmp_path / "c.toml")
        request = Collective("all_reduce", 1e8)
        assert again.cost(request).duration_ns == cluster.cost(request).duration_ns
        assert again.device == cluster.device
    assert all(kind.bytes_per_s.source for kind in cluster.topology.link_kinds)


def test_a_preset_takes_other_sizes() -> None:
    assert Cluster.load("h100x8-100gbe", hosts=64).devices == 512
    with pytest.raises(UnknownNameError, match="gpu_hosts setting"):
        Cluster.load("h100x8-100gbe", rows=3)


def test_the_short_form() -> None:
    cluster = Cluster.load("workers=4,link=1gbit,latency=50us,device=h100-sxm")
    cost = cluster.cost(Collective("p2p", 125e6, Group.of([0, 3])))
    assert cost.duration_ns == pytest.approx(50e3 + 1e9)
    assert cluster.price_per_hour is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers=4", "lacks link"),
        ("workers=x,link=1gbit", "'x'"),
        ("workers=4,link=fast", "'fast'"),
        ("wrokers=4,link=1gbit", r" workers\?"),
        ("h100x8-100gb", r"\bh100x8-100gbe\b"),
        ("workers=4,link=1gbit,device=h1000", "'h1000'"),
    ],
)
def test_a_malformed_name_is_reported(text: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        Cluster.load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "is not TOML"),
        ("name = 'a'", "topology: is missing"),
        ("[topology]\ngenerator = 'tors'", r"'tors'(.|\n)*\btorus\b"),
        ("[topology]\ngenerator = 'star'\ndevices = 2", "star needs link"),
        ("[topology]\ngenerator = 'star'\ndevices = 2\nlink = 'x'", "'x'"),
        ("tpology = 1\n[topology]\n", r"'tpology'(.|\n)*\btopology\?"),
        (
            "[topology]\ngenerator='star'\ndevices=2\nlink='x'\n[links.x]\nbytes_per_s = -1",
            r"links\.x\.bytes_per_s: -1",
        ),
    ],
)
def test_a_malformed_file_is_reported(text: str, message: str, tmp_path: Any) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(SlipstreamError, match=message):
        Cluster.load(tmp_path / "c.toml")


def test_a_cluster_can_be_pickled() -> None:
    cluster = Cluster("ring", ring(6, LINK))
    before = cluster.cost(Collective("all_reduce", 1e6)).duration_ns
    again = pickle.loads(pickle.dumps(cluster))
    assert again.cost(Collective("all_reduce", 1e6)).duration_ns == before


def test_the_slowest_link_on_the_path_limits_a_pipeline() -> None:
    # A chain of four on links of different speed, the last ten times as slow as the others.
    slow = star(4, LINK)
    capacity = slow.capacity.copy()
    ends = slow.node_of_device[3]
    capacity[(slow.link_src == ends) | (slow.link_dst == ends)] /= 10
    for algo in ("chain", "tree"):
        collective = Collective("broadcast", 1e6, algo=algo, chunks=4)
        cluster = Cluster("unlike", replace(slow, capacity=capacity))
        even = Cluster("alike", slow)
        found, fast = cluster.cost(collective).duration_ns, even.cost(collective).duration_ns
        simulated = alone(cluster, collective)
        assert found == pytest.approx(simulated, rel=0.35), algo
        assert found > 5 * fast
