"""Ways to spread a step over a cluster: which is the cheapest, should gradients be compressed?

Whether compressing pays is a matter of what communication shows: a method can win no more than
that, and costs its encoding. So it pays below a certain bandwidth, which is found by simulating
both steps on ever faster and slower networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, replace_tasks, replay
from slipstream.technique import Technique
from slipstream.verbs.predicting import Prediction, predict

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

_WIDEST = 20
_ROUNDS = 24
# A step that is longer than without any byte sent by less than this is not held up.
_HIDDEN = 1.05


@dataclass(frozen=True)
class Method:
    """A way to compress.

    Attributes:
        prediction: of it, on replicas.
        pays_below: bytes a second of a worker below which it makes the step shorter; 0: never,
            infinity: on any network.
    """

    prediction: Prediction
    pays_below: float


@dataclass(frozen=True)
class Compressing:
    """Should gradients be compressed?

    Attributes:
        dense: replicas without compression.
        bandwidth: bytes a second that a worker sends at while communicating.
        needed: how many times fewer bytes would bring the step within 5 % of one that sends none;
            1 where it is there already, infinity where latency alone holds the step up.
        budget_ns: what a method may cost at most, in encoding and decoding a step.
        methods: those that are installed and apply, the best first.
    """

    dense: Prediction
    bandwidth: float
    needed: float
    budget_ns: float
    methods: tuple[Method, ...]

    @property
    def best(self) -> Method | None:
        """What is predicted to be faster than no compression, the fastest."""
        faster = [m for m in self.methods if m.prediction.ratio < self.dense.ratio]
        return faster[0] if faster else None


@dataclass(frozen=True)
class Spreading:
    """Ways to spread a step over workers.

    Attributes:
        predictions: the cheapest sample first, then what does not apply.
        compressing: should replicas compress? None where they do not apply.
    """

    predictions: tuple[Prediction, ...]
    compressing: Compressing | None


def spread(
    graph: Graph,
    cluster: Cluster,
    workers: int = 0,
    *,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Spreading:
    """Predict every way to spread the step over `workers` (0: all) devices of the cluster.

    Raises:
        InvalidArgumentError: more workers than the cluster has devices, or fewer than 2.
    """
    count = workers or cluster.devices
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    combinations = [technique.on_workers(one, count) for one in _combinations()]
    found = predict(graph, combinations, durations=durations, cluster=cluster, widen=widen, say=say)
    applying = sorted((p for p in found if p.why_not is None), key=lambda p: p.ratio)
    refused = [p for p in found if p.why_not is not None]
    # Replicas whose gradients can be compressed, without; the cheapest where there are several.
    dense = next(
        (p for p in applying if [one.traits.hook for one in p.techniques] == ["gives"]), None
    )
    compressing = None
    if dense is not None:
        (replicas,) = dense.techniques
        compressed = [
            p
            for p in applying
            if replicas in p.techniques and any(one.traits.compresses for one in p.techniques)
        ]
        compressing = _compressing(dense, compressed)
    return Spreading((*applying, *refused), compressing)


def _combinations() -> list[tuple[Technique, ...]]:
    """Ways to spread a step, from what installed techniques declare.

    What makes replicas, by itself and with each technique that changes what these exchange.
    """
    kinds = list(technique.registry().values())
    makers = [kind for kind in kinds if kind.traits.replicas == "makes"]
    users = [kind for kind in kinds if kind.traits.replicas == "uses"]
    alone = [(one,) for kind in makers for one in technique.variants(kind)]
    return alone + [
        technique.combination((maker, user))
        for kind in makers
        for other in users
        if not technique.clash(kind, other)
        for maker in technique.variants(kind)
        for user in technique.variants(other)
    ]


def at_bandwidth(graph: Graph, factor: float) -> Graph:
    """`graph` on a network of `factor` times the bandwidth and the same latencies.

    Raises:
        InvalidArgumentError: a factor that is not positive.
    """
    if not factor > 0:
        raise InvalidArgumentError("factor", f"{factor} is not positive")
    duration = graph.tasks.duration_ns.copy()
    for row in graph.exchanges:
        latency = min(row.latency_ns, float(duration[row.task]))
        duration[row.task] = latency + (duration[row.task] - latency) / factor
    return replace_tasks(graph, duration_ns=duration)


def crossover(dense: Graph, other: Graph) -> float:
    """Times how much bandwidth `other`'s step takes as long as that of `dense`.

    Below, it is shorter. 0 where it never is, infinity where it is always, between 2^-20 and 2^20.
    """

    def wins(factor: float) -> bool:
        steps = (replay(at_bandwidth(one, factor)).step_ns for one in (other, dense))
        return next(steps) < next(steps)

    return _last(wins)


def _compressing(dense: Prediction, compressed: Sequence[Prediction]) -> Compressing:
    graph = dense.graph
    assert graph is not None
    assert dense.shared is not None
    free = replay(at_bandwidth(graph, math.inf)).step_ns
    tasks = [row.task for row in graph.exchanges]
    latency = np.array([row.latency_ns for row in graph.exchanges])
    busy = float((graph.tasks.duration_ns[tasks] - latency).sum())
    bandwidth = dense.shared.sent_bytes / busy * 1e9 if busy > 0 else math.inf

    def held_up(factor: float) -> bool:
        return replay(at_bandwidth(graph, factor)).step_ns > free * _HIDDEN

    methods = [
        Method(p, bandwidth * crossover(graph, p.graph)) for p in compressed if p.graph is not None
    ]
    return Compressing(
        dense,
        bandwidth,
        max(1.0, _last(held_up)),
        max(dense.step_ns - free, 0.0),
        tuple(sorted(methods, key=lambda m: m.prediction.ratio)),
    )


def _last(holds: Callable[[float], bool]) -> float:
    """The factor up to which `holds`, from where it is true to where it is not."""
    low, high = -float(_WIDEST), float(_WIDEST)
    if not holds(2.0**low):
        return 0.0
    if holds(2.0**high):
        return math.inf
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(2.0**middle) else (low, middle)
    return float(2.0 ** ((low + high) / 2))
