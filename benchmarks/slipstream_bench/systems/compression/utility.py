"""Simulate the share of a data centre's set-ups in which compression wins.

Source: Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems",
MLSys 2022. Computing times and encoding costs have the magnitude of a V100's. They are assumptions
from memory, and the share of wins is also given for other assumptions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.cluster import Cluster, Collective
from slipstream_bench.rows import Bar, BenchOptions

_LINK = "10gbit"
_WORKERS = (8, 16, 32, 64, 96)
# Bytes of gradients, and milliseconds of the backward pass at three batch sizes: assumed.
_MODELS = {
    "resnet50": (97e6, (35.0, 65.0, 122.0)),
    "resnet101": (170e6, (60.0, 110.0, 205.0)),
    "bert-base": (418e6, (110.0, 190.0, 350.0)),
}
_BUCKET = 25e6
# Factor by which communication slows a V100's backward pass: assumed.
_GAMMA = 1.05


@dataclass(frozen=True)
class Method:
    """A compressor and its costs in a data centre.

    Attributes:
        share: share of the bytes that a worker sends.
        kind: kind of the collective.
        cost: milliseconds of encoding and decoding 100 MB, without `per_worker`: assumed.
        per_worker: milliseconds of decoding one worker's 100 MB: assumed.
        low_rank: whether the method is PowerSGD.
    """

    name: str
    share: float
    kind: str
    cost: float
    per_worker: float = 0.0
    low_rank: bool = False


# Encoding and decoding 97 MB took a V100 45, 64 and 130 ms (PowerSGD), 295, 289 and 240 ms (top-k),
# and 16 ms (sign), according to the study's table, from memory.
_METHODS = (
    Method("powersgd:4", 1 / 70, "all_reduce", 46.0, low_rank=True),
    Method("powersgd:8", 1 / 35, "all_reduce", 66.0, low_rank=True),
    Method("powersgd:16", 1 / 17, "all_reduce", 134.0, low_rank=True),
    Method("topk:0.2", 0.4, "all_gather", 304.0, 3.0),
    Method("topk:0.1", 0.2, "all_gather", 298.0, 1.5),
    Method("topk:0.01", 0.02, "all_gather", 247.0, 0.2),
    Method("topk:0.001", 0.002, "all_gather", 247.0, 0.02),
    Method("sign", 1 / 32, "all_gather", 16.0, 1.2),
)


@dataclass(frozen=True)
class Assumed:
    """Assumptions about the data centre, relative to the tables above.

    Attributes:
        encoding, computing: factors of the times.
        link: link of every worker.
    """

    encoding: float = 1.0
    computing: float = 1.0
    link: str = _LINK


@dataclass(frozen=True)
class SetUp:
    """A model at a batch size (0 the smallest), workers, and a compressor."""

    model: str
    batch: int
    workers: int
    method: Method


_OTHERS = {
    "encoding half as long": Assumed(encoding=0.5),
    "encoding twice as long": Assumed(encoding=2.0),
    "encoding four times as long": Assumed(encoding=4.0),
    "computing half as long": Assumed(computing=0.5),
    "computing twice as long": Assumed(computing=2.0),
    "links of 25 Gbit/s": Assumed(link="25gbit"),
    "links of 100 Gbit/s": Assumed(link="100gbit"),
}


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the share under the assumptions, and its dependence on them."""
    bar = "data-centre set-ups in which compression wins"
    every = set_ups()
    if options.wants(bar):
        options.progress(bar)
        won = [set_up for set_up in every if gain(set_up, Assumed()) > 1.0]
        share = 100.0 * len(won) / len(every)
        low_rank = all(set_up.method.low_rank for set_up in won)
        yield Bar(
            bar, share, "%", "<= 5, all of low rank", share <= 5.0 and low_rank, len(every),
            f"{len(won)} of {len(every)} at {_LINK}: " + "; ".join(_split(won))
            + f"; by 20 % and more: {sum(gain(set_up, Assumed()) >= 1.2 for set_up in won)}; "
            f"encoding {costs_for_share(0.05):.1f} times as long leaves 5 %; times and costs are "
            "assumed",
        )  # fmt: skip
    for name, assumed in _OTHERS.items():
        other = f"{bar}: {name}"
        if not options.wants(other):
            continue
        won = [set_up for set_up in every if gain(set_up, assumed) > 1.0]
        yield Bar(
            other, 100.0 * len(won) / len(every), "%", "none: shows what assumptions do", None,
            len(every), f"{len(won)} of {len(every)}: " + "; ".join(_split(won)),
        )  # fmt: skip


