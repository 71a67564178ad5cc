"""A step's time against the number of workers that share it, and its bottlenecks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.graph import Graph
from slipstream.tables import Field, Table
from slipstream.technique import Technique
from slipstream.units import format_duration, format_percent
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Prediction
from slipstream.verbs.sharing import Shared, samples_per_s
from slipstream.verbs.walls import OUTSIDE, REMEDIES, RunWall, TrainingPlan, walls_of, walls_table

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

PARTS = ("compute", "update", "slowest worker", "latency", "bandwidth")
"""Parts of a step's time, in drawing order."""
RUN_PARTS = (*PARTS, *OUTSIDE)
"""Parts of a run's time per step, in drawing order."""


@dataclass(frozen=True)
class Point:
    """The step on one number of workers.

    Attributes:
        prediction: of the distributed step.
        efficiency: samples per second and worker, relative to one worker alone; with a fixed
            global batch, relative to the first number of workers.
        walls: what limits a run of such steps, the largest first.
    """

    workers: int
    prediction: Prediction
    efficiency: float
    walls: tuple[RunWall, ...] = ()

    @property
    def parts_ns(self) -> dict[str, float]:
        """The step's exposed time by `PARTS`; the remainder is compute."""
        shared = self.prediction.shared
        if shared is None:
            return {}
        saved = {wall.name: wall.saved_ns for wall in shared.walls}
        communication_ns = saved.get("latency", 0.0) + saved.get("bandwidth", 0.0)
        # Time hidden by two parts together is saved by removing neither alone.
        scale = min(1.0, shared.exposed_ns / communication_ns) if communication_ns else 0.0
        parts = {
            "update": saved.get("update", 0.0),
            "slowest worker": saved.get("slowest worker", 0.0),
            "latency": saved.get("latency", 0.0) * scale,
            "bandwidth": saved.get("bandwidth", 0.0) * scale,
        }
        parts["compute"] = max(self.prediction.step_ns - sum(parts.values()), 0.0)
        return {name: parts[name] for name in PARTS}

    @property
    def run_parts_ns(self) -> dict[str, float]:
        """`parts_ns`, and the step's part of the run's time outside of steps, by `RUN_PARTS`."""
        outside = {wall.name: wall.ns or 0.0 for wall in self.walls if wall.name in OUTSIDE}
        return {**self.parts_ns, **outside}


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
        technique: the distributed technique or combination.
        cluster: its name.
        points: a point per number of workers.
    """

    technique: str
    cluster: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        return f"{self.technique} on {self.cluster}"

    @property
    def drawn(self) -> list[tuple[Point, Predicted, Shared]]:
        rows = [(point, point.prediction) for point in self.points]
        return [(point, p, p.shared) for point, p in rows if isinstance(p, Predicted) and p.shared]

    def table(self) -> Table:
        pairs = [(point.workers, point.prediction.why_not) for point in self.points]
        notes = [f"{workers} workers: {why_not}" for workers, why_not in pairs if why_not]
        return Table.of(self.drawn, _FIELDS, self.title, notes)

    def walls_table(self) -> Table:
        """Return the walls on the largest number of workers for which the technique applies."""
        if not self.drawn:
            return walls_table("walls", (), 0.0)
        point, prediction, _ = self.drawn[-1]
        title = f"walls of {self.technique} on {point.workers} workers of {self.cluster}"
        return walls_table(title, point.walls, prediction.step_ns)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the JSON payload; times in nanoseconds."""
        return [
            {
                "workers": point.workers,
                "parts_ns": point.parts_ns,
                "walls": [asdict(wall) for wall in point.walls],
                **point.prediction.to_json(),
            }
            for point in self.points
        ]


def curve(
    graph: Graph,
    cluster: Cluster,
    workers: Sequence[int],
    *,
    text: str = "ddp",
    global_batch: int = 0,
    plan: TrainingPlan | None = None,
    durations: Durations | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Scaling:
    """Predict the step on each number of workers.

    Args:
        text: spec of the distributed technique or combination.
        global_batch: samples of all workers together; 0: the recorded number on each worker, so
            that the batch grows with them, or of all workers if they divide samples or layers.
        plan: the run around the steps. Gains of remedies are predicted for the last number of
            workers.

    Raises:
        InvalidArgumentError: no workers, more than the cluster has, or samples that do not divide
            evenly among them.
        UsageError: `text` has no distributed technique.
    """
    if not workers:
        raise InvalidArgumentError("workers", "is empty", remedy="for example --workers 2,4,8")
    combination, combinations = technique.parse(text), []
    # Workers that divide images or the model all take part in the whole batch.
    divide = all(part.traits.axis == "data" for part in combination)
    for count in workers:
        parts = technique.on_workers(combination, count)
        if global_batch:
            per_worker, remainder = divmod(global_batch, count) if divide else (global_batch, 0)
            if remainder or not per_worker:
                raise InvalidArgumentError(
                    "global_batch",
                    f"{global_batch} samples do not divide evenly among {count} workers",
                )
            if per_worker != graph.samples:
                parts = (*technique.parse(f"batch_size:{per_worker}"), *parts)
        combinations.append(parts)
    predictions = predict(graph, combinations, durations=durations, cluster=cluster, report=report)
    rates = [p.speedup / count for count, p in zip(workers, predictions, strict=True)]
    base = 1.0
    if global_batch:
        base = next((rate for rate in rates if math.isfinite(rate)), 1.0)
    points = [
        Point(count, p, rate / base)
        for count, p, rate in zip(workers, predictions, rates, strict=True)
    ]
    remedies = _remedies(graph, combinations[-1], cluster, durations, report)
    return Scaling(
        text,
        cluster.name,
        tuple(
            _with_walls(
                point,
                graph,
                plan or TrainingPlan(),
                bool(global_batch) or not divide,
                remedies if point is points[-1] else {},
            )
            for point in points
        ),
    )


def _remedies(
    graph: Graph,
    combination: Sequence[Technique],
    cluster: Cluster,
    durations: Durations | None,
    report: Callable[[str], None],
) -> dict[str, list[Predicted]]:
    """Predict the step with each remedy that can be added, by wall."""
    added: list[tuple[str, tuple[Technique, ...]]] = []
    for wall, specs in REMEDIES.items():
        for spec in specs:
            # Two techniques for the same communication exclude each other.
            with contextlib.suppress(UsageError):
                parts = technique.combination((*combination, *technique.parse(spec)))
                added.append((wall, parts))
    found: dict[str, list[Predicted]] = {wall: [] for wall in REMEDIES}
    alternatives = [parts for _, parts in added]
    predictions = predict(graph, alternatives, durations=durations, cluster=cluster, report=report)
    for (wall, _), prediction in zip(added, predictions, strict=True):
        if isinstance(prediction, Predicted):
            found[wall].append(prediction)
    return found


def _with_walls(
    point: Point, graph: Graph, plan: TrainingPlan, fixed_batch: bool,
    remedies: Mapping[str, Sequence[Predicted]],
) -> Point:  # fmt: skip
    p = point.prediction
    if not isinstance(p, Predicted) or p.shared is None:
        return point
    found = walls_of(
        graph, p, point.parts_ns, plan, fixed_batch=fixed_batch, remedies=remedies
    )  # fmt: skip
    return replace(point, walls=found)
