"""Rows of ``slipstream bench cluster`` on real links."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.cluster.errors import ClusterError
from slipstream.cluster.fitting import Fit, fit
from slipstream.cluster.generators import star
from slipstream.cluster.quantity import Quantity
from slipstream.cluster.samples import Operation, Sample
from slipstream.cluster.tasks import Job, Tasks
from slipstream.cluster.timeline import simulate
from slipstream.cluster.topology import LinkKind
from slipstream.provenance import Provenance
from slipstream.ranks import Netlab, why_no_netlab
from slipstream.ranks.calibration import (
    MAX_REGIMES,
    SHAPED_SIZES,
    SIZES,
    cores,
    run_operations,
)
from slipstream.ranks.launch import Host
from slipstream_bench.lab import MBIT
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_TESTED = ("all_reduce", "reduce_scatter", "all_gather", "2d")
_TESTED_SIZES = (2**18, 2**20)
_CONTENDED = 2**20
_REPEATS = 9
_STRETCH = 2**21


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; see `slipstream_bench.systems.cluster.bars`."""
    yield from _point_to_point(options)
    yield from _collectives(options)
    yield from _contention(options)


def _point_to_point(options: BenchOptions) -> Iterator[Bar]:
    bar = "point to point: half of the sizes predict the others"
    if not options.wants(bar):
        return
    options.progress(bar)
    if cores() < 2:
        yield not_judged(bar, "%", "<= 8 (90th percentile <= 20)", "one core for two ranks")
        return
    # Fitted to the sizes of a calibration; predicted are those half way between.
    between = [int(np.sqrt(a * b)) // 4 * 4 for a, b in itertools.pairwise(SIZES)]
    sizes = sorted([*SIZES, *between])
    operations = [Operation("p2p", size, (0, 1), 5) for size in sizes]
    try:
        samples, _ = run_operations([Host(), Host()], operations, rounds=15)
        found = fit(samples[::2], most_regimes=MAX_REGIMES)
        line = fit(samples[::2])
    except ClusterError as error:
        yield not_judged(bar, "%", "<= 8 (90th percentile <= 20)", error.what)
        return
    errors, alone = (
        [100 * abs(fitted.predict_ns(s.operation) / s.duration_ns - 1.0) for s in samples[1::2]]
        for fitted in (found, line)
    )
    median, most = float(np.median(errors)), float(np.percentile(errors, 90))
    ways = [f"{regime.alpha_ns / 1e3:.0f} us + {regime.slowdown * found.ns_per_byte:.3f} ns/B"
            f" from {regime.from_bytes / 1024:.0f} KiB" for regime in found.regimes]  # fmt: skip
    yield Bar(
        bar, median, "%", "<= 8 (90th percentile <= 20)", median <= 8.0 and most <= 20.0,
        len(errors), f"gloo over loopback, 1 KiB to 8 MiB; 90th percentile {most:.1f} %; "
        f"{' and '.join(ways) or 'one line'}; one line: {np.median(alone):.1f} %, "
        f"{np.percentile(alone, 90):.1f} %; load {os.getloadavg()[0]:.1f}",
    )  # fmt: skip


def _collectives(options: BenchOptions) -> Iterator[Bar]:
    bars = {kind: f"shaped links, not fitted: {kind}" for kind in _TESTED}
    bar_of = {kind: bar for kind, bar in bars.items() if options.wants(bar)}
    reason = why_no_netlab()
    if not bar_of or reason is not None:
        for bar in bar_of.values():
            yield not_judged(bar, "%", "<= 12", str(reason))
        return
    off: dict[str, list[float]] = {kind: [] for kind in bar_of}
    notes: dict[str, list[str]] = {kind: [] for kind in bar_of}
    for megabits in (100, 200, 400):
        options.progress(f"shaped links, not fitted: {megabits} Mbit/s")
        try:
            found, samples = _fit_and_test(megabits, list(bar_of))
        except ClusterError as error:
            for bar in bar_of.values():
                yield not_judged(bar, "%", "<= 12", f"{megabits} Mbit/s: {error.what}")
            return
        for kind in bar_of:
            of_kind = [s for s in samples if s.operation.kind == kind]
            errors = [found.predict_ns(s.operation) / s.duration_ns - 1.0 for s in of_kind]
            best = [found.predict_ns(s.operation) / min(s.repeats_ns) - 1.0 for s in of_kind]
            off[kind] += errors
            notes[kind].append(
                f"{megabits} Mbit/s: " + ", ".join(f"{100 * o:+.1f} %" for o in errors)
                + " (best repeats: " + ", ".join(f"{100 * o:+.1f} %" for o in best) + ")"
            )  # fmt: skip
    for kind, bar in bar_of.items():
        how = "one at a time" if kind == "2d" else "back to back"
        yield at_most(
            bar, 100 * max(map(abs, off[kind])), 12.0, "%", n=len(off[kind]),
            detail="4 hosts, fitted to p2p and 2 ranks' all-reduce, 256 KiB and 1 MiB, medians of "
            f"{_REPEATS}, {how}; {4 / cores():g} ranks per core, load "
            f"{os.getloadavg()[0]:.1f}; " + "; ".join(notes[kind]),
        )  # fmt: skip


def _fit_and_test(megabits: int, kinds: list[str]) -> tuple[Fit, list[Sample]]:
    """Return the fit to two ranks of a lab, and measurements of four."""
    fitted = [_timed(kind, size, (0, 1)) for kind in ("p2p", "all_reduce") for size in SHAPED_SIZES]
    tested = [_timed(kind, size, (0, 1, 2, 3)) for kind in kinds for size in _TESTED_SIZES]
    with Netlab(4, megabits * MBIT) as lab:
        samples, _ = run_operations(lab.ranks(), [*fitted, *tested])
    return fit(samples[: len(fitted)]), samples[len(fitted) :]


def _timed(kind: str, size: int, ranks: tuple[int, ...]) -> Operation:
    """Return an operation with enough repeats that the link's saved-up tokens hardly matter.

    Not in two dimensions, where groups that alternate would compete for a link's queue.
    """
    often = 1 if kind == "2d" else min(16, max(1, _STRETCH // size))
    return Operation(kind, size, ranks, _REPEATS, in_a_row=often)


def _contention(options: BenchOptions) -> Iterator[Bar]:
    bar = "two jobs on one shaped cable: slowdown"
    if not options.wants(bar):
        return
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged(bar, "%", "<= 10", reason)
        return
    errors, notes = [], []
    for pause_ns in (0.0, 60e6):
        options.progress(f"{bar}: {pause_ns / 1e6:g} ms of computation")
        try:
            alone_ns, shared_ns, found = _contend(pause_ns)
        except ClusterError as error:
            yield not_judged(bar, "%", "<= 10", error.what)
            return
        link = LinkKind.of("fitted", 1e9 / found.ns_per_byte, provenance=Provenance.FITTED)
        cluster = Cluster(
            "lab", star(2, link), alpha_ns=Quantity(found.alpha_ns),
            reduce_ns_per_byte=Quantity(found.reduce_ns_per_byte),
        )  # fmt: skip
        tasks = Tasks()
        before = [tasks.wait(pause_ns)] if pause_ns else []
        tasks.communicate(Collective("all_reduce", _CONTENDED, algo="ring"), before)
        jobs = [Job(tasks, 20), Job(tasks, 20)]
        predicted, alone = (
            float(np.median(simulate(cluster, some).job(0).iteration_ns))
            for some in (jobs, jobs[:1])
        )
        slowdown, measured = predicted / alone, shared_ns / alone_ns
        errors.append(100 * abs(slowdown / measured - 1.0))
        notes.append(
            f"{pause_ns / 1e6:g} ms of computation: {slowdown:.3f} for {measured:.3f} "
            f"({alone_ns / 1e6:.1f} ms alone, {shared_ns / 1e6:.1f} ms)"
        )
    yield at_most(
        bar, max(errors), 10.0, "%", n=2,
        detail="two jobs of 2 ranks on the same two hosts, cables of 100 Mbit/s, all-reduces of "
        f"1 MiB, fluid, fitted to one alone; load {os.getloadavg()[0]:.1f}; " + "; ".join(notes),
    )  # fmt: skip


def _contend(pause_ns: float) -> tuple[float, float, Fit]:
    """Return the time of an iteration alone and alongside another job, and the fit."""
    fitted = [
        Operation(kind, size, (0, 1), 7) for kind in ("p2p", "all_reduce") for size in SHAPED_SIZES
    ]
    step = Operation("all_reduce", _CONTENDED, (0, 1), 15, pause_ns)
    with Netlab(2, 100 * MBIT) as lab:
        samples, _ = run_operations(lab.ranks(), [*fitted, step])
        with ThreadPoolExecutor(2) as both:
            # They do not start together: only the part in which both run counts.
            runs = [
                both.submit(run_operations, lab.ranks(), [replace(step, repeats=60)])
                for _ in range(2)
            ]
            ours, theirs = (run.result()[0][0] for run in runs)
    first, last = theirs.began_ns[0], theirs.began_ns[-1] + theirs.repeats_ns[-1]
    overlapping = [
        duration for began, duration in zip(ours.began_ns, ours.repeats_ns, strict=True)
        if began >= first and began + duration <= last
    ]  # fmt: skip
    if len(overlapping) < 10:
        raise ClusterError("the two jobs hardly ran at the same time", remedy="a quieter machine")
    return samples[-1].duration_ns, float(np.median(overlapping)), fit(samples[:-1])
