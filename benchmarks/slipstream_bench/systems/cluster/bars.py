"""``slipstream bench cluster``: correctness and speed of the cluster simulation.

Times are CPU time of one thread. Rows that need SimGrid, root or real links name what is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.cluster.generators import star, torus
from slipstream.cluster.groups import Group
from slipstream.cluster.lower import Queues
from slipstream.cluster.quantity import Quantity
from slipstream.cluster.tasks import Job, Tasks
from slipstream.cluster.timeline import simulate
from slipstream.cluster.topology import LinkKind
from slipstream.errors import SlipstreamError
from slipstream.native import library, why_no_library
from slipstream.ranks import calibrate
from slipstream.ranks.calibration import cores
from slipstream_bench.harness import times_s
from slipstream_bench.programs import random_packets, random_transfers
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.cluster import links as bench_links
from slipstream_bench.systems.cluster import speed as bench_speed
from slipstream_bench.systems.cluster.certificate import certificate_violations
from slipstream_bench.systems.cluster.simgrid import Peer, why_no_peer
from slipstream_bench.systems.cluster.traces import golden, one_route_a_pair
from slipstream_bench.systems.cluster.uncontended import uncontended_cases

# (transfers, makespan, mean completion, both ms, 99th percentile of the slowdown): three solvers
# agreed on these for the trace of `traces.golden`.
_GOLDEN = (
    (2_000, 6.45826059, 0.0601187736, 3.0000),
    (10_000, 28.5109065, 0.0798763585, 4.2665),
    (30_000, 81.9619, 0.100173109, 5.0000),
)
# (dimensions, ms): all-reduce of 64 MiB, 70 GB/s and 1 us per hop, by ASTRA-sim 2.0's analytical
# backends.
_ASTRA = (
    ((8, 8), 2.006), ((16, 16), 2.062), ((32, 32), 2.131), ((32, 128), 2.325),
    ((64,), 2.104), ((256,), 2.511), ((1024,), 4.051),
)  # fmt: skip


_ENGINES: tuple[Literal["native", "python"], ...] = ("native", "python")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer random events, traces and repeats."""
    if library() is None:
        yield not_judged("native engine", "", "available", str(why_no_library()))
        return
    yield from _certificate_row(options)
    yield from _golden_rows(options)
    yield from _simgrid_rows(options)
    yield from _closed_form_row(options)
    yield from _astra_row(options)
    yield from _conservation_row(options)
    yield from _packet_row(options)
    yield from _bad_input_row(options)
    yield from bench_speed.bars(options)
    yield from bench_links.bars(options)


# ---- exactness ------------------------------------------------------------------------------


def _certificate_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "certificate violations"
    if not options.wants(bar):
        return
    options.progress(bar)
    target = 100_000 if options.full else 20_000
    events = violations = programs = 0
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        program = random_transfers(
            rng, flows=int(rng.integers(20, 400)), links=int(rng.integers(4, 40)),
            classes=int(rng.integers(1, 5)), chained=seed % 3 == 0,
        )  # fmt: skip
        found, instants = certificate_violations(program.compile().simulate(rate_changes=True))
        violations, events, programs = violations + found, events + instants, programs + 1
        if events >= target:
            break
    detail = (
        f"every flow after every one of {events} events, by a checker that shares no code with "
        f"the solver; {programs} random programs with weights from 10^-3 to 10^3 and up to 4 "
        "priorities; 1e-9 relative"
    )
    yield at_most(bar, violations, 0, "", n=events, detail=detail)


def _golden_rows(options: BenchOptions) -> Iterator[Bar]:
    for transfers, makespan_ms, mean_ms, p99 in _GOLDEN:
        bar = f"golden trace, {transfers} transfers"
        if not options.wants(bar):
            continue
        options.progress(bar)
        trace = golden(transfers)
        result = trace.program().compile().simulate()
        completion_ms = result.end_ns[0] / 1e6 - trace.arrival_s * 1e3
        slowdown = np.sort(completion_ms / 1e3 / (trace.nbytes / 12.5e9))
        off = max(
            abs(result.makespan_ns / 1e6 / makespan_ms - 1.0),
            abs(float(completion_ms.mean()) / mean_ms - 1.0),
        )
        same = round(float(slowdown[int(transfers * 0.99)]), 4) == p99
        yield Bar(
            bar, off, "relative", "<= 1e-06, and the 99th percentile of the slowdown as recorded",
            off <= 1e-6 and same, transfers,
            f"makespan {result.makespan_ns / 1e6:.9g} ms, mean completion "
            f"{completion_ms.mean():.9g} ms; 99th percentile of the slowdown "
            f"{slowdown[int(transfers * 0.99)]:.4f}",
        )  # fmt: skip


