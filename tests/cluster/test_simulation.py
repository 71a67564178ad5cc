"""Jobs that share a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cluster import (
    Cluster,
    Collective,
    Group,
    Job,
    LinkKind,
    Queues,
    Tasks,
    from_edges,
    leaf_spine,
    simulate,
    star,
)
from slipstream.errors import GraphError, InvalidArgumentError
from slipstream_bench.systems.cluster.certificate import certificate_violations
from slipstream_bench.systems.cluster.traces import golden

LINK = LinkKind.of("link", 1e9, 0.0)
FOUR = Cluster("four", star(4, LINK))


def step(size: float, busy_ns: float = 0.0, ranks: int = 2, **more: Any) -> Tasks:
    tasks = Tasks()
    before = [tasks.compute(rank, busy_ns) for rank in range(ranks)] if busy_ns else []
    tasks.communicate(Collective("all_reduce", size, algo="ring", **more), before)
    return tasks


def test_iterations_follow_each_other() -> None:
    timeline = simulate(FOUR, Job(step(1e6, 5e6), iterations=3, placement=Group.of([0, 2])))
    assert timeline.job(0).iteration_ns.tolist() == [6e6] * 3
    assert timeline.makespan_ns == 18e6
    assert timeline.device_busy_ns.tolist() == [15e6, 0.0, 15e6, 0.0]
    assert timeline.link_bytes.sum() == 3 * 2 * 2 * 1e6
    assert timeline.job(0).exposed_ns(2).tolist() == [1e6] * 3


def test_jobs_of_different_lengths_are_written_with_equal_iterations() -> None:
    alone = simulate(FOUR, Job(step(1e6, 5e6), 3, Group.of([0, 1])))
    both = simulate(
        FOUR,
        [Job(step(1e6, 5e6), 3, Group.of([0, 1])), Job(step(1e6, 5e6), 2, Group.of([2, 3]))],
    )
    assert both.job(0).iteration_ns.tolist() == alone.job(0).iteration_ns.tolist()
    assert both.job(1).iteration_ns.size == 2


def shared_cable() -> Cluster:
    edges = [("a", "l", LINK), ("b", "l", LINK), ("l", "r", LINK), ("c", "r", LINK),
             ("d", "r", LINK)]  # fmt: skip
    return Cluster("two racks", from_edges(edges, ["a", "b", "c", "d"]))


def test_two_jobs_on_one_cable_take_twice_as_long_and_report_why() -> None:
    cluster = shared_cable()
    jobs = [Job(step(1e6), placement=Group.of(ends)) for ends in ([0, 2], [1, 3])]
    assert simulate(cluster, jobs[0]).makespan_ns == pytest.approx(1e6)
    timeline = simulate(cluster, jobs, explain=True)
    assert timeline.makespan_ns == pytest.approx(2e6)
    assert {b.name for b in timeline.bottlenecks()} == {"l -> r", "r -> l"}
    assert sum(b.share for b in timeline.bottlenecks(1)) == pytest.approx(1.0)
    assert timeline.link_utilisation().max() == pytest.approx(1.0)


def test_urgent_and_heavy_jobs_get_more() -> None:
    cluster = shared_cable()
    ends = [Group.of([0, 2]), Group.of([1, 3])]
    urgent = simulate(
        cluster, [Job(step(1e6), placement=ends[0]), Job(step(1e6), placement=ends[1], priority=-1)]
    )
    assert urgent.job(1).iteration_ns[0] == pytest.approx(1e6)
    assert urgent.job(0).iteration_ns[0] == pytest.approx(2e6)
    heavy = simulate(
        cluster, [Job(step(3e6), placement=ends[0], weight=3.0), Job(step(1e6), placement=ends[1])]
    )
    assert heavy.job(0).iteration_ns[0] == pytest.approx(heavy.job(1).iteration_ns[0])


def test_arrival_delays_the_first_iteration_only() -> None:
    timeline = simulate(FOUR, Job(step(1e6), 2, Group.of([0, 1]), arrival_ns=7e6))
    assert timeline.job(0).iteration_start_ns.tolist() == [7e6, 8e6]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_rate_is_fair_on_every_network(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = Cluster("shared", leaf_spine(16, 4, 2, LINK, float(rng.integers(1, 4))))
    jobs = []
    for _ in range(int(rng.integers(2, 6))):
        ranks = int(rng.integers(2, 6))
        kind = str(rng.choice(["all_reduce", "all_gather", "all_to_all", "broadcast"]))
        tasks = Tasks()
        before = [tasks.compute(rank, float(rng.integers(0, 3)) * 1e5) for rank in range(ranks)]
        tasks.communicate(Collective(kind, float(rng.integers(1, 9)) * 1e5,
                                     priority=int(rng.integers(0, 2))), before)  # fmt: skip
        members = Group.of(rng.permutation(16)[:ranks])
        jobs.append(Job(tasks, int(rng.integers(1, 4)), members, weight=float(rng.integers(1, 4))))
    timeline = simulate(cluster, jobs, explain=True)
    assert certificate_violations(timeline.schedule)[0] == 0
    assert timeline.link_utilisation().max() <= 1.0 + 1e-9


def test_the_golden_trace() -> None:
    result = golden(2000).program().compile().simulate()
    duration_ms = result.end_ns[0] / 1e6 - golden(2000).arrival_s * 1e3
    assert result.makespan_ns / 1e6 == pytest.approx(6.45826059, rel=1e-8)
    assert duration_ms.mean() == pytest.approx(0.0601187736, rel=1e-8)


def test_a_cycle_names_its_tasks() -> None:
    tasks = Tasks()
    first = tasks.compute(0, 1.0, name="forward")
    tasks.depend(first, tasks.compute(0, 1.0, [first], name="backward"))
    with pytest.raises(GraphError, match=r"forward of job 0.*backward of job 0"):
        simulate(FOUR, Job(tasks, name="mine"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulate(FOUR, []), "jobs: is empty"),
        (lambda: Job(Tasks()), "has no tasks"),
        (lambda: Job(step(1.0), 0), "iterations: 0"),
        (lambda: simulate(FOUR, Job(step(1e6, 1.0, ranks=5))), "rank 4, but the job has 4 devices"),
        (lambda: simulate(FOUR, Job(step(1.0), placement=Group.of([0, 9]))), "contains device 9"),
        (lambda: simulate(FOUR, Job(step(1.0))).bottlenecks(), "^explain: "),
        (lambda: simulate(FOUR, Job(step(1.0))).job(1), "job: 1 is not a job"),
    ],
)
def test_invalid_jobs_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    jobs = [Job(step(1e6, 2e6), 2, Group.of([0, 1])), Job(step(1e6), 2, Group.of([1, 2]))]
    simulate(FOUR, jobs, explain=True).to_perfetto(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 3 + 2 * 1
    rates = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["rate"] for e in rates) == pytest.approx(1.0)
    assert min(e["args"]["rate"] for e in rates) == 0.0


def test_hash_seeds_do_not_matter() -> None:
    code = "from slipstream_bench.systems.cluster.speed import fingerprint; print(fingerprint())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_packets_take_as_long_as_fluids_without_overflow() -> None:
    cluster = Cluster("four", star(4, LinkKind.of("link", 1e9, 2000.0)))
    job = Job(step(4e6, 5e6, ranks=4), iterations=2)
    fluid = simulate(cluster, job)
    packets = simulate(cluster, job, fidelity="packet", queues=Queues(10e6, header_bytes=0.0))
    assert packets.makespan_ns == pytest.approx(fluid.makespan_ns, rel=0.03)
    assert packets.queues is not None
    assert packets.queues.dropped.sum() == 0
    # Headers count as bytes, too.
    headed = simulate(cluster, job, fidelity="packet", queues=Queues(10e6))
    assert headed.makespan_ns > 1.02 * packets.makespan_ns


def test_incast_overflows_small_queues_and_takes_longer() -> None:
    cluster = Cluster("star", star(17, LinkKind.of("link", 1e9, 2000.0)))
    tasks = Tasks()
    for sender in range(1, 17):
        tasks.communicate(Collective("p2p", 200e3, Group.of([sender, 0])))
    durations = {}
    for room in (1e3, 30e3, 10e6):
        timeline = simulate(cluster, Job(tasks), fidelity="packet", queues=Queues(room))
        assert timeline.queues is not None
        durations[room] = timeline.makespan_ns
        assert (timeline.queues.dropped.sum() > 0) == (room < 1e6)
    assert durations[1e3] > 1.5 * durations[10e6]
    assert durations[30e3] > 1.2 * durations[10e6]


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        ({"fidelity": "packets"}, "fidelity"),
        ({"fidelity": "packet", "explain": True}, "explain"),
        ({"queues": Queues()}, "queues"),
    ],
)
def test_options_that_exclude_packets_are_refused(more: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgumentError, match=argument):
        simulate(FOUR, Job(step(1e6)), **more)
    with pytest.raises(InvalidArgumentError, match="nbytes"):
        Queues(-1.0)
    with pytest.raises(InvalidArgumentError, match="weight"):
        simulate(FOUR, Job(step(1e6), weight=2.0), fidelity="packet")
