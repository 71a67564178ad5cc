"""``slipstream bench collectives``: correctness, bytes, speed and state of collectives.

Ranks are processes, on hosts of a network lab with shaped links where time or bytes are judged.
Arms of a comparison alternate in one run; a turn takes as long as its slowest rank. Ranks run at a
higher priority than other programs, if permitted.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.cluster import Cluster, ClusterError, LinkKind
from slipstream.cluster.generators import leaf_spine
from slipstream.cluster.quantity import Calibration
from slipstream.measure.environment import capture, machine_id
from slipstream.measure.records import Phase
from slipstream.ranks import Netlab, calibrate, why_no_netlab
from slipstream.ranks.calibration import cores
from slipstream.techniques.distributed.collectives.choice import chosen, predicted_ns
from slipstream_bench.harness import Paired, guarded, paired
from slipstream_bench.lab import MBIT, SENT, arms_on_ranks, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.collectives import rank

_S = 4 << 20
# Seconds after which no further turn begins.
_BUDGET_S = 120.0
# Mbit/s of the links inside a rack, and of the one between.
RACKS = (1000, 100)
_STAR = 100
_CALIBRATED = 1 << 20
_SIZES = (1 << 17, 1 << 19, 1 << 21, 1 << 22)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer turns."""
    yield from _equal(options)
    yield from _training(options)
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged("reduce-scatter, bytes sent, 4 ranks", "S", "<= 0.77", reason)
        return
    try:
        yield from _bytes(options)
        yield from _one_switch(options)
        yield from _two_racks(options)
    except ClusterError as error:
        yield not_judged("ranks in the network lab", "", "", error.what)


def racks_lab() -> Netlab:
    """Return two racks of two hosts, with links of `RACKS`."""
    inside, between = RACKS
    return Netlab(4, inside * MBIT, racks=2, between_bytes_per_s=between * MBIT)


def racks_cluster(lab: Netlab) -> Cluster:
    """Return `racks_lab` as a cluster; a ring of one size determines the slow link's bandwidth."""
    # Both arms, because later measurements alternate between them too.
    times = _taken(lab, _CALIBRATED, ["all_reduce", "two_d"], 5).times_s("all_reduce")
    duration_s = float(np.median(times))
    spread = np.abs(times / duration_s - 1.0)
    calibration = Calibration(
        time.strftime("%Y-%m-%d", time.gmtime()), machine_id(capture(torch=False)), "gloo",
        float(np.median(spread)), float(np.percentile(spread, 90)), 4 / cores(),
    )  # fmt: skip
    inside = RACKS[0] * MBIT
    link = LinkKind.of("in the rack", inside, 30e3)
    # Every rank's 1.5 S pass every link of the ring.
    between = 1.5 * _CALIBRATED / duration_s
    racks = leaf_spine(4, 2, 1, link, oversubscription=2 * inside / between)
    return Cluster("two racks", racks, calibration=calibration)


def _taken(
    lab: Netlab, nbytes: int, arms: Sequence[str], blocks: int, cluster: Path | None = None
) -> Paired:
    """Run ways to exchange a tensor against each other on all hosts of a lab."""
    file = None if cluster is None else str(cluster)
    with arms_on_ranks(lab, rank.exchanges, nbytes=nbytes, arms=arms, cluster=file) as built:
        return paired(built, clock="wall", blocks=blocks, settle_s=0.0, budget_s=_BUDGET_S)


def _equal(options: BenchOptions) -> Iterator[Bar]:
    bar = "2-D against the flat all-reduce, 4, 6 and 8 ranks"
    if not options.wants(bar):
        return
    options.progress(bar)
    worst, identical = 0.0, True
    for size in (4, 6, 8):
        results = on_ranks(size, rank.equal, numbers=1 << 18)
        worst = max(worst, *(off for off, _ in results))
        identical &= len({digest for _, digest in results}) == 1
    yield Bar(
        bar, worst, "relative", "<= 1e-06, the same bits on all ranks", worst <= 1e-6 and identical,
        3, f"2 rows, float32; {'the same' if identical else 'NOT the same'} bits on all ranks",
    )  # fmt: skip


def _training(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "sharded update against unsharded, losses of 50 steps, 4 ranks",
        "sharded update, state beyond a quarter of the memory, 4 ranks",
        "sharded update, processor time of the update, 4 ranks",
    )
    if not any(options.wants(name) for name in names):
        return
    options.progress(names[0])
    results = on_ranks(4, rank.training, steps=50, repeats=15 if options.full else 7)
    notes, off, memory, update = [], [], [], []
    for name in results[0]:
        pairs = [(result[name]["sharded"], result[name]["unsharded"]) for result in results]
        ours, theirs = (np.array(column) for column in zip(*pairs, strict=True))
        off.append(float((np.abs(ours - theirs) / theirs).max()))
        memory.append(max(result[name]["memory"] for result in results))
        update.append(statistics.median([r for result in results for r in result[name]["update"]]))
        notes.append(f"{name} {off[-1]:.1e}, {memory[-1]:.4f}, {update[-1]:.2f}")
    detail = "losses, memory, time: " + "; ".join(notes)
    count = len(off)
    yield at_most(names[0], max(off), 1e-6, "relative", n=count, detail=f"digits; {detail}")
    yield at_most(names[1], 100 * (max(memory) - 0.25), 2.0, "points", n=count, detail=detail)
    yield at_most(
        names[2], max(update), 0.35, "x", n=count, detail=f"12.6 M float32 parameters; {detail}"
    )


