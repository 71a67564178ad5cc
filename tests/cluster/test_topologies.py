"""Topologies: every route is a chain of links from one device to the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cluster import (
    Cluster,
    ClusterError,
    Collective,
    LinkKind,
    Topology,
    dragonfly,
    fat_tree,
    from_edges,
    gpu_hosts,
    islands,
    leaf_spine,
    loopback,
    mesh,
    nvswitch,
    rail,
    ring,
    star,
    torus,
)
from slipstream.errors import InvalidArgumentError

SLOW, FAST = LinkKind.of("slow", 1e9, 1000.0), LinkKind.of("fast", 4e9, 500.0)

MADE: dict[str, Callable[[], Topology]] = {
    "star": lambda: star(5, SLOW),
    "nvswitch": lambda: nvswitch(4, FAST),
    "loopback": lambda: loopback(3, FAST),
    "ring": lambda: ring(7, SLOW),
    "torus": lambda: torus((3, 4, 2), SLOW, (True, False, True)),
    "mesh": lambda: mesh((3, 4), SLOW),
    "leaf_spine": lambda: leaf_spine(20, 6, 3, SLOW, 2.0),
    "fat_tree": lambda: fat_tree(4, SLOW),
    "gpu_hosts": lambda: gpu_hosts(3, 4, FAST, FAST, SLOW),
    "rail": lambda: rail(3, 4, FAST, SLOW),
    "dragonfly": lambda: dragonfly(5, 2, 2, SLOW, FAST),
    "islands": lambda: islands(
        [torus((4, 2), SLOW, per_host=4), star(3, FAST), gpu_hosts(2, 2, FAST, FAST, SLOW)],
        FAST,
        SLOW,
    ),
    "from_edges": lambda: from_edges(
        [("a", "s", SLOW), ("b", "s", SLOW), ("a", "t", FAST), ("t", "b", FAST), ("b", "c", FAST)],
        ["a", "b", "c"],
    ),
}


def check_routes(made: Topology, key: int = 0) -> None:
    src, dst = np.nonzero(~np.eye(made.devices, dtype=bool))
    counts, links = made.paths(src, dst, np.full(src.size, key))
    ends = np.cumsum(counts)
    for s, d, end, count in zip(src, dst, ends, counts, strict=True):
        path = links[end - count : end]
        at = made.node_of_device[s]
        for link in path:
            assert made.link_src[link] == at
            at = made.link_dst[link]
        assert at == made.node_of_device[d]
        assert len(set(path.tolist())) == count > 0


@pytest.mark.parametrize("name", MADE)
def test_routes_lead_from_one_device_to_the_other(name: str) -> None:
    made = MADE[name]()
    check_routes(made)
    check_routes(made, key=3)
    assert made.route(0, 0) == []
    assert len({(made.link(n).src, made.link(n).dst, n) for n in range(made.links)}) == made.links


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3).filter(
        lambda dims: 1 < np.prod([size for size, _ in dims]) <= 40
    )
)
def test_a_torus_of_any_shape_routes_the_shortest_way(dims: list[tuple[int, bool]]) -> None:
    sizes, wrap = tuple(size for size, _ in dims), tuple(wrapped for _, wrapped in dims)
    made = torus(sizes, SLOW, wrap)
    check_routes(made)
    for a in range(made.devices):
        at, to = np.unravel_index(a, sizes), np.unravel_index(made.devices - 1, sizes)
        away = [abs(int(x) - int(y)) for x, y in zip(at, to, strict=True)]
        short = [min(d, n - d) if w else d for d, n, w in zip(away, sizes, wrap, strict=True)]
        assert len(made.route(a, made.devices - 1)) == sum(short)


def test_equal_paths_are_spread_by_hash() -> None:
    made = leaf_spine(64, 8, 4, SLOW)
    spines = {made.route(0, 63, key)[1] for key in range(64)}
    assert len(spines) == 4
    assert made.route(0, 63, 7) == made.route(0, 63, 7)


def test_oversubscription_narrows_the_uplinks() -> None:
    made = leaf_spine(64, 8, 4, SLOW, oversubscription=4.0)
    assert made.capacity[made.route(0, 63)].tolist() == [1e9, 0.5e9, 0.5e9, 1e9]


def test_devices_of_one_host_do_not_use_its_card() -> None:
    made = gpu_hosts(2, 4, FAST, FAST, SLOW)
    assert {made.link(n).kind.name for n in made.route(0, 3)} == {"fast"}
    assert {made.link(n).kind.name for n in made.route(0, 4)} == {"fast", "slow"}


def test_an_explicit_route_is_used() -> None:
    made = from_edges([("a", "b", SLOW), ("a", "s", FAST), ("s", "b", FAST)], ["a", "b"])
    assert len(made.route(0, 1)) == 1
    around = [n for n in range(made.links) if made.link_name(n) in ("a -> s", "s -> b")]
    other = made.with_routes({(0, 1): around})
    assert other.route(0, 1) == around
    assert other.route(1, 0) == made.route(1, 0)
    with pytest.raises(ClusterError, match=r"broken.*\blink \d"):
        made.with_routes({(0, 1): around[::-1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: star(0, SLOW), "devices: 0 is not a positive integer"),
        (lambda: fat_tree(3, SLOW), "k: 3 is odd"),
        (lambda: torus((2, 2), SLOW, (True,)), "wrap: has 1 entries for 2"),
        (lambda: leaf_spine(8, 4, 2, SLOW, 0.0), "oversubscription: 0.0"),
        (lambda: from_edges([("a", "a", SLOW)], ["a"]), "connected to itself"),
        (lambda: from_edges([], []), "devices: is empty"),
        (lambda: islands([], SLOW, SLOW), "parts: is empty"),
        (lambda: LinkKind.of("x", float("nan")), "not a finite number"),
        (lambda: star(2, SLOW).route(0, 5), "dst: 5 is not a device; there are 2"),
        (lambda: star(2, SLOW).with_capacity(9, 1.0), "link: 9 is not a link"),
    ],
)
def test_invalid_topologies_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_disconnected_devices_are_named() -> None:
    made = from_edges([("a", "b", SLOW), ("c", "d", SLOW)], ["a", "b", "c", "d"])
    with pytest.raises(ClusterError, match=r"\bdevice 1\b.*\bdevice 2\b"):
        Cluster("apart", made).cost(Collective("all_reduce", 1e6, algo="ring"))
