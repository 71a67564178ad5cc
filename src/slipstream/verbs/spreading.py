"""Compare ways to distribute a step over a cluster, including gradient compression.

Compression can save no more than the exposed communication, and costs its encoding. It is therefore
worth it below a certain bandwidth, which is found by simulating both steps over a range of
bandwidths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, replace_tasks, replay
from slipstream.tables import Table
from slipstream.technique import Technique
from slipstream.units import format_duration
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Prediction, applying, prediction_table, refused
from slipstream.verbs.sharing import shared_table

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

_MAX_EXPONENT = 20
_BISECTIONS = 24
# Communication counts as hidden if the step is less than this many times one that sends no bytes.
_HIDDEN_RATIO = 1.05


@dataclass(frozen=True)
class Method:
    """A compression method.

    Attributes:
        prediction: of replicas with it.
        pays_below: bandwidth of a worker, in bytes per second, below which the method makes the
            step shorter; 0: never, infinity: on any network.
    """

    prediction: Predicted
    pays_below: float


@dataclass(frozen=True)
class Compressing:
    """Whether gradients should be compressed.

    Attributes:
        dense: replicas without compression.
        bandwidth: bytes per second that a worker sends while communicating.
        needed: compression ratio that would bring the step within 5 % of one that sends no bytes;
            1 if it is there already, infinity if latency alone is exposed.
        budget_ns: maximum time for encoding and decoding per step.
        methods: installed methods that apply, the best first.
    """

    dense: Predicted
    bandwidth: float
    needed: float
    budget_ns: float
    methods: tuple[Method, ...]

    @property
    def best(self) -> Method | None:
        """The fastest method that is predicted to be faster than no compression."""
        faster = [m for m in self.methods if m.prediction.ratio < self.dense.ratio]
        return faster[0] if faster else None

    @property
    def in_words(self) -> list[str]:
        if self.needed <= 1.0:
            return [
                "should I compress? No: communication is hidden behind the backward pass, "
                "so there is nothing to gain"
            ]
        enough = (
            "no compression ratio would hide it, because its latency alone is exposed"
            if math.isinf(self.needed)
            else f"compressing {self.needed:.3g} times is enough (within 5 %)"
        )
        lines = [
            f"should I compress? {self._answer()}",
            f"why: sending adds {format_duration(self.budget_ns)} to a step of "
            f"{format_duration(self.dense.step_ns)}, the budget for encoding and decoding; "
            f"{enough}",
        ]
        return lines + [
            f"{method.prediction.technique}: worth it {_below(method.pays_below)} per worker; "
            f"here {_bits(self.bandwidth)}"
            for method in self.methods
        ]

    def _answer(self) -> str:
        if self.best is not None:
            gain = self.dense.ratio / self.best.prediction.ratio
            name = self.best.prediction.technique
            return f"Yes: {name} is predicted {gain:.2f}x as fast as without"
        if self.methods:
            return "No: none of the installed methods is predicted to be faster"
        return "Perhaps, but no installed method applies here"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; rates in bytes per second, times in nanoseconds."""
        return {
            "bandwidth_bytes_per_s": self.bandwidth,
            "needed_ratio": self.needed,
            "budget_ns": self.budget_ns,
            "pays_below_bytes_per_s": {
                method.prediction.technique: method.pays_below for method in self.methods
            },
            "best": None if self.best is None else self.best.prediction.technique,
        }


def _below(rate: float) -> str:
    if not rate:
        return "at no bandwidth"
    return "at any bandwidth" if math.isinf(rate) else f"below {_bits(rate)}"


def _bits(rate: float) -> str:
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if 8 * rate >= factor:
            return f"{8 * rate / factor:.3g} {unit}"
    return f"{8 * rate:.3g} bit/s"


@dataclass(frozen=True)
class Spreading:
    """Ways to distribute a step over workers.

    Attributes:
        predictions: the lowest time per sample first, then techniques that do not apply.
        compressing: whether replicas should compress; None if replicas do not apply.
    """

    predictions: tuple[Prediction, ...]
    compressing: Compressing | None

    def tables(self, graph: Graph, cluster: Cluster, past: str = "") -> list[Table]:
        """Return tables of predictions and of communication; `past` as for `Advice.table`."""
        words = self.compressing.in_words if self.compressing else []
        return [
            prediction_table(graph, self.predictions, past),
            shared_table(graph, cluster, applying(self.predictions), *words),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "predictions": [p.to_json() for p in self.predictions],
            "compress": self.compressing.to_json() if self.compressing else None,
            "in_words": self.compressing.in_words if self.compressing else [],
        }


