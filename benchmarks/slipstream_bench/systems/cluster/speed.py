"""Rows of ``slipstream bench cluster`` on time, memory and repeatability."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.cluster.generators import leaf_spine, star, torus
from slipstream.cluster.groups import Group
from slipstream.cluster.tasks import Job, Tasks
from slipstream.cluster.timeline import Timeline, simulate
from slipstream.cluster.topology import Float64s, LinkKind, Topology
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_most
from slipstream_bench.systems.cluster.traces import golden

# ASTRA-sim 2.0, congestion-unaware analytical backend, 32 x 128, on the same machine as the other
# recorded figures.
_ASTRA_CPU_S = 4.8


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; see `slipstream_bench.systems.cluster.bars`."""
    for bar, row in (
        ("cost exponent, 10^4 to 10^5 transfers", _growth),
        ("1000 jobs, 60 simulated seconds", _thousand_jobs),
        ("4096 chips: one 2-D all-reduce", _mesh),
        ("4096 chips: against ASTRA-sim", _against_astra),
        ("4096 chips: closed form", _closed_form),
        ("cost_many", _cost_many),
        ("torus of 65,536 devices: time", _torus_time),
        ("torus of 65,536 devices: memory", _torus_memory),
        ("the same bits", _determinism),
    ):
        if options.wants(bar):
            options.progress(bar)
            yield from row(options, bar)


def _spread(times: Float64s) -> str:
    return f"median of {len(times)}, {times.min():.4f} to {times.max():.4f} s"


def _growth(options: BenchOptions, bar: str) -> Iterator[Bar]:
    times, changes = [], []
    for transfers in (10_000, 100_000):
        compiled = golden(transfers).program().compile()
        times.append(float(times_s(compiled.simulate, 5 if options.full else 3).min()))
        found = compiled.simulate(rate_changes=True).rate_changes
        assert found is not None
        changes.append(found.time_ns.size)
    exponent = math.log10(times[1] / times[0])
    # Large transfers accumulate, so that in a longer trace more compete at any time.
    more = math.log10(changes[1] / changes[0])
    yield at_most(
        bar, exponent, 1.5, "", n=2,
        detail=f"the golden trace's network and load; {times[0]:.3f} and {times[1]:.3f} s, "
        f"{times[1] / times[0] / 10:.2f} x linear; a rate changes {changes[0] / 1e4:.2f} and "
        f"{changes[1] / 1e5:.2f} times per transfer; exponent of rate changes {more:.2f}",
    )  # fmt: skip


def _jobs(cluster: Cluster) -> list[Job]:
    """Return jobs of 8 workers on randomly chosen hosts that compute, then all-reduce in a ring."""
    rng = np.random.default_rng(0)
    hosts = rng.permutation(cluster.devices)[:8000].reshape(1000, 8)
    jobs = []
    for number in range(1000):
        tasks = Tasks()
        busy = float(rng.uniform(150e6, 450e6))
        computed = [tasks.compute(rank, busy) for rank in range(8)]
        size = float(rng.uniform(200e6, 1e9))
        tasks.communicate(Collective("all_reduce", size, algo="ring"), computed)
        jobs.append(Job(tasks, 3, Group.of(hosts[number])))
    return jobs


