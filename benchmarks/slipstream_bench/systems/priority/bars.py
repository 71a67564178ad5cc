"""``slipstream bench priority``: real ranks on shaped links, compared with DDP.

Two to four processes in a network lab, which needs root. They sleep instead of computing, so that
rows measure overlap, not the load of the machine. Every row's DistributedDataParallel ran in the
same launch, with the best of three bucket sizes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.cluster import ClusterError
from slipstream.ranks import why_no_netlab
from slipstream.techniques.distributed.priority.plan import TRIED
from slipstream.techniques.distributed.priority.simulate import ORDERS
from slipstream_bench.lab import MBIT
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.priority import rank, trials
from slipstream_bench.systems.priority.ranks import (
    BUCKETS,
    Cell,
    cell,
    rate_for,
    run,
)
from slipstream_bench.systems.priority.workloads import NAMES, REAL, TINY

_COMPUTE_S, _SWEEP_S = 0.366, 0.2
_ORDERS = ("static:50000", "leader:50000", "rs_ag:50000", "p2p:50000")
_MEGABITS = (20, 80, 200, 600, 2000)
# Fewer steps and methods if a step takes seconds.
_SLOW = 50
# Links around the largest gain, to find where it is.
_QUICK_MEGABITS = (200,)
# Seconds of a quick run's longer rows, from the number and duration of their steps.
_TAIL_S, _SWEEP_ROWS_S, _REAL_S, _TRIALS_S = 45.0, 45.0, 60.0, 40.0
_OPTIMIZERS = ("sgd", "momentum", "adamw")
# A launch of random runs takes two or three minutes.
_LAUNCH_S = 500.0
_ALL = ("static", "leader", "p2p", "rs_ag", "auto")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: two workloads on one link, fewer steps, eight random runs."""
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged("tail-heavy: DDP's step over ours", "x", ">= 1.3", reason)
        return
    yield from _weights(options)
    yield from _loops(options)
    yield from _tail_heavy(options)
    yield from _sweep(options)
    yield from _every_way(options)
    yield from _overhead(options)
    yield from _trials(options)
    yield from _real(options)


def _weights(options: BenchOptions) -> Iterator[Bar]:
    for ranks, most in ((2, 0.0), (4, 1e-6)):
        bar = f"weights against DDP's, {ranks} ranks"
        if not options.wants(bar) or (ranks == 4 and not options.full):
            continue
        options.progress(bar)
        steps = 200 if options.full else 20
        answers = run(
            ranks, 1000 * MBIT, rank.weights, methods=_ALL, optimizers=_OPTIMIZERS, count=steps
        )
        found = [result for each in answers for result in each]
        worst = max(found, key=lambda result: result["off"])
        yield at_most(
            bar, worst["off"], most, "relative", n=len(found) // ranks,
            detail=f"{steps} steps; SGD, momentum, AdamW; {', '.join(_ALL)}; tied, frozen, unused "
            f"parameters, and ones that some ranks use at times; worst: {worst['how']}",
        )  # fmt: skip


def _loops(options: BenchOptions) -> Iterator[Bar]:
    bar = "loops that read gradients or losses, or evaluate several times"
    if not options.wants(bar):
        return
    options.progress(bar)
    steps = 60 if options.full else 10
    answers = run(2, 1000 * MBIT, rank.loops, order=_ORDERS[1], count=steps)
    held = {kind: all(answer[kind] for answer in answers) for kind in answers[0]}
    count = len(held)
    yield Bar(
        bar, sum(held.values()), f"of {count}", f"= {count}", all(held.values()), count,
        f"{steps} steps, {_ORDERS[1]}: DDP's weights to the bit; code that reads gradients before "
        "the step gets one warning of its wait; LBFGS is refused: "
        + ", ".join(f"{kind} {'holds' if ok else 'falls short'}" for kind, ok in held.items()),
    )  # fmt: skip