def spread(
    graph: Graph,
    cluster: Cluster,
    workers: int = 0,
    *,
    durations: Durations | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Spreading:
    """Predict every way to distribute the step over `workers` (0: all) devices of the cluster.

    Raises:
        InvalidArgumentError: more workers than the cluster has devices, or fewer than 2.
    """
    count = workers or cluster.devices
    combinations = [technique.on_workers(parts, count) for parts in _combinations()]
    predictions = predict(
        graph, combinations, durations=durations, cluster=cluster, widen=widen, report=report
    )
    ranked = sorted(applying(predictions), key=lambda p: p.ratio)
    # The fastest uncompressed replicas whose gradients can be compressed.
    dense = next(
        (p for p in ranked if [part.traits.hook for part in p.techniques] == ["provides"]), None
    )
    compressing = None
    if dense is not None:
        (replicas,) = dense.techniques
        compressed = [
            p
            for p in ranked
            if replicas in p.techniques and any(part.traits.compresses for part in p.techniques)
        ]
        compressing = _compressing(dense, compressed)
    return Spreading((*ranked, *refused(predictions)), compressing)


def _combinations() -> list[tuple[Technique, ...]]:
    """Return ways to distribute a step, from the traits of installed techniques.

    Each technique that makes replicas, alone and with each one that changes their communication.
    """
    kinds = list(technique.registry().values())
    makers = [kind for kind in kinds if kind.traits.replicas == "makes"]
    users = [kind for kind in kinds if kind.traits.replicas == "uses"]
    alone = [(variant,) for kind in makers for variant in technique.variants(kind)]
    return alone + [
        technique.combination((maker, user))
        for kind in makers
        for other in users
        if not technique.clash(kind, other)
        for maker in technique.variants(kind)
        for user in technique.variants(other)
    ]


def at_bandwidth(graph: Graph, factor: float) -> Graph:
    """Return `graph` on a network with `factor` times the bandwidth and the same latencies."""
    if not factor > 0:
        raise InvalidArgumentError("factor", f"{factor} is not positive")
    duration = graph.tasks.duration_ns.copy()
    for row in graph.exchanges:
        latency = min(row.latency_ns, float(duration[row.task]))
        duration[row.task] = latency + (duration[row.task] - latency) / factor
    return replace_tasks(graph, duration_ns=duration)


def crossover(dense: Graph, other: Graph) -> float:
    """Return the bandwidth factor at which the steps of `other` and `dense` take equally long.

    Below it, `other` is faster. 0 if it never is, infinity if it always is, between 2^-20 and 2^20.
    """

    def wins(factor: float) -> bool:
        steps = (replay(at_bandwidth(graph, factor)).step_ns for graph in (other, dense))
        return next(steps) < next(steps)

    return _last(wins)


def _compressing(dense: Predicted, compressed: Sequence[Predicted]) -> Compressing:
    graph = dense.graph
    assert graph is not None
    assert dense.shared is not None
    free = replay(at_bandwidth(graph, math.inf)).step_ns
    tasks = [row.task for row in graph.exchanges]
    latency = np.array([row.latency_ns for row in graph.exchanges])
    busy = float((graph.tasks.duration_ns[tasks] - latency).sum())
    bandwidth = dense.shared.sent_bytes / busy * 1e9 if busy > 0 else math.inf

    def held_up(factor: float) -> bool:
        return replay(at_bandwidth(graph, factor)).step_ns > free * _HIDDEN_RATIO

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
    """Return the factor up to which `holds` is true, by bisection."""
    low, high = -float(_MAX_EXPONENT), float(_MAX_EXPONENT)
    if not holds(2.0**low):
        return 0.0
    if holds(2.0**high):
        return math.inf
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(2.0**middle) else (low, middle)
    return float(2.0 ** ((low + high) / 2))