def _bytes(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "reduce-scatter, bytes sent, 4 ranks", "2-D all-reduce, bytes sent, 2 x 2 over 1.5 S",
    )  # fmt: skip
    if not any(options.wants(name) for name in names):
        return
    options.progress(names[0])
    arms = ["reduce_scatter", "gloo reduce_scatter", "two_d", "all_reduce"]
    with Netlab(4, 1000 * MBIT) as lab, lab.unshaped():
        taken = _taken(lab, _S, arms, 5)
    series = {arm: taken.experiment.series[arm, SENT, Phase.MEASURE].values for arm in arms}
    sent = {arm: float(values.mean()) / _S for arm, values in series.items()}
    detail = "at the interface, S = 4 MiB: " + ", ".join(f"{a} {s:.3f} S" for a, s in sent.items())
    yield at_most(names[0], sent["reduce_scatter"], 0.77, "S", n=5, detail=detail)
    yield at_most(names[1], sent["two_d"] / 1.5, 1.03, "x", n=5, detail=detail)


def _one_switch(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "reduce-scatter against gloo's, 4 MiB, 4 ranks", "auto on one switch: slower than flat by",
    )  # fmt: skip
    if not any(options.wants(name) for name in names):
        return
    options.progress(f"{names[0]}: one switch, {_STAR} Mbit/s")
    cluster = calibrate(4, lab_bytes_per_s=_STAR * MBIT, sizes=_SIZES[:3], repeats=5)
    arms = ["gloo reduce_scatter", "reduce_scatter", "all_reduce", "auto", "two_d"]
    repeats = 11 if options.full else 5
    with tempfile.TemporaryDirectory() as folder, Netlab(4, _STAR * MBIT) as lab:
        path = Path(folder) / "cluster.toml"
        cluster.save(path)
        taken = _taken(lab, _S, arms, repeats, path)
    yield taken.ratio("gloo reduce_scatter", "reduce_scatter").at_least(
        names[0], 1.8, detail=f"cables of {_STAR} Mbit/s; {taken}"
    )
    algorithms = {chosen(cluster, size, 4, 2) for size in _SIZES}
    regret = taken.ratio("auto", "all_reduce")
    slower = 100 * (regret.value - 1.0)
    row = Bar(
        names[1], slower, "%", "<= 5, and flat is chosen",
        slower <= 5.0 and algorithms == {"flat"}, regret.n,
        f"chosen of 128 KiB to 4 MiB: {', '.join(sorted(algorithms))}; {taken}",
    )  # fmt: skip
    yield guarded(row, {names[1]: regret})


def _two_racks(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "2-D against gloo's all-reduce, two racks, 4 MiB",
        "auto in two racks: slower than the better one by",
        "predicted all-reduces in two racks, median error",
    )
    if not any(options.wants(name) for name in names):
        return
    inside, between = RACKS
    options.progress(f"{names[0]}: {inside} and {between} Mbit/s")
    repeats = 11 if options.full else 5
    arms = ["all_reduce", "two_d", "auto"]
    errors, notes = [], []
    with tempfile.TemporaryDirectory() as folder, racks_lab() as lab:
        cluster = racks_cluster(lab)
        path = Path(folder) / "cluster.toml"
        cluster.save(path)
        for size in (_SIZES[1], _SIZES[2], _S):
            taken = _taken(lab, size, arms, repeats, path)
            predictions = predicted_ns(cluster, size, 4, 2)
            for arm, predicted in zip(("all_reduce", "two_d"), predictions, strict=True):
                measured = taken.median_s(arm)
                errors.append(100 * abs(predicted / 1e9 / measured - 1.0))
                notes.append(
                    f"{arm} of {size >> 10} KiB {1e3 * measured:.0f} ms, "
                    f"predicted {predicted / 1e6:.0f}"
                )
    # The largest size was the last.
    yield taken.ratio("all_reduce", "two_d").at_least(
        names[0], 1.35, detail=f"{inside} Mbit/s in racks of 2, {between} between; bound 1.5"
    )
    regret = taken.ratio("auto", min(("all_reduce", "two_d"), key=taken.median_s))
    row = at_most(
        names[1], 100 * (regret.value - 1.0), 5.0, "%", n=regret.n,
        detail=f"4 MiB; {chosen(cluster, _S, 4, 2)} is chosen",
    )  # fmt: skip
    yield guarded(row, {names[1]: regret})
    yield at_most(
        names[2], statistics.median(errors), 10.0, "%", n=len(errors), detail="; ".join(notes)
    )