def _tail_heavy(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "tail-heavy: DDP's step over ours", "tail-heavy: step over the bound",
        "link used while gradients wait, slices of 50,000", "the same, less busy direction",
    )  # fmt: skip
    if not any(options.wants(name, _TAIL_S) for name in names):
        return
    options.progress(names[0])
    rate = rate_for("tail-heavy", _COMPUTE_S, 1.1)
    methods = (*BUCKETS, *(_ORDERS if options.full else _ORDERS[:1]))
    found = cell("tail-heavy", rate, _COMPUTE_S, methods, 12 if options.full else 8)
    ours = found.measured_s["auto"]
    said = (
        ", ".join(f"{how} {1e3 * s:.0f}" for how, s in found.measured_s.items())
        + f" ms; computation {1e3 * found.compute_s:.0f}, communication "
        f"{1e3 * found.communicate_s:.0f} ms at {rate / MBIT:.0f} Mbit/s; auto: {found.chosen}"
    )
    yield at_least(names[0], found.ddp_s / ours, 1.30, "x", n=8, detail=said)
    yield at_most(names[1], ours / found.bound_s, 1.12, "x", n=8, detail="auto")
    shares = _used(found, "static:50000", rate)
    yield at_least(names[2], 100 * max(shares), 92.0, "%", detail="static; headers included")
    yield at_least(names[3], 100 * min(shares), 80.0, "%")


def _used(found: Cell, how: str, rate: float) -> list[float]:
    """Return shares of the link's rate, in each direction."""
    moved, seconds = found.sampled[how]
    return [nbytes / seconds / rate for nbytes in moved]


def _sweep(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "uniform: DDP's step over ours, at best", "DDP's step over auto's, at worst",
        "predicted step", "auto against the best order measured",
        "link of the largest gain, predicted over measured",
    )  # fmt: skip
    if not any(options.wants(name, _SWEEP_ROWS_S) for name in names):
        return
    links = _MEGABITS if options.full else _QUICK_MEGABITS
    workloads = NAMES if options.full else NAMES[:2]
    more = ("leader:50000", "rs_ag:50000") if options.full else ()
    made: dict[tuple[str, int], Cell] = {}
    for workload in workloads:
        for megabits in links:
            options.progress(f"{workload} on {megabits} Mbit/s")
            slow = megabits < _SLOW
            methods = BUCKETS[:1] if slow else (*BUCKETS[::2], "static:50000", *more)
            steps = 3 if slow else 6 if options.full else 5
            made[workload, megabits] = cell(workload, megabits * MBIT, _SWEEP_S, methods, steps)
    gains = {key: result.ddp_s / result.measured_s["auto"] for key, result in made.items()}
    table = "; ".join(
        f"{w} {', '.join(f'{gains[w, m]:.2f} ({made[w, m].chosen})' for m in links)}"
        for w in workloads
    )
    uniform = max(gain for (workload, _), gain in gains.items() if workload == "uniform")
    yield at_least(names[0], uniform, 1.03, "x", n=len(links),
                   detail=f"at {', '.join(map(str, links))} Mbit/s: {table}")  # fmt: skip
    worst = min(gains, key=lambda key: gains[key])
    yield at_least(names[1], gains[worst], 0.98, "x", n=len(made),
                   detail=f"{worst[0]} at {worst[1]} Mbit/s")  # fmt: skip
    errors = [error for result in made.values() for error in result.errors()]
    middle = statistics.median(errors)
    yield Bar(
        names[2], 100 * middle, "%", "<= 4 (largest <= 9)", middle <= 0.04 and max(errors) <= 0.09,
        len(errors), f"largest {100 * max(errors):.1f} %; ours and DDP with two bucket sizes",
    )  # fmt: skip
    behind = {
        key: result.measured_s["auto"] / min(result.measured_s.values()) - 1.0
        for key, result in made.items()
    }
    worst = max(behind, key=lambda key: behind[key])
    yield at_most(
        names[3], 100 * behind[worst], 3.0, "%", n=len(behind),
        detail=f"{worst[0]} at {worst[1]} Mbit/s; against those that were measured, not all slices",
    )  # fmt: skip
    if len(links) == 1:
        return
    off = []
    for workload in workloads:
        of = {m: made[workload, m] for m in links}
        peak = max(links, key=lambda m: gains[workload, m])
        predicted = max(links, key=lambda m: of[m].predicted_ddp_s / of[m].predicted_s["auto"])
        off.append(max(predicted / peak, peak / predicted) - 1.0)
    yield at_most(names[4], 100 * max(off), 25.0, "%", n=len(off), detail="on the links measured")


def _every_way(options: BenchOptions) -> Iterator[Bar]:
    bar = "auto against every order and slice, tail-heavy"
    if not (options.full and options.wants(bar)):
        return
    options.progress(bar)
    ways = tuple(f"{order}:{size}" for order in ORDERS for size in TRIED)
    rate = rate_for("tail-heavy", _SWEEP_S, 1.1)
    found = cell("tail-heavy", rate, _SWEEP_S, (*BUCKETS, *ways), 6)
    best = min(found.measured_s, key=lambda how: found.measured_s[how])
    yield at_most(
        bar, 100 * (found.measured_s["auto"] / found.measured_s[best] - 1.0), 3.0, "%",
        n=len(found.measured_s) - 1,
        detail=f"auto: {found.chosen}; best: {best}; " + ", ".join(
            f"{how} {1e3 * s:.0f}" for how, s in found.measured_s.items()
        ) + " ms",
    )  # fmt: skip