def _simgrid_rows(options: BenchOptions) -> Iterator[Bar]:
    exact, speed = "SimGrid: every completion time", "SimGrid: speed"
    bars = [bar for bar in (exact, speed) if options.wants(bar)]
    missing = why_no_peer()
    if missing is not None:
        for bar in bars:
            unit, target = ("relative", "<= 1e-06") if bar == exact else ("x", ">= 50")
            yield not_judged(bar, unit, target, missing)
        return
    if not bars:
        return
    options.progress("building the SimGrid peer")
    with Peer() as peer:
        if exact in bars:
            yield _simgrid_exact(options, peer, exact)
        if speed in bars:
            yield _simgrid_speed(options, peer, speed)


def _simgrid_exact(options: BenchOptions, peer: Peer, bar: str) -> Bar:
    worst, traces = 0.0, 20
    for seed in range(traces):
        options.progress(f"{bar}: trace {seed}")
        trace = one_route_a_pair(golden(2_000, seed=1000 + seed, load=0.3 + 0.03 * seed))
        theirs = peer.run(trace).end_s - trace.arrival_s
        ours = trace.program().compile().simulate().end_ns[0] / 1e9 - trace.arrival_s
        worst = max(worst, float(np.abs(ours / theirs - 1.0).max()))
    return at_most(
        bar, worst, 1e-6, "relative", n=traces,
        detail="20 random traces of 2000 transfers, loads 0.3 to 0.87; SimGrid with CM02, no "
        "cross-traffic, no window; the largest difference of any transfer",
    )  # fmt: skip


def _simgrid_speed(options: BenchOptions, peer: Peer, bar: str) -> Bar:
    transfers = 30_000
    options.progress(f"{bar}: {transfers} transfers take SimGrid about a minute")
    trace = one_route_a_pair(golden(transfers))
    theirs = peer.run(trace).cpu_s
    compiled = trace.program().compile()
    times = times_s(compiled.simulate, 5, settle=0)
    ours = float(np.median(times))
    return at_least(
        bar, theirs / ours, 50.0, "x", n=1,
        detail=f"{transfers} transfers, {transfers / ours / 1e3:.0f} k transfers/s against "
        f"{transfers / theirs / 1e3:.2f} k; CPU time, ours the median of 5 (spread "
        f"{times.min():.3f} to {times.max():.3f} s)",
    )  # fmt: skip


def _closed_form_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "fluid = closed form, nobody else"
    if not options.wants(bar):
        return
    options.progress(bar)
    worst, count, where = 0.0, 0, ""
    for name, simulated, formula, latency in uncontended_cases(options.full):
        # Allow one latency, since a formula may count one step more or less.
        off = max(0.0, abs(simulated - formula) - latency) / formula
        count += 1
        if off >= worst:
            worst, where = off, name
    yield at_most(
        bar, worst, 1e-3, "relative", n=count,
        detail="ring both ways and one way, line, halving and doubling, gloo's gather, double "
        "tree, broadcast, all-to-all, two dimensions, hosts of eight; 2 to 4096 ranks, 1 B to "
        f"1 GB; largest: {where}",
    )  # fmt: skip


def _astra_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "ASTRA-sim's seven figures"
    if not options.wants(bar):
        return
    options.progress(bar)
    # Its conventions: one direction of a ring, a latency per hop, GB of 2^30 bytes, and a received
    # byte is written once and read twice while it is added (900 GB/s of memory).
    link = LinkKind.of("link", 70 * 2**30, 1000.0)
    off, parts = 0.0, []
    for dims, recorded_ms in _ASTRA:
        cluster = Cluster("astra", torus(dims, link), reduce_ns_per_byte=Quantity(3 / 900))
        tasks = Tasks()
        tasks.communicate(Collective("all_reduce", 64 * 2**20, algo="*".join(["ring"] * len(dims))))
        ms = simulate(cluster, Job(tasks)).makespan_ns / 1e6
        off = max(off, abs(ms / recorded_ms - 1.0))
        parts.append(f"{'x'.join(map(str, dims))}: {ms:.3f} for {recorded_ms}")
    detail = "largest difference; " + ", ".join(parts)
    yield at_most(bar, 100 * off, 2.0, "%", n=len(_ASTRA), detail=f"{detail} ms")


