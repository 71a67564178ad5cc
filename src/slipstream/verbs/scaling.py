"""A step's time against the number of workers that share it, and the walls it meets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Prediction
from slipstream.verbs.sharing import Shared, samples_per_s

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

PARTS = ("compute", "update", "slowest worker", "latency", "bandwidth")
"""What a step is split into, in the order in which they are drawn."""


@dataclass(frozen=True)
class Point:
    """One number of workers.

    Attributes:
        prediction: of the step they share.
        efficiency: samples per second and worker: over those of one worker by itself or, where
            the batch of all is kept the same, over those of the first number of workers.
    """

    workers: int
    prediction: Prediction
    efficiency: float

    @property
    def parts_ns(self) -> dict[str, float]:
        """The step's time by `PARTS`: what each takes, exposed; the rest is compute."""
        one = self.prediction.shared
        if one is None:
            return {}
        saved = {wall.name: wall.saved_ns for wall in one.walls}
        talk = saved.get("latency", 0.0) + saved.get("bandwidth", 0.0)
        # What two of them hide together, neither saves alone.
        fit = min(1.0, one.exposed_ns / talk) if talk else 0.0
        parts = {
            "update": saved.get("update", 0.0),
            "slowest worker": saved.get("slowest worker", 0.0),
            "latency": saved.get("latency", 0.0) * fit,
            "bandwidth": saved.get("bandwidth", 0.0) * fit,
        }
        parts["compute"] = max(self.prediction.step_ns - sum(parts.values()), 0.0)
        return {name: parts[name] for name in PARTS}


_FIELDS: tuple[Field[tuple[Point, Predicted, Shared]], ...] = (
    Field.number("workers", lambda row: str(row[0].workers)),
    Field.number("step", lambda row: format_duration(row[1].step_ns)),
    Field.number("90 % interval", lambda row: _reach(row[1])),
    Field.number("samples/s", lambda row: samples_per_s(row[1])),
    Field.number("efficiency", lambda row: format_percent(row[0].efficiency)),
    Field.number("exposed", lambda row: format_duration(row[2].exposed_ns)),
    Field.of("wall", lambda row: row[2].wall or "-"),
    Field.of("then", lambda row: row[2].next_wall or "-"),
)


def _reach(p: Predicted) -> str:
    low, high = (format_duration(p.step_ns * end / p.ratio) for end in (p.low, p.high))
    return f"[{low}, {high}]"


@dataclass(frozen=True)
class Scaling:
    """A step on several numbers of workers.

    Attributes:
        technique: what spreads it.
        cluster: the name of the one it runs on.
        points: one for each number of workers.
    """

    technique: str
    cluster: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """What spreads, over what."""
        return f"{self.technique} on {self.cluster}"

    @property
    def drawn(self) -> list[tuple[Point, Predicted, Shared]]:
        """The points that are predicted."""
        rows = [(point, point.prediction) for point in self.points]
        return [(point, p, p.shared) for point, p in rows if isinstance(p, Predicted) and p.shared]

    def table(self) -> Table:
        """One row a number of workers: time, efficiency, the walls."""
        pairs = [(point.workers, point.prediction.why_not) for point in self.points]
        notes = [f"{workers} workers: {why_not}" for workers, why_not in pairs if why_not]
        return Table.of(self.drawn, _FIELDS, self.title, notes)

    def to_json(self) -> list[dict[str, Any]]:
        """As results are printed; times in nanoseconds."""
        return [
            {"workers": one.workers, "parts_ns": one.parts_ns, **one.prediction.to_json()}
            for one in self.points
        ]


def curve(
    graph: Graph,
    cluster: Cluster,
    workers: Sequence[int],
    *,
    text: str = "ddp",
    global_batch: int = 0,
    durations: Durations | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Scaling:
    """The step on each number of workers, each with the recorded batch.

    Args:
        text: the technique, or combination, that spreads it.
        global_batch: samples of all workers together, kept the same; 0: each has the recorded
            number, so that the batch grows with the workers.

    Raises:
        InvalidArgumentError: no workers, more than the cluster has, or samples that do not share
            out evenly.
        UsageError: `text` spreads nothing.
    """
    if not workers:
        raise InvalidArgumentError("workers", "is empty", remedy="as --workers 2,4,8")
    combination, combinations = technique.parse(text), []
    for count in workers:
        parts = technique.on_workers(combination, count)
        if global_batch:
            each, left = divmod(global_batch, count)
            if left or not each:
                raise InvalidArgumentError(
                    "global_batch", f"{global_batch} samples do not share out among {count} workers"
                )
            if each != graph.samples:
                parts = (*technique.parse(f"batch_size:{each}"), *parts)
        combinations.append(parts)
    predictions = predict(graph, combinations, durations=durations, cluster=cluster, say=say)
    rates = [one.speedup / count for count, one in zip(workers, predictions, strict=True)]
    base = 1.0
    if global_batch:
        base = next((rate for rate in rates if math.isfinite(rate)), 1.0)
    points = zip(workers, predictions, rates, strict=True)
    return Scaling(
        text, cluster.name, tuple(Point(count, one, rate / base) for count, one, rate in points)
    )