def _real(options: BenchOptions) -> Iterator[Bar]:
    bar = "real computation on 200 Mbit/s: DDP's step over auto's, where 1.12 is predicted"
    if not options.wants(bar, _REAL_S):
        return
    gains, notes = [], []
    for name in REAL:
        options.progress(f"{bar}: {name}")
        count, turns = (60, 10) if options.full else (20, 5)
        auto = run(
            2, 200 * MBIT, rank.turns, workload=name, methods=["auto", *BUCKETS[::2]],
            count=count, turns=turns,
        )[0]  # fmt: skip
        predicted = auto["predicted"]
        # The prediction of the best plan, even if it was measured and rejected.
        predicted_gain = min(s for how, s in predicted.items() if how.startswith("ddp:")) / min(
            predicted.values()
        )
        ratios = sorted(min(theirs) / ours for ours, *theirs in auto["turns_s"])
        gain = statistics.median(ratios)
        steps = [f"{how} {1e3 * s:.0f} predicted {1e3 * predicted[how]:.0f}"
                 for how, s in auto["tried"].items()]  # fmt: skip
        notes.append(
            f"{name}: {auto['chosen']}, {gain:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"predicted {predicted_gain:.2f}; computation {1e3 * auto['compute_s']:.0f}, "
            f"{', '.join(steps)} ms; remaining rates of the link and of computation "
            f"{', '.join(auto['remaining'])}"
        )
        if predicted_gain >= 1.12:
            gains.append(gain)
    detail = (
        f"two ranks on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {'; '.join(notes)}"
    )
    if not gains:
        yield not_judged(bar, "x", ">= 1.1", f"1.12 is predicted for neither; {detail}")
        return
    yield at_least(bar, min(gains), 1.1, "x", n=len(gains), detail=detail)


def _overhead(options: BenchOptions) -> Iterator[Bar]:
    bar = "tiny model on an unshaped link, auto over DDP"
    if not options.wants(bar):
        return
    options.progress(bar)
    count = 1000 if options.full else 200
    found = run(
        2, 1e11, rank.turns, workload=TINY, methods=["auto", "ddp:25"], count=count, turns=10
    )[0]
    ratios = [ours / theirs for ours, theirs in found["turns_s"]]
    yield at_most(
        bar, 100 * (statistics.median(ratios) - 1.0), 5.0, "%", n=len(ratios),
        detail=f"10,000 parameters in 60 tensors; {min(ratios):.2f} to {max(ratios):.2f}; auto "
        f"has chosen {found['chosen']}; real computation, load {os.getloadavg()[0]:.1f}",
    )  # fmt: skip


def _trials(options: BenchOptions) -> Iterator[Bar]:
    bar = "random runs that end as they have to"
    if not options.wants(bar, _TRIALS_S):
        return
    launches, each = (5, 100) if options.full else (1, 8)
    count = launches * each
    runs: list[Sequence[dict[str, Any]]] = []
    for launch in range(launches):
        options.progress(f"{bar}: {launch * each} of {count}")
        with contextlib.suppress(ClusterError):
            # No results if a launch hangs, or if a rank dies unexpectedly.
            runs += zip(
                *run(3, 1000 * MBIT, trials.run, _LAUNCH_S, count=each, seed=launch), strict=True
            )
    whole = sum(all(rank_result["ended"] for rank_result in ranks) for ranks in runs)
    failing = [ranks for ranks in runs if ranks[0]["fails"]]
    named = sum(all(rank_result["named"] for rank_result in ranks) for ranks in failing)
    slowest = max(
        (rank_result["error_s"] for ranks in failing for rank_result in ranks), default=0.0
    )
    yield Bar(
        bar, whole, f"of {count}", f"= {count}, errors within 10 s",
        whole == count and slowest < 10.0, count,
        "3 ranks; every order, slices, credits, layers' times and delays at random; in "
        f"{len(failing)} of them a rank raises and continues, exits or stops: an error "
        f"on all others within {slowest:.1f} s, naming that rank in {named}",
    )  # fmt: skip
