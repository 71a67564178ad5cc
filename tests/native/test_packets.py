"""Transfers as packets: the native engine against the Python one, and invariants of queues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.native import Edges, Flows, Packets, Policy, Program, Schedule
from slipstream_bench.programs import random_packets


def program(
    paths: list[list[int]],
    nbytes: list[float],
    capacity: list[float],
    *,
    start_ns: list[float] | None = None,
    priority: list[int] | None = None,
    **model: Any,
) -> Program:
    links = len(capacity)
    arguments: dict[str, Any] = {
        "latency_ns": np.full(links, 1000.0),
        "queue_bytes": np.full(links, np.inf),
        "mark_bytes": np.full(links, np.inf),
        "payload_bytes": 1000.0,
        "header_bytes": 0.0,
        **model,
    }
    return Program(
        lane=np.zeros(len(paths), np.int32),
        duration_ns=np.array(start_ns or [0.0] * len(paths)),
        priority=np.array(priority or [0] * len(paths)),
        policies=np.array([Policy.CONCURRENT], np.uint8),
        flows=Flows(
            capacity=np.array(capacity),
            path_offset=np.concatenate([[0], np.cumsum([len(path) for path in paths])]),
            path_link=np.concatenate([np.array(path, np.int32) for path in paths]),
            nbytes=np.array(nbytes),
            packets=Packets(**arguments),
        ),
    )


def end_ns(result: Schedule) -> list[float]:
    ends: list[float] = result.end_ns[0].tolist()
    return ends


@pytest.mark.parametrize("seed", range(40))
def test_both_engines_agree_bitwise(seed: int) -> None:
    arguments = random_packets(np.random.default_rng(seed))
    native = arguments.compile("native").simulate()
    python = arguments.compile("python").simulate()
    assert native.start_ns.tobytes() == python.start_ns.tobytes()
    assert native.end_ns.tobytes() == python.end_ns.tobytes()
    assert native.queues is not None
    assert python.queues is not None
    for ours, theirs in zip(
        vars(native.queues).values(), vars(python.queues).values(), strict=True
    ):
        assert ours.tobytes() == theirs.tobytes()


def test_samples_include_drops_marks_and_retransmissions() -> None:
    dropped = marked = again = 0
    for seed in range(40):
        queues = random_packets(np.random.default_rng(seed)).compile().simulate().queues
        assert queues is not None
        dropped += int(queues.dropped.sum())
        marked += int(queues.marked.sum())
        again += int(queues.sent_again.sum())
    assert min(dropped, marked, again) > 100


def test_one_packet_is_stored_and_forwarded() -> None:
    # 500 bytes at 1 byte/ns, 1000 ns of latency, and the same again.
    assert end_ns(program([[0, 1]], [500.0], [1.0, 1.0]).compile().simulate()) == [3000.0]


def test_a_large_window_saturates_the_link() -> None:
    wide = program([[0, 1]], [100e3], [1.0, 1.0], first_window=1000)
    # The bytes plus one packet, on the second link, and two latencies.
    assert end_ns(wide.compile().simulate()) == [101e3 + 2000.0]


def test_a_window_of_one_waits_for_every_acknowledgement() -> None:
    narrow = program([[0]], [10e3], [1.0], first_window=1, max_window=1)
    # A packet takes 1000 ns, and another 2000 for the round trip, which the last one does not need.
    assert end_ns(narrow.compile().simulate()) == [10 * 3000.0 - 1000.0]


def test_with_large_queues_it_takes_as_long_as_a_fluid() -> None:
    both = program([[0, 2], [1, 2]], [1e6, 1e6], [1.0, 1.0, 1.0], latency_ns=np.zeros(3))
    ends = both.compile().simulate().end_ns[0]
    assert both.flows is not None
    fluid = replace(both, flows=replace(both.flows, packets=None)).compile().simulate()
    assert ends == pytest.approx(fluid.end_ns[0], rel=0.01)


def test_dropped_packets_are_sent_again_and_arrive() -> None:
    # 32 concurrent senders into one link with a queue of 20 packets.
    count = 32
    paths = [[1 + n, 0] for n in range(count)]
    incast = program(
        paths, [50e3] * count, [1.0] * (count + 1), queue_bytes=np.full(count + 1, 20e3)
    )
    result = incast.compile().simulate()
    assert result.queues is not None
    assert result.queues.dropped[0] > 100
    assert result.queues.dropped[1:].sum() == 0
    assert result.queues.sent_again.sum() >= result.queues.dropped[0]
    assert 0 < result.queues.peak_bytes[0] <= 20e3
    # No sooner than the bytes allow; later by the idle time until senders time out.
    assert result.makespan_ns >= count * 50e3


def test_marks_keep_the_queue_short() -> None:
    """Two long transfers: without marks they fill the queue, with marks it stays near them."""
    peaks = []
    for mark in (np.inf, 20e3):
        long = program(
            [[0, 2], [1, 2]], [3e6, 3e6], [1.0, 1.0, 1.0], queue_bytes=np.full(3, 200e3),
            mark_bytes=np.full(3, mark), latency_ns=np.full(3, 5000.0), timeout_ns=5e5,
        )  # fmt: skip
        result = long.compile().simulate()
        assert result.queues is not None
        peaks.append(float(result.queues.peak_bytes[2]))
        assert result.makespan_ns < 1.1 * 6e6
    assert peaks[1] < 0.4 * peaks[0]


def test_urgent_packets_go_first() -> None:
    paths, size = [[0, 2], [1, 2]], [1e6, 50e3]
    late = program(paths, size, [1.0] * 3, start_ns=[0.0, 5e5], priority=[1, 0])
    alone = program([[1, 2]], [50e3], [1.0] * 3, start_ns=[5e5]).compile().simulate()
    # At each of its two links a packet may already be in transmission.
    assert end_ns(late.compile().simulate())[1] <= end_ns(alone)[0] + 50 * 1000.0
    fair = program(paths, size, [1.0] * 3, start_ns=[0.0, 5e5]).compile().simulate()
    assert end_ns(fair)[1] > end_ns(late.compile().simulate())[1]


def test_packets_and_tasks_wait_for_each_other() -> None:
    single = program([[0], [0]], [1e3, 1e3], [1.0])
    chained = replace(single, edges=Edges(np.array([0]), np.array([1])), steps=2)
    assert end_ns(chained.compile().simulate()) == [2000.0, 4000.0]
    assert chained.compile().simulate().end_ns.shape == (2, 2)


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        ({"payload_bytes": 0.0}, "payload_bytes"),
        ({"header_bytes": float("nan")}, "header_bytes"),
        ({"timeout_ns": -1.0}, "timeout_ns"),
        ({"first_window": 0}, "first_window"),
        ({"queue_bytes": np.array([-1.0])}, "queue_bytes"),
        ({"mark_bytes": np.array([np.nan])}, "mark_bytes"),
        ({"latency_ns": np.array([-1.0])}, "latency_ns"),
        (dict.fromkeys(("latency_ns", "queue_bytes", "mark_bytes"), np.ones(2)), "packets"),
        ({"payload_bytes": 1.0, "nbytes": [1e12]}, "nbytes"),
    ],
)  # fmt: skip
def test_invalid_models_are_refused_by_name(model: dict[str, Any], argument: str) -> None:
    changed = dict(model)
    nbytes = changed.pop("nbytes", [1e3])
    with pytest.raises(InvalidArgumentError, match=argument):
        program([[0]], nbytes, [1.0], **changed)


def test_invalid_weights_and_rates_are_refused() -> None:
    single = program([[0]], [1e3], [1.0])
    with pytest.raises(InvalidArgumentError, match="rate_changes"):
        single.compile().simulate(rate_changes=True)
    assert single.flows is not None
    with pytest.raises(InvalidArgumentError, match="weight"):
        replace(single.flows, weight=np.array([2.0]))


def random_trees(rng: np.random.Generator) -> Program:
    """Return `random_packets` in which half of the transfers go over trees."""
    chains = random_packets(rng)
    assert chains.flows is not None
    links, paths, parents = chains.flows.capacity.size, [], []
    for task in range(chains.tasks):
        first, last = chains.flows.path_offset[task : task + 2]
        path = chains.flows.path_link[first:last]
        parent = np.full(path.size, -2)
        if rng.random() < 0.5:
            up = int(rng.integers(1, links // 2 + 1))
            path = rng.permutation(links)[: 2 * up].astype(np.int32)
            parent = np.full(2 * up, -2)
            for hop in range(up):
                parent[hop] = -1 if rng.random() < 0.3 else rng.integers(hop + 1, up + 1)
            parent[:up][parent[:up] == up] = -1
        paths.append(path)
        parents.append(parent)
    offset = np.concatenate([[0], np.cumsum([path.size for path in paths])])
    flows = replace(
        chains.flows, path_offset=offset, path_link=np.concatenate(paths),
        tree_parent=np.concatenate(parents),
    )  # fmt: skip
    return replace(chains, flows=flows)


@pytest.mark.parametrize("seed", range(30))
def test_both_engines_agree_bitwise_on_trees(seed: int) -> None:
    trees = random_trees(np.random.default_rng(seed))
    native, python = (trees.compile(name).simulate() for name in ("native", "python"))
    assert native.end_ns.tobytes() == python.end_ns.tobytes()
    assert native.queues is not None
    assert python.queues is not None
    for ours, theirs in zip(
        vars(native.queues).values(), vars(python.queues).values(), strict=True
    ):
        assert ours.tobytes() == theirs.tobytes()


def tree(nbytes: float, parent: list[int], capacity: list[float], **model: Any) -> Program:
    """Return one transfer over links 0, 1, ... and those back; `parent` is of the former."""
    up = len(parent)
    chain = program([list(range(2 * up))], [nbytes], capacity, **model)
    assert chain.flows is not None
    return replace(chain, flows=replace(chain.flows, tree_parent=np.array(parent + [-2] * up)))


def test_a_tree_sums_at_every_switch_and_copies_back() -> None:
    # Two racks of two hosts: host, leaf, leaf, host; 500 ns and 1000 ns of latency on each link.
    racks = tree(500.0, [4, 4, 5, 5, -1, -1], [1.0] * 12)
    assert end_ns(racks.compile().simulate()) == [4 * 1500.0]
    # The slowest host delays all.
    slow = tree(500.0, [4, 4, 5, 5, -1, -1], [1.0, 0.1, *[1.0] * 10])
    assert end_ns(slow.compile().simulate()) == [5000.0 + 1000.0 + 3 * 1500.0]


def test_a_tree_has_one_window_and_no_queues_at_links_that_are_not_the_slowest() -> None:
    hosts = tree(1e6, [-1] * 4, [1.0, 0.5, *[1.0] * 6], mark_bytes=np.full(8, 10e3))
    result = hosts.compile().simulate()
    assert result.makespan_ns == pytest.approx(2e6, rel=0.05)
    assert result.queues is not None
    assert result.queues.peak_bytes[1] > 5e3
    assert result.queues.peak_bytes[4:].max() == 0.0


def test_a_tree_that_loses_packets_arrives() -> None:
    lossy = tree(1e5, [-1] * 4, [1.0, 0.5, *[1.0] * 6], queue_bytes=np.full(8, 5e3))
    result = lossy.compile().simulate()
    assert result.queues is not None
    assert result.queues.dropped[1] > 0
    assert result.queues.sent_again[0] > 0


@pytest.mark.parametrize("parent", [[0, -1], [2, -1], [-1, -3]])
def test_malformed_trees_are_refused(parent: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="tree_parent"):
        tree(1e5, parent, [1.0] * 4)


def test_a_tree_needs_packets() -> None:
    chain = program([[0, 1]], [1e5], [1.0, 1.0])
    assert chain.flows is not None
    with pytest.raises(InvalidArgumentError, match="needs packets"):
        replace(chain.flows, packets=None, tree_parent=np.array([-1, -2]))
