"""Ways to spread a step over a cluster: which is the cheapest, should gradients be compressed?

Whether compressing pays is a matter of what communication shows: a method can win no more than
that, and costs its encoding. So it pays below a certain bandwidth, which is found by simulating
both steps on ever faster and slower networks.
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

    prediction: Predicted
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

    dense: Predicted
    bandwidth: float
    needed: float
    budget_ns: float
    methods: tuple[Method, ...]

    @property
    def best(self) -> Method | None:
        """What is predicted to be faster than no compression, the fastest."""
        faster = [m for m in self.methods if m.prediction.ratio < self.dense.ratio]
        return faster[0] if faster else None

    @property
    def in_words(self) -> list[str]:
        """The answer, and why."""
        if self.needed <= 1.0:
            return [
                "should I compress? No: what is sent is hidden behind the backward pass, "
                "so there is nothing to win"
            ]
        enough = (
            "no fewer bytes would hide it, for its latency alone shows"
            if math.isinf(self.needed)
            else f"{self.needed:.3g} times fewer bytes would do (within 5 %), more is of no use"
        )
        lines = [
            f"should I compress? {self._answer()}",
            f"why: sending holds the step up by {format_duration(self.budget_ns)} of "
            f"{format_duration(self.dense.step_ns)}, the most that encoding and decoding may cost; "
            f"{enough}",
        ]
        return lines + [
            f"{method.prediction.technique}: pays {_below(method.pays_below)} of bandwidth a "
            f"worker; here {_bits(self.bandwidth)}"
            for method in self.methods
        ]

    def _answer(self) -> str:
        if self.best is not None:
            gain = self.dense.ratio / self.best.prediction.ratio
            name = self.best.prediction.technique
            return f"Yes: {name} is predicted {gain:.2f}x as fast as without"
        if self.methods:
            return "No: none of the installed methods is predicted to be faster"
        return "Perhaps, but no method is installed that applies here"

    def to_json(self) -> dict[str, Any]:
        """As results are printed; rates in bytes per second, times in nanoseconds."""
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
        return "at no rate"
    return "at any rate" if math.isinf(rate) else f"below {_bits(rate)}"


def _bits(rate: float) -> str:
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if 8 * rate >= factor:
            return f"{8 * rate / factor:.3g} {unit}"
    return f"{8 * rate:.3g} bit/s"


@dataclass(frozen=True)
class Spreading:
    """Ways to spread a step over workers.

    Attributes:
        predictions: the cheapest sample first, then what does not apply.
        compressing: should replicas compress? None where they do not apply.
    """

    predictions: tuple[Prediction, ...]
    compressing: Compressing | None

    def tables(self, graph: Graph, cluster: Cluster, past: str = "") -> list[Table]:
        """The predictions, and what communication costs each; `past` as of `Advice.table`."""
        words = self.compressing.in_words if self.compressing else []
        return [
            prediction_table(graph, self.predictions, past),
            shared_table(graph, cluster, applying(self.predictions), *words),
        ]

    def to_json(self) -> dict[str, Any]:
        """As results are printed."""
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
    say: Callable[[str], None] = lambda line: None,
) -> Spreading:
    """Predict every way to spread the step over `workers` (0: all) devices of the cluster.

    Raises:
        InvalidArgumentError: more workers than the cluster has devices, or fewer than 2.
    """
    count = workers or cluster.devices
    combinations = [technique.on_workers(one, count) for one in _combinations()]
    predictions = predict(
        graph, combinations, durations=durations, cluster=cluster, widen=widen, say=say
    )
    ranked = sorted(applying(predictions), key=lambda p: p.ratio)
    # Replicas whose gradients can be compressed, without; the cheapest where there are several.
    dense = next(
        (p for p in ranked if [one.traits.hook for one in p.techniques] == ["provides"]), None
    )
    compressing = None
    if dense is not None:
        (replicas,) = dense.techniques
        compressed = [
            p
            for p in ranked
            if replicas in p.techniques and any(one.traits.compresses for one in p.techniques)
        ]
        compressing = _compressing(dense, compressed)
    return Spreading((*ranked, *refused(predictions)), compressing)


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