def _conservation_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "bytes sent = bytes delivered"
    if not options.wants(bar):
        return
    options.progress(bar)
    worst, count = 0.0, 200 if options.full else 40
    for seed in range(count):
        program = random_transfers(np.random.default_rng(seed), chained=seed % 2 == 0)
        result = program.compile().simulate(rate_changes=True)
        assert program.flows is not None
        assert result.rate_changes is not None
        changes, ends = result.rate_changes, result.end_ns.reshape(-1)
        order = np.argsort(changes.instance, kind="stable")
        who, since, rate = (
            changes.instance[order], changes.time_ns[order], changes.rate[order]
        )  # fmt: skip
        until = np.append(since[1:], 0.0)
        last = np.append(who[1:] != who[:-1], True)
        until[last] = ends[who[last]]
        moved = np.bincount(who, rate * (until - since), ends.size)
        sent = np.tile(program.flows.nbytes, program.steps)
        worst = max(worst, float((np.abs(moved - sent) / np.maximum(sent, 1.0)).max()))
    yield at_most(
        bar, worst, 1e-9, "relative", n=count,
        detail="the integral of each transfer's rate against its bytes; that no link carries more "
        "than its capacity is part of the certificate",
    )  # fmt: skip


def _packet_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "packets: both engines"
    if not options.wants(bar):
        return
    options.progress(bar)
    count, differ, moved = 100 if options.full else 30, 0, 0
    for seed in range(count):
        program = random_packets(np.random.default_rng(seed))
        ours, theirs = (program.compile(by).simulate() for by in _ENGINES)
        assert ours.queues is not None
        assert theirs.queues is not None
        same = ours.end_ns.tobytes() == theirs.end_ns.tobytes() and all(
            a.tobytes() == b.tobytes()
            for a, b in zip(vars(ours.queues).values(), vars(theirs.queues).values(), strict=True)
        )
        differ += not same
        moved += int(ours.queues.dropped.sum() + ours.queues.marked.sum())
    yield at_most(
        bar, differ, 0, "of them differ", n=count,
        detail="random programs of packets; every start, end, drop, mark and packet sent again, to "
        f"the bit; {moved} packets were dropped or marked",
    )  # fmt: skip


def _bad_input_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "bad inputs refused by name"
    if not options.wants(bar):
        return
    refused, missed = 0, []
    for name, make in bad_inputs().items():
        try:
            make()
            missed.append(name)
        except SlipstreamError:
            refused += 1
    count = refused + len(missed)
    detail = "; ".join(bad_inputs()) if not missed else f"accepted: {missed}"
    yield Bar(bar, refused, f"of {count}", f"= {count}", not missed, count, detail)


def _reduced() -> Tasks:
    tasks = Tasks()
    tasks.communicate(Collective("all_reduce", 1e6))
    return tasks


def bad_inputs() -> dict[str, Callable[[], object]]:
    """Return inputs that must be refused before any event runs, by name."""
    link = LinkKind.of("link", 1e9, 1000.0)
    good = Cluster("four", star(4, link))
    broken = good.with_network(good.topology.with_capacity(1, 0.0))

    def run(cluster: Cluster, collective: Collective) -> object:
        tasks = Tasks()
        tasks.communicate(collective)
        return simulate(cluster, Job(tasks))

    def cycle() -> object:
        tasks = Tasks()
        first = tasks.compute(0, 1.0)
        second = tasks.compute(0, 1.0, [first])
        tasks.depend(first, second)
        return simulate(good, Job(tasks))

    def apart() -> object:
        from slipstream.cluster.generators import from_edges

        two = from_edges([("a", "b", link), ("c", "d", link)], ["a", "b", "c", "d"])
        return run(Cluster("apart", two), Collective("all_reduce", 1e6))

    return {
        "a link without capacity on a path": lambda: run(broken, Collective("all_reduce", 1e6)),
        "devices that nothing joins": apart,
        "a negative size": lambda: Collective("all_reduce", -1.0),
        "an axis that is not there": lambda: good.mesh((2, 2), ("a", "b"))["c"],
        "a group larger than the cluster": lambda: run(
            good, Collective("all_reduce", 1.0, Group.of(range(5)))
        ),
        "a duration that is not a number": lambda: Tasks().compute(0, float("nan")),
        "tasks that wait for each other": cycle,
        "more ranks than cores to calibrate": lambda: calibrate(2 * cores() + 1),
        "weights of packets": lambda: simulate(
            good, Job(_reduced(), weight=2.0), fidelity="packet"
        ),
        "a queue whose size is not a number": lambda: Queues(float("nan")),
    }
