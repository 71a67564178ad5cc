"""Real ranks in a network lab: equal replicas, torch's losses, times by number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from slipstream.cluster import Cluster, Collective
from slipstream.ranks import Netlab, why_no_netlab
from slipstream.technique import parse
from slipstream.techniques.distributed.compression.bucket import Layout
from slipstream.techniques.distributed.compression.compressor import Compressor
from slipstream_bench.lab import MBIT, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.compression import rank

_TIMEOUT_S = 120.0
_ALL = (
    "cast:bf16",
    "powersgd:4,start=2",
    "acp:4,start=2",
    "topk:0.01",
    "sign",
    "block_int:4",
    "randomk:0.01",
)
_START = 10
# Slow enough that communication dominates.
_SLOW = 10
_GROWN = ("topk:0.01", "sign", "powersgd:4,start=0")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; see `slipstream_bench.systems.compression.encoders`."""
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged("replicas after 300 steps", "of 12", "= 12", reason)
        return
    yield from _replicas(options)
    yield from _parity(options)
    yield from _growth(options)


def run(
    ranks: int, bytes_per_s: float, function: Callable[..., Any], **arguments: Any
) -> list[Any]:
    """Return the result of ``function(**arguments)`` on every rank.

    Raises:
        ClusterError: a rank failed.
    """
    with Netlab(ranks, bytes_per_s) as lab:
        return on_ranks(lab, function, timeout_s=_TIMEOUT_S, **arguments)


def _replicas(options: BenchOptions) -> Iterator[Bar]:
    bar = "replicas equal to the bit after 300 steps"
    if not options.wants(bar):
        return
    steps = 300 if options.full else 60
    held, total = 0, 0
    for ranks in (2, 4) if options.full else (2,):
        options.progress(f"{bar}: {ranks} ranks")
        answers = run(ranks, 1000 * MBIT, rank.replicas, methods=_ALL, steps=steps)
        for each in zip(*answers, strict=True):
            total += 1
            held += len(set(each)) == 1
    yield Bar(
        bar, held, f"of {total}", f"= {total}", held == total, total,
        f"{steps} steps, {'2 and 4' if options.full else 2} ranks; buckets rebuilt, tied, frozen, "
        "unused parameters, and ones that some ranks do not use",
    )  # fmt: skip


def _parity(options: BenchOptions) -> Iterator[Bar]:
    bar = "losses with PowerSGD against those with torch's hook"
    if not options.wants(bar):
        return
    options.progress(bar)
    steps = 300 if options.full else 60
    answers = run(
        2, 1000 * MBIT, rank.losses, methods=(f"powersgd:4,start={_START}", "torch"),
        steps=steps, rank_of=4, start=_START,
    )  # fmt: skip
    ours, theirs = (np.array(losses) for losses in answers[0])
    value = 100 * abs(float(ours.mean() / theirs.mean()) - 1.0)
    tenth = steps // 10
    last = (float(side[-tenth:].mean()) for side in (ours, theirs))
    yield at_most(
        bar, value, 1.0, "%", n=steps,
        detail=f"area under the curve over {steps} steps, 2 ranks, digits, rank 4; the last tenth: "
        "ours {:.4f}, torch's {:.4f}".format(*last),
    )  # fmt: skip


def _growth(options: BenchOptions) -> Iterator[Bar]:
    grows, flat = (
        "exchange at 4 ranks over that at 2, top-k and sign: grows with the others",
        "exchange at 4 ranks over that at 2, PowerSGD: does not",
    )
    if not (options.wants(grows) or options.wants(flat)):
        return
    options.progress(grows)
    arguments = {"methods": _GROWN, "side": 1000, "repeats": 7 if options.full else 3}
    times = {
        ranks: np.median(
            np.max(run(ranks, _SLOW * MBIT, rank.exchanges, **arguments), axis=0), axis=1
        )
        for ranks in (2, 3, 4)
    }
    growth = [
        (_simulated_s(how, 96) - _simulated_s(how, 2))
        / (_simulated_s(how, 49) - _simulated_s(how, 2))
        for how in _GROWN
    ]
    notes = [
        f"{how} {', '.join(f'{1e3 * seconds[k]:.0f}' for seconds in times.values())} ms at 2, 3, 4 "
        f"ranks; simulated at 96: {1e3 * _simulated_s(how, 96):.0f}"
        for k, how in enumerate(_GROWN)
    ]
    ratios = times[4] / times[2]
    yield Bar(
        grows, float(min(ratios[:2])), "x", "3 +- 20 %",
        all(2.4 <= ratio <= 3.6 for ratio in ratios[:2]), 2,
        f"cables of {_SLOW} Mbit/s, 10^6 numbers; {'; '.join(notes[:2])}; twice the others from 49 "
        f"to 96: {min(growth[:2]):.2f} x",
    )  # fmt: skip
    yield at_most(flat, float(ratios[2]), 1.8, "x", detail=f"a ring's bytes: 1.5; {notes[2]}")


def _simulated_s(how: str, ranks: int) -> float:
    """Return seconds of one bucket's transfers on a cluster like the lab."""
    cluster = Cluster.load(f"workers={ranks},link={_SLOW}mbit,latency=100us")
    (settings,) = parse(how)
    assert isinstance(settings, Compressor)
    messages = settings.messages(Layout.of({"p": (1000, 1000)}))
    total = 0.0
    for message in messages:
        total += cluster.cost(Collective(*message.collective(ranks))).duration_ns / 1e9
    return total
