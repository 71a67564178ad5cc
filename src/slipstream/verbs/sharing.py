"""Bottlenecks of a step on several workers: exposed communication, walls, cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.cluster import Cluster
from slipstream.graph import (
    Graph,
    Kind,
    StepPhase,
    Timeline,
    communication,
    exposed_by_module,
    replace_tasks,
    replay,
)
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent

if TYPE_CHECKING:
    from slipstream.verbs.results import Predicted

_HOURS = 3600e9
# Layers that wait less than this share of all waits are ignored; a layer counts as hidden if at
# most this share of its wait remains.
_MIN_WAIT, _MAX_HIDDEN = 0.01, 0.05
_MAX_NAMED = 6
# Half of a normal distribution lies within this many standard deviations of its mean.
_MIDDLE_HALF = 0.674
_MAX_ERROR = 0.9


@dataclass(frozen=True)
class Wall:
    """A contribution to the step's time.

    Attributes:
        name: short description.
        saved_ns: how much shorter the step would be without it.
    """

    name: str
    saved_ns: float


@dataclass(frozen=True)
class Shared:
    """Communication and cost of a step that several workers take together.

    Attributes:
        cluster: its name.
        workers: how many.
        exposed_ns: time that the step waits for communication or spends on work for it; see
            `slipstream.graph.views.exposed`.
        hidden_ns: the remaining communication time.
        sent_bytes: bytes that the busiest worker sends per step.
        bottleneck: the link that communication waits for most; "" if there is none.
        walls: contributions to the step's time, the largest first.
        next_wall: the largest of them if the first one were gone.
        dollars_per_hour: of the workers' devices; None if no price is known.
        fits: whether the step's memory fits into a device; None if either is unknown.
        exposed_by_layer: nanoseconds of `exposed_ns` by the module whose gradients are awaited.
    """

    cluster: str
    workers: int
    exposed_ns: float
    hidden_ns: float
    sent_bytes: float
    bottleneck: str
    walls: tuple[Wall, ...]
    next_wall: str
    dollars_per_hour: float | None
    fits: bool | None
    exposed_by_layer: Mapping[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> str:
        return self.walls[0].name if self.walls else ""

    def dollars(self, duration_ns: float) -> float | None:
        """Return the cost of all workers for this duration; None if no price is known."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour * duration_ns / _HOURS

    def to_detail(self) -> dict[str, Any]:
        """Return the values that the ledger keeps to compare with a measurement."""
        return {
            "cluster": self.cluster, "workers": self.workers, "sent_bytes": self.sent_bytes,
            "exposed_by_layer": dict(self.exposed_by_layer),
        }  # fmt: skip

    def to_json(self, step_ns: float) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds, sizes in bytes."""
        values = asdict(self)
        values["sent_bytes_per_worker"] = values.pop("sent_bytes")
        return {**values, "dollars_per_step": self.dollars(step_ns)}


def shared_step(timeline: Timeline, cluster: Cluster) -> Shared:
    graph = timeline.graph
    communication_ns = communication(timeline).total_ns
    by_layer = exposed_by_module(timeline)
    exposed_ns = sum(by_layer.values())
    limits = walls(timeline)
    link_ns: dict[str, float] = {}
    sent_bytes: dict[int, float] = {}
    for row in graph.exchanges:
        rank = int(graph.tasks.rank[row.task])
        sent_bytes[rank] = sent_bytes.get(rank, 0.0) + row.sent_bytes
        spent = float(graph.tasks.duration_ns[row.task])
        link_ns[row.bottleneck] = link_ns.get(row.bottleneck, 0.0) + spent
    price = cluster.price_per_hour
    memory = None if cluster.device is None else cluster.device.memory_bytes
    peak = timeline.peak_bytes
    return Shared(
        cluster.name,
        graph.workers,
        exposed_ns,
        max(communication_ns - exposed_ns, 0.0),
        max(sent_bytes.values(), default=0.0),
        max(link_ns, key=lambda link: link_ns[link], default=""),
        limits,
        _next(timeline, limits),
        None if price is None else price / cluster.devices * graph.workers,
        None if memory is None or not peak else peak <= memory.value,
        by_layer,
    )


def shared_table(
    graph: Graph, cluster: Cluster, predictions: Sequence[Predicted], *words: str
) -> Table:
    """Return a table with a row per distributed prediction: communication, cost and walls."""
    spread = [(p, p.shared) for p in predictions if p.shared is not None]
    notes = list(words)
    for p, shared in spread:
        first, first_shared = spread[0]
        if p is not first:
            notes.append(
                no_longer_exposed(
                    first.technique, first_shared.exposed_by_layer,
                    p.technique, shared.exposed_by_layer,
                )
            )  # fmt: skip
        if shared.fits is False:
            notes.append(
                f"{p.technique}: {format_bytes(p.memory[1])} exceed the memory of a device"
            )
    kind = "" if cluster.device is None else f"; a {cluster.device.kind} is assumed to compute"
    notes += [
        f"on {cluster.name}: {cluster.devices} devices{kind or '; devices are assumed to compute'} "
        "as the recorded step did",
        _basis(cluster),
    ]
    if cluster.price_per_hour is None:
        notes.append("price unknown: add price_per_hour to the cluster's device")
    elif cluster.device is not None and cluster.device.price_per_hour is not None:
        notes.append(f"price: {cluster.device.price_per_hour.source}")
    return Table.of(spread, _fields(graph), "communication, cost and walls", notes)


def _fields(graph: Graph) -> tuple[Field[tuple[Predicted, Shared]], ...]:
    return (
        Field.of("technique", lambda row: row[0].technique),
        Field.number("step", lambda row: format_duration(row[0].step_ns)),
        Field.number("samples/s", lambda row: samples_per_s(row[0])),
        Field.number("exposed", lambda row: format_duration(row[1].exposed_ns)),
        Field.number("hidden", lambda row: format_duration(row[1].hidden_ns), optional=True),
        Field.number("sent/worker", lambda row: format_bytes(row[1].sent_bytes)),
        Field.number("$/M samples" if graph.samples else "$/M steps", _price),
        Field.of("wall", lambda row: row[1].wall or "-"),
        Field.of("then", lambda row: row[1].next_wall or "-"),
    )


def samples_per_s(p: Predicted) -> str:
    """Format samples per second of the predicted step; a dash if unknown."""
    return f"{p.samples[1] / p.step_ns * 1e9:.4g}" if p.samples[1] else "-"


def _price(row: tuple[Predicted, Shared]) -> str:
    dollars = row[1].dollars(row[0].step_ns)
    return "-" if dollars is None else f"{dollars / max(row[0].samples[1], 1) * 1e6:.3g}"


def _basis(cluster: Cluster) -> str:
    calibration = cluster.calibration
    if calibration is None:
        return (
            f"network: {cluster.provenance}, assumed accurate to 25 %; "
            "measure it: slipstream cluster measure"
        )
    return (
        f"network: fitted to measurements of {calibration.date}, 9 of 10 within "
        f"{format_percent(calibration.residual_p90)}"
    )


def no_longer_exposed(
    name: str, before_ns: Mapping[str, float], other: str, after_ns: Mapping[str, float]
) -> str:
    """Name the layers that the step of `name` waits for and that of `other` hides, in a sentence.

    Empty if there is none. Waits below a hundredth of all waits do not count.
    """
    negligible = _MIN_WAIT * sum(before_ns.values())
    waited = [layer for layer, spent in before_ns.items() if spent > negligible]
    gone = [name_ for name_ in waited if after_ns.get(name_, 0.0) <= _MAX_HIDDEN * before_ns[name_]]
    if not gone:
        return ""
    named = ", ".join(gone[:_MAX_NAMED]) + (", ..." if len(gone) > _MAX_NAMED else "")
    return f"of {len(waited)} layers that {name} waits for, {other} hides {len(gone)}: {named}"


def network_error_ns(graph: Graph) -> float:
    """Return the standard deviation of the step's time due to the network's error, in ns.

    A fitted or data-sheet rate is off for all communication together, and hidden communication does
    not matter. So the step is simulated with all of it longer, and shorter.
    """
    tasks = graph.tasks
    communicating = tasks.kind == Kind.COMMUNICATION
    if not graph.exchanges:
        return 0.0
    error = np.where(communicating, np.minimum(tasks.spread / _MIDDLE_HALF, _MAX_ERROR), 0.0)
    longer, shorter = (
        replay(replace_tasks(graph, duration_ns=tasks.duration_ns * factor)).step_ns
        for factor in (1.0 + error, 1.0 - error)
    )
    return abs(longer - shorter) / 2


def walls(timeline: Timeline) -> tuple[Wall, ...]:
    """Return the time that removing each contribution alone would save, the largest first."""
    saved = [
        Wall(name, timeline.step_ns - replay(without(timeline.graph)).step_ns)
        for name, without in _WALLS.items()
    ]
    return tuple(sorted((w for w in saved if w.saved_ns > 0), key=lambda w: -w.saved_ns))


def _next(timeline: Timeline, found: tuple[Wall, ...]) -> str:
    if not found:
        return ""
    behind = walls(replay(_WALLS[found[0].name](timeline.graph)))
    return next((wall.name for wall in behind if wall.name != found[0].name), "")


def _phases(*phases: StepPhase) -> Callable[[Graph], Graph]:
    def without(graph: Graph) -> Graph:
        communicating = graph.tasks.kind == Kind.COMMUNICATION
        waiting = graph.tasks.kind == Kind.WAIT
        return _without_time(graph, np.isin(graph.tasks.phase, phases) & ~communicating & ~waiting)

    return without


def _without_time(graph: Graph, chosen: NDArray[np.bool_]) -> Graph:
    """Return `graph` with the chosen tasks, and the gaps behind them, taking no time."""
    tasks = graph.tasks
    return replace_tasks(
        graph,
        duration_ns=np.where(chosen, 0.0, tasks.duration_ns),
        gap_ns=np.where(chosen, 0.0, tasks.gap_ns),
    )


def _latencies(graph: Graph) -> NDArray[np.float64]:
    """Return float64 [n]: the size-independent part of each communication's time, in ns."""
    latency = np.zeros(len(graph))
    for row in graph.exchanges:
        latency[row.task] = min(row.latency_ns, float(graph.tasks.duration_ns[row.task]))
    return latency


def _without_bytes(graph: Graph) -> Graph:
    communicating = graph.tasks.kind == Kind.COMMUNICATION
    duration_ns = graph.tasks.duration_ns
    return replace_tasks(graph, duration_ns=np.where(communicating, _latencies(graph), duration_ns))


_WALLS: dict[str, Callable[[Graph], Graph]] = {
    "compute": _phases(StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OTHER),
    "update": _phases(StepPhase.OPTIMIZER),
    "bandwidth": _without_bytes,
    "latency": lambda graph: replace_tasks(
        graph, duration_ns=graph.tasks.duration_ns - _latencies(graph)
    ),
    "slowest worker": lambda graph: _without_time(graph, graph.tasks.kind == Kind.WAIT),
}
