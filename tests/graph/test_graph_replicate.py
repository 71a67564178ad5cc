"""One step on many ranks: equal ranks are as fast as one, others wait for the slowest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.graph import Dependency, Graph, Kind, load, replace_tasks, replay, replicate, save
from small_steps import FAST, SLOW, graph_of, shared


@pytest.fixture(scope="module")
def step() -> Graph:
    return shared(graph_of("transformer"), SLOW, "ddp:4,bucket_mb=0.004")


def test_one_rank_is_the_graph_itself(step: Graph) -> None:
    plain = graph_of("mlp")
    single = replicate(plain, 1)
    assert len(single.edits) == len(plain.edits) + 1
    assert single == replace(plain, edits=single.edits, meta=single.meta)


def test_equal_ranks_take_as_long_as_one(step: Graph) -> None:
    four = replicate(step, 4)
    assert len(four) == 4 * len(step) + len(step.exchanges)
    assert len(four.exchanges) == 4 * len(step.exchanges)
    assert four.samples == step.samples
    assert four.workers == 4
    timeline, alone = replay(four), replay(step)
    assert timeline.step_ns == alone.step_ns
    copies = 4 * len(step)
    np.testing.assert_array_equal(timeline.end_ns[:copies], np.tile(alone.end_ns, 4))
    assert timeline.peak_bytes == alone.peak_bytes
    assert (four.tasks.rank[:copies] == np.repeat(np.arange(4), len(step))).all()
    # Ranks share no tensors.
    storages = [set(part[part >= 0].tolist()) for part in np.split(four.operands, 4)]
    assert not set.intersection(*storages)


def test_independent_lanes_continue_without_waiting() -> None:
    plain = graph_of("mlp")
    two = replicate(plain, 2)
    assert two.samples == 2 * plain.samples
    slowed = two.tasks.duration_ns.copy()
    slowed[len(plain) :] *= 2
    timeline = replay(replace_tasks(two, duration_ns=slowed))
    ends = np.split(timeline.end_ns, 2)
    np.testing.assert_array_equal(ends[0], replay(plain).end_ns)
    assert ends[1][-1] > ends[0][-1]


def test_every_exchange_begins_when_the_last_rank_is_ready(step: Graph) -> None:
    four, n = replicate(step, 4), len(step)
    slow = four.tasks.duration_ns.copy()
    third = slice(2 * n, 3 * n)
    slow[third] = np.where(
        four.tasks.kind[third] == Kind.COMMUNICATION, slow[third], 3 * slow[third]
    )
    four = replace_tasks(four, duration_ns=slow)
    timeline = replay(four)
    for row in step.exchanges:
        begins = timeline.start_ns[row.task + n * np.arange(4)]
        ready = timeline.end_ns[row.ready + n * np.arange(4)]
        assert (begins == begins[0]).all()
        assert begins[0] >= ready.max() == ready[2]
    # An edge from and to each rank for each exchange.
    across = (four.edges.source >= 4 * n) | (four.edges.target >= 4 * n)
    assert across.sum() == 2 * 4 * len(step.exchanges)
    assert (four.edges.kind[across] == Dependency.COMMUNICATION).all()
    assert len(replicate(replace(step, meta={**step.meta, "workers": 1}), 256).edges) < 256 * (
        len(step.edges) + len(step.exchanges) + 1
    )


def test_a_step_waits_for_the_slowest_as_in_the_closed_form() -> None:
    """`ddp:jitter` adds the mean, over many draws, of the delay of the slowest rank."""
    jitter = 0.05
    fast, noted = (
        shared(graph_of("transformer"), FAST, f"ddp:4,bucket_mb=0.004{more}")
        for more in ("", f",jitter={jitter}")
    )
    equal = replay(fast).step_ns
    steps = [replay(replicate(fast, 4, jitter=jitter, seed=k)).step_ns for k in range(60)]
    assert min(steps) < equal < max(steps)
    assert np.mean(steps) - equal == pytest.approx(replay(noted).step_ns - equal, rel=0.2)


def test_pace_depends_on_the_seed_and_not_on_links(step: Graph) -> None:
    first, again, other = (replicate(step, 4, jitter=0.1, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    talks = first.tasks.kind == Kind.COMMUNICATION
    np.testing.assert_array_equal(
        first.tasks.duration_ns[talks], replicate(step, 4).tasks.duration_ns[talks]
    )


def test_replicas_can_be_saved(step: Graph, tmp_path: Path) -> None:
    made = replicate(step, 4, jitter=0.1)
    path = tmp_path / "four.slipgraph"
    save(made, path)
    assert load(path) == made


@pytest.mark.parametrize(
    ("ranks", "jitter", "message"),
    [(0, 0.0, "0 ranks"), (3, 0.0, "3 ranks for a step of 4"), (4, 1.0, "not between"),
     (4, float("nan"), "not between")],
)  # fmt: skip
def test_invalid_replications_are_refused(
    step: Graph, ranks: int, jitter: float, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replicate(step, ranks, jitter=jitter)