def set_ups() -> list[SetUp]:
    """Return all set-ups."""
    return [
        SetUp(model, batch, workers, method)
        for workers, model, batch, method in itertools.product(
            _WORKERS, _MODELS, range(3), _METHODS
        )
    ]


def gain(set_up: SetUp, assumed: Assumed) -> float:
    """Return the speed-up of a backward pass and its exchange with compression."""
    cluster = _cluster(set_up.workers, assumed.link)
    nbytes, times = _MODELS[set_up.model]
    backward_ms = assumed.computing * times[set_up.batch]
    compressed = _compressed_ms(
        cluster, set_up.workers, nbytes, backward_ms, set_up.method, assumed.encoding
    )
    return _plain_ms(cluster, nbytes, backward_ms) / compressed


def costs_for_share(share: float) -> float:
    """Return the factor of encoding times at which this share of the set-ups wins."""
    least = []
    for set_up in set_ups():
        free = gain(set_up, Assumed(encoding=0.0))
        # The step's time is linear in the factor.
        if free > 1.0:
            full = gain(set_up, Assumed())
            least.append((1.0 - 1.0 / free) / (1.0 / full - 1.0 / free))
    allowed = int(share * len(set_ups()))
    return sorted(least, reverse=True)[allowed] if len(least) > allowed else 0.0


def _split(won: list[SetUp]) -> list[str]:
    """Count winning set-ups by batch size, method, model and workers."""
    sizes = ("small", "middle", "large")
    by = (
        [f"{name} batch" for name in sizes],
        [method.name for method in _METHODS],
        list(_MODELS),
        [f"{count} workers" for count in _WORKERS],
    )
    found = (
        [f"{sizes[set_up.batch]} batch" for set_up in won],
        [set_up.method.name for set_up in won],
        [set_up.model for set_up in won],
        [f"{set_up.workers} workers" for set_up in won],
    )
    return [
        ", ".join(f"{name} {have.count(name)}" for name in names if name in have) or "none"
        for names, have in zip(by, found, strict=True)
    ]


@functools.cache
def _cluster(workers: int, link: str) -> Cluster:
    return Cluster.load(f"workers={workers},link={link},latency=15us")


def _collective_ms(cluster: Cluster, kind: str, nbytes: float) -> float:
    return cluster.cost(Collective(kind, nbytes)).duration_ns / 1e6


def _plain_ms(cluster: Cluster, nbytes: float, backward_ms: float) -> float:
    """Return the step's time: buckets overlap with the backward pass, except for the last one."""
    buckets = max(1, round(nbytes / _BUCKET))
    each = _collective_ms(cluster, "all_reduce", nbytes / buckets)
    return max(_GAMMA * backward_ms, (buckets - 1) * each) + each


def _compressed_ms(
    cluster: Cluster, workers: int, nbytes: float, backward_ms: float, method: Method, factor: float
) -> float:
    """Return the step's time with compression after the backward pass, the study's best order."""
    sent = nbytes * method.share
    whole = sent * workers if method.kind == "all_gather" else sent
    computed = factor * nbytes / 100e6 * (method.cost + method.per_worker * workers)
    return backward_ms + computed + _collective_ms(cluster, method.kind, whole)