def thousand_jobs() -> dict[str, float]:
    """Simulate 1000 jobs in this process: CPU seconds, peak memory, and results."""
    import resource

    link = LinkKind.of("100gbe", 12.5e9, 2000.0)
    cluster = Cluster("shared", leaf_spine(8192, 32, 16, link, 4.0))
    jobs = _jobs(cluster)
    few = simulate(cluster, jobs)
    paces = [float(few.job(n).iteration_ns.mean()) for n in range(len(jobs))]
    jobs = [
        replace(job, iterations=int(60e9 // pace)) for job, pace in zip(jobs, paces, strict=True)
    ]
    timelines: list[Timeline] = []
    spent = times_s(lambda: timelines.append(simulate(cluster, jobs)), settle=0)
    timeline = timelines[0]
    ends = [float(timeline.job(n).iteration_end_ns[-1]) / 1e9 for n in range(len(jobs))]
    flows = timeline.schedule.program.flows
    assert flows is not None
    return {
        "cpu_s": float(spent[0]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "makespan_s": timeline.makespan_ns / 1e9,
        "median_end_s": float(np.median(ends)),
        "transfers": float(np.count_nonzero(flows.nbytes)),
    }


def _thousand_jobs(options: BenchOptions, bar: str) -> Iterator[Bar]:
    said = _answer("thousand_jobs")
    detail = (
        f"1000 jobs of 8 workers on 8192 hosts, leaf-spine with oversubscription 4, a ring per job "
        f"with a transfer per edge; {said['transfers']:.0f} transfers, half of the jobs end by "
        f"{said['median_end_s']:.0f} s, the last at {said['makespan_s']:.0f} s; one thread"
    )
    yield at_most(bar, said["cpu_s"], 10.0, "s", detail=detail)
    yield at_most(f"{bar}: memory", said["peak_mib"], 1024.0, "MiB", detail=detail)


def _multipod() -> Cluster:
    return Cluster.load("tpu-v3-multipod")


def _mesh_s() -> Float64s:
    cluster = _multipod()
    tasks = Tasks()
    tasks.communicate(Collective("all_reduce", 102e6, algo="line*ring2"))
    return times_s(lambda: simulate(cluster, Job(tasks)), 5, settle=0)


def _mesh(options: BenchOptions, bar: str) -> Iterator[Bar]:
    times = _mesh_s()
    yield at_most(
        bar, float(np.median(times)), 0.5, "s", n=5,
        detail=f"128 x 32, fluid, routes and lowering included; {_spread(times)}",
    )  # fmt: skip


def _against_astra(options: BenchOptions, bar: str) -> Iterator[Bar]:
    ratio = _ASTRA_CPU_S / float(np.median(_mesh_s()))
    yield Bar(
        bar, ratio, "x", ">= 10", None, 5,
        f"against {_ASTRA_CPU_S} s recorded for ASTRA-sim, which is not installed here to be run "
        "in pairs",
    )  # fmt: skip


def _closed_form(options: BenchOptions, bar: str) -> Iterator[Bar]:
    cluster = _multipod()
    group = cluster.all()
    cluster.cost(Collective("all_reduce", 1.0, group, "2d"))
    collectives = [Collective("all_reduce", size, group, "2d") for size in (1e3, 1e6, 1e9)]
    times = [
        float(np.median(times_s(functools.partial(cluster.cost, collective), 50)))
        for collective in collectives
    ]
    yield at_most(
        bar, 1e6 * max(times), 200.0, "us", n=150,
        detail="algo 2d, the best of nine; after the group's first call, which computes routes",
    )  # fmt: skip


def _cost_many(options: BenchOptions, bar: str) -> Iterator[Bar]:
    rng = np.random.default_rng(0)
    rows = 10**6
    cluster = Cluster("star", star(64, LinkKind.of("link", 10e9, 1000.0)))
    size, ranks = 10 ** rng.uniform(0, 9, rows), rng.integers(1, 65, rows)
    names = ("ring", "tree", "auto")
    which = rng.integers(0, 3, rows)

    def run() -> Float64s:
        return cluster.cost_many_ns("all_reduce", size, ranks, names, which)

    got = run()
    times = times_s(run, 5, settle=0)
    groups = [Group.of(range(n)) for n in range(1, 65)]
    same = all(
        got[i]
        == cluster.cost(
            Collective("all_reduce", float(size[i]), groups[ranks[i] - 1], names[which[i]])
        ).duration_ns
        for i in range(2000)
    )
    speed = rows / float(np.median(times)) / 1e6
    yield Bar(
        bar, speed, "M rows/s", ">= 1, equal to cost", speed >= 1.0 and same, 5,
        f"10^6 rows of (size, ranks, algorithm); the first 2000 {'equal' if same else 'DIFFER'} to "
        f"the bit; {_spread(times)}",
    )  # fmt: skip


def torus_cost() -> dict[str, float]:
    """Build a torus in this process: CPU seconds, MiB added, MiB at the peak."""
    import resource

    built: list[Topology] = []

    def make() -> None:
        built.append(torus((256, 256), LinkKind.of("ici", 50e9, 1000.0)))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = times_s(make, settle=0)
    built[0].route(0, 65535)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu_s": float(spent[0]), "grown_mib": (after - before) / 1024, "peak_mib": after / 1024
    }  # fmt: skip


def _torus_time(options: BenchOptions, bar: str) -> Iterator[Bar]:
    spent = _answer("torus_cost")["cpu_s"]
    yield at_most(bar, spent, 2.0, "s", detail="256 x 256, all links")


def _torus_memory(options: BenchOptions, bar: str) -> Iterator[Bar]:
    found = _answer("torus_cost")
    yield at_most(
        bar, found["peak_mib"], 300.0, "MiB",
        detail=f"peak of the whole process, of which the torus {found['grown_mib']:.0f} MiB",
    )  # fmt: skip


def fingerprint() -> str:
    """Return a digest of a timeline in which jobs of all kinds compete."""
    cluster = Cluster.load("h100x8-100gbe", hosts=4)
    jobs = []
    for number in range(6):
        tasks = Tasks()
        computed = [tasks.compute(rank, 1e6 * (number + 1)) for rank in range(8)]
        tasks.communicate(
            Collective("all_reduce", 1e7 * (number + 1), priority=number % 2), computed
        )
        members = np.arange(8) * 4 + number % 4
        jobs.append(
            Job(tasks, 3 + number % 2, Group.of(members), 5e5 * number, weight=1.0 + number)
        )
    timeline = simulate(cluster, jobs, explain=True)
    changes = timeline.schedule.rate_changes
    assert changes is not None
    return hashlib.sha256(timeline.to_bytes() + changes.rate.tobytes()).hexdigest()


def _determinism(options: BenchOptions, bar: str) -> Iterator[Bar]:
    runs = 20 if options.full else 5
    found = {_answer("fingerprint", PYTHONHASHSEED=str(seed)) for seed in range(runs)}
    yield Bar(
        bar, float(len(found)), "different", "= 1", len(found) == 1, runs,
        f"{runs} processes with different hash seeds; every start, end and rate of 6 jobs",
    )  # fmt: skip


def _answer(function: str, **environment: str) -> Any:
    """Return the result of a function of this module in a separate process."""
    code = f"import json; from {__name__} import {function}; print(json.dumps({function}()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return json.loads(done.stdout)
