"""Transfers: rates by hand, invariants on random programs, invalid input."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.native import Edges, Flows, Policy, Program, Resources, Schedule
from slipstream_bench.programs import random_transfers
from slipstream_bench.systems.cluster.certificate import certificate_violations

Backend = Literal["native", "python"]
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(params=["native", "python"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


def flows(capacity: list[float], paths: list[list[int]], nbytes: list[float], **more: Any) -> Flows:
    offset = np.cumsum([0, *map(len, paths)])
    return Flows(
        np.array(capacity), offset, np.array(list(itertools.chain(*paths)), int), nbytes, **more
    )


def run(
    backend: Backend,
    given_flows: Flows,
    latency: list[float] | None = None,
    policies: list[int] | None = None,
    **more: Any,
) -> Schedule:
    tasks = given_flows.nbytes.size
    program = Program(
        lane=more.pop("lane", np.zeros(tasks, int)),
        duration_ns=np.zeros(tasks) if latency is None else np.array(latency),
        policies=np.array(policies or [Policy.CONCURRENT]),
        flows=given_flows,
        **more,
    )
    return program.compile(backend).simulate(rate_changes=True)


def test_two_flows_share_a_link_and_the_last_gets_all_of_it(backend: Backend) -> None:
    result = run(backend, flows([2.0], [[0], [0]], [4.0, 8.0]))
    # 1 each until 4 ns; then the other has 4 bytes left at 2.
    assert result.end_ns[0].tolist() == [4.0, 6.0]


def test_a_flow_limited_elsewhere_leaves_its_share(backend: Backend) -> None:
    # Flow 0 is limited to 1 by link 0; flow 1 takes the other 9 of link 1.
    result = run(backend, flows([1.0, 10.0], [[0, 1], [1]], [4.0, 9.0]))
    assert result.end_ns[0].tolist() == [4.0, 1.0]
    assert result.rate_changes is not None
    assert result.rate_changes.link.tolist() == [0, 1]


def test_shares_follow_weights(backend: Backend) -> None:
    result = run(backend, flows([4.0], [[0], [0]], [30.0, 10.0], weight=[3.0, 1.0]))
    assert result.end_ns[0].tolist() == [10.0, 10.0]


def test_an_urgent_flow_goes_first_and_the_others_wait(backend: Backend) -> None:
    result = run(backend, flows([2.0], [[0], [0]], [4.0, 4.0]), priority=[1, 0])
    assert result.end_ns[0].tolist() == [4.0, 2.0]


def test_latency_precedes_the_bytes(backend: Backend) -> None:
    result = run(backend, flows([2.0], [[0], [0]], [4.0, 4.0]), latency=[1.0, 0.0])
    # Flow 1 alone until 1 ns (2 bytes), then both at 1: flow 1 ends at 3, flow 0 has 2 bytes left.
    assert result.end_ns[0].tolist() == [4.0, 3.0]
    assert result.start_ns[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.FIFO, Policy.PRIORITY])
def test_an_exclusive_lane_transfers_one_at_a_time(backend: Backend, policy: Policy) -> None:
    result = run(
        backend,
        flows([2.0], [[0], [0], [0]], [4.0, 4.0, 4.0]),
        lane=np.array([0, 0, 1]),
        policies=[policy, Policy.CONCURRENT],
        gap_ns=[1.0, 0.0, 0.0],
    )
    # 0 and 2 share until 4 ns; lane 0 is blocked until 5; then 1 has the link alone.
    assert result.end_ns[0].tolist() == [4.0, 7.0, 4.0]


def test_tasks_of_both_kinds_wait_for_each_other(backend: Backend) -> None:
    program = Program(
        lane=[0, 1, 0],
        duration_ns=[3.0, 1.0, 2.0],
        policies=[Policy.FIXED, Policy.CONCURRENT],
        edges=Edges([0, 1, 1], [1, 2, 0], lag=[0, 0, 1]),
        flows=flows([2.0], [[], [0], []], [0.0, 8.0, 0.0]),
        steps=2,
    )
    result = program.compile(backend).simulate()
    assert result.start_ns.tolist() == [[0.0, 3.0, 8.0], [10.0, 13.0, 18.0]]
    assert result.end_ns.tolist() == [[3.0, 8.0, 10.0], [13.0, 18.0, 20.0]]
    assert result.step_end_ns.tolist() == [10.0, 20.0]
    assert result.lane_busy_ns.tolist() == [10.0, 10.0]


def test_a_concurrent_lane_runs_all_at_once(backend: Backend) -> None:
    program = Program(
        lane=[0, 0, 0], duration_ns=[3.0, 1.0, 2.0], policies=[Policy.CONCURRENT],
        edges=Edges([1], [2]),
    )  # fmt: skip
    result = program.compile(backend).simulate()
    assert result.start_ns[0].tolist() == [0.0, 0.0, 1.0]
    assert result.makespan_ns == 3.0


def test_many_equal_transfers_end_at_the_same_time(backend: Backend) -> None:
    paths = [[i, (i + 1) % 7] for i in range(7)]
    result = run(backend, flows([0.7] * 7, paths, [0.1] * 7))
    assert len(set(result.end_ns[0].tolist())) == 1


@settings(max_examples=60, deadline=None)
@given(seeds, st.booleans())
def test_rates_are_fair_after_every_event_and_both_engines_agree(seed: int, chained: bool) -> None:
    program = random_transfers(np.random.default_rng(seed), chained=chained)
    native = program.compile("native").simulate(rate_changes=True)
    python = program.compile("python").simulate(rate_changes=True)
    assert certificate_violations(native)[0] == 0
    assert native.end_ns.tobytes() == python.end_ns.tobytes()
    assert native.start_ns.tobytes() == python.start_ns.tobytes()
    assert native.rate_changes is not None
    assert python.rate_changes is not None
    for name in ("time_ns", "rate", "instance", "link"):
        ours, theirs = getattr(native.rate_changes, name), getattr(python.rate_changes, name)
        assert ours.tobytes() == theirs.tobytes(), name


def test_the_certificate_detects_an_unfair_rate() -> None:
    result = run("native", flows([2.0], [[0], [0]], [4.0, 8.0]))
    assert certificate_violations(result) == (0, 3)
    assert result.rate_changes is not None
    result.rate_changes.rate[:2] = [0.5, 1.5]
    assert certificate_violations(result)[0] > 0


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_sent_bytes_arrive(seed: int) -> None:
    program = random_transfers(np.random.default_rng(seed))
    result = program.compile().simulate(rate_changes=True)
    assert program.flows is not None
    changes = result.rate_changes
    assert changes is not None
    moved = np.zeros(program.steps * program.tasks)
    last = dict.fromkeys(range(moved.size), (0.0, 0.0))
    for time, rate, instance in zip(changes.time_ns, changes.rate, changes.instance, strict=True):
        since, before = last[instance]
        moved[instance] += before * (time - since)
        last[instance] = (time, rate)
    for instance, (since, before) in last.items():
        moved[instance] += before * (result.end_ns.reshape(-1)[instance] - since)
    expected = np.tile(program.flows.nbytes, program.steps)
    np.testing.assert_allclose(moved, expected, rtol=1e-9, atol=1e-9)


def test_capacity_for_changes_grows_if_needed() -> None:
    # Flows end one after the other on a link that all share: many changes for few flows.
    count = 60
    result = run("native", flows([1.0], [[0]] * count, list(range(1, count + 1))))
    assert result.rate_changes is not None
    assert result.rate_changes.time_ns.size == count * (count + 1) // 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"capacity": [0.0]}, GraphError, r"\blink 0\b.*\btask 0\b"),
        ({"capacity": [np.nan]}, InvalidArgumentError, "flows.capacity: link 0 has nan"),
        ({"nbytes": [-1.0]}, InvalidArgumentError, "flows.nbytes: task 0 has -1.0"),
        ({"nbytes": [np.inf]}, InvalidArgumentError, "flows.nbytes: task 0 has inf"),
        ({"weight": [0.0]}, InvalidArgumentError, "task 0 has weight 0"),
        ({"path_link": [1]}, InvalidArgumentError, "hop 0 names link 1, of 1"),
        (
            {"path_offset": [0, 2], "path_link": [0, 0]},
            InvalidArgumentError,
            "a link twice: link 0",
        ),
        ({"path_offset": [0, 0], "path_link": []}, InvalidArgumentError, "no path"),
        ({"path_offset": [0, 2]}, InvalidArgumentError, "path_offset: .* 0 to 1"),
    ],
)
def test_invalid_flows_are_refused(change: dict[str, Any], error: type, message: str) -> None:
    good = {"capacity": [1.0], "path_offset": [0, 1], "path_link": [0], "nbytes": [1.0]}
    with pytest.raises(error, match=message):
        Flows(**{**good, **change})


def test_lanes_that_do_not_match_are_refused() -> None:
    single = flows([1.0], [[0]], [1.0])
    with pytest.raises(InvalidArgumentError, match=r"\bPREEMPTIVE\b"):
        Program(lane=[0], duration_ns=[0.0], policies=[Policy.PREEMPTIVE], flows=single)
    with pytest.raises(InvalidArgumentError, match="has a gap"):
        Program(lane=[0], duration_ns=[0.0], gap_ns=[1.0], policies=[Policy.CONCURRENT])
    with pytest.raises(InvalidArgumentError, match="has a resource"):
        Program(
            lane=[0], duration_ns=[0.0], policies=[Policy.CONCURRENT],
            resources=Resources([1], [0], [0], [1]),
        )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"\b1\b.*\b2 tasks\b"):
        Program(lane=[0, 0], duration_ns=[0.0, 0.0], flows=single)
