"""What a step that workers take together is held up by: communication that shows, walls, money."""

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
# Of the step's whole standstill: what is no wait worth a word; and of a layer's: what is left of
# one that has gone.
_NO_WAIT, _GONE = 0.01, 0.05
_NAMED = 6
# The middle half of a normal distribution reaches so many standard deviations to each side.
_MIDDLE_HALF = 0.674
_MOST_OFF = 0.9


@dataclass(frozen=True)
class Wall:
    """Something a step's time goes to.

    Attributes:
        name: in a few words.
        saved_ns: by how much the step would be shorter, took it no time at all.
    """

    name: str
    saved_ns: float


@dataclass(frozen=True)
class Shared:
    """A step that several workers take together.

    Attributes:
        cluster: its name.
        workers: how many.
        exposed_ns: how long the step stands still for communication, and what is done for it
            meanwhile; see `slipstream.graph.views.exposed`.
        hidden_ns: how much more all communication takes.
        sent_bytes: what the busiest worker sends in a step.
        bottleneck: the link that communication waits for most; "" where there is none.
        walls: what the step's time goes to, the most first.
        next_wall: what would be the first of them, were the first one gone.
        dollars_per_hour: of the workers' devices; None where no price is known.
        fits: whether the step's memory fits into a device; None where either is not known.
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
        """What most of the step's time goes to."""
        return self.walls[0].name if self.walls else ""

    def dollars(self, duration_ns: float) -> float | None:
        """What all workers cost for so long."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour * duration_ns / _HOURS

    def to_detail(self) -> dict[str, Any]:
        """As the ledger keeps it: what a measurement can be held against."""
        return {
            "cluster": self.cluster, "workers": self.workers, "sent_bytes": self.sent_bytes,
            "exposed_by_layer": dict(self.exposed_by_layer),
        }  # fmt: skip

    def to_json(self, step_ns: float) -> dict[str, Any]:
        """As results are printed; times in nanoseconds, sizes in bytes."""
        values = asdict(self)
        values["sent_bytes_per_worker"] = values.pop("sent_bytes")
        return {**values, "dollars_per_step": self.dollars(step_ns)}


def shared_step(timeline: Timeline, cluster: Cluster) -> Shared:
    """What is to be said of a simulated step that was edited to be shared."""
    graph = timeline.graph
    talks_ns = communication(timeline).total_ns
    by_layer = exposed_by_module(timeline)
    exposed_ns = sum(by_layer.values())
    limits = walls(timeline)
    held: dict[str, float] = {}
    for row in graph.exchanges:
        spent = float(graph.tasks.duration_ns[row.task])
        held[row.bottleneck] = held.get(row.bottleneck, 0.0) + spent
    price = cluster.price_per_hour
    memory = None if cluster.device is None else cluster.device.memory_bytes
    peak = timeline.peak_bytes
    return Shared(
        cluster.name,
        graph.workers,
        exposed_ns,
        max(talks_ns - exposed_ns, 0.0),
        sum(row.sent_bytes for row in graph.exchanges),
        max(held, key=lambda link: held[link], default=""),
        limits,
        _next(timeline, limits),
        None if price is None else price / cluster.devices * graph.workers,
        None if memory is None or not peak else peak <= memory.value,
        by_layer,
    )


def shared_table(
    graph: Graph, cluster: Cluster, predictions: Sequence[Predicted], *words: str
) -> Table:
    """One row a prediction that spreads the step: communication, what is sent, cost, the walls.

    Args:
        words: notes that come first.
    """
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
                f"{p.technique}: {format_bytes(p.memory[1])} do not fit into the memory of a device"
            )
    kind = "" if cluster.device is None else f"; a {cluster.device.kind} is taken to compute"
    notes += [
        f"on {cluster.name}: {cluster.devices} devices{kind or '; devices are taken to compute'} "
        "as the recorded step did",
        _basis(cluster),
    ]
    if cluster.price_per_hour is None:
        notes.append("no price is known: add price_per_hour to the cluster's device")
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
    """Samples a second of the predicted step; a dash where they are not known."""
    return f"{p.samples[1] / p.step_ns * 1e9:.4g}" if p.samples[1] else "-"


def _price(row: tuple[Predicted, Shared]) -> str:
    dollars = row[1].dollars(row[0].step_ns)
    return "-" if dollars is None else f"{dollars / max(row[0].samples[1], 1) * 1e6:.3g}"


def _basis(cluster: Cluster) -> str:
    known = cluster.calibration
    if known is None:
        return (
            f"network: {cluster.provenance}, taken to be 25 % unsure; "
            "measure yours: slipstream cluster measure"
        )
    return (
        f"network: fitted to measurements of {known.date}, nine of ten within "
        f"{format_percent(known.residual_p90)}"
    )


def no_longer_exposed(
    name: str, before_ns: Mapping[str, float], other: str, after_ns: Mapping[str, float]
) -> str:
    """Which layers the step of `name` waits for and that of `other` does not, in a sentence.

    Empty where there is none. Of the first, waits below a hundredth of all do not count.
    """
    least = _NO_WAIT * sum(before_ns.values())
    waited = [layer for layer, spent in before_ns.items() if spent > least]
    gone = [one for one in waited if after_ns.get(one, 0.0) <= _GONE * before_ns[one]]
    if not gone:
        return ""
    named = ", ".join(gone[:_NAMED]) + (", ..." if len(gone) > _NAMED else "")
    return f"of {len(waited)} layers that {name} waits for, {other} hides {len(gone)}: {named}"


def network_error_ns(graph: Graph) -> float:
    """Standard deviation of the step's time that comes from the network's.

    What was fitted or read off a data sheet is off for all communications alike; what of it is
    hidden does not matter. So the step is simulated with all of them longer, and shorter.
    """
    tasks = graph.tasks
    talks = tasks.kind == Kind.COMMUNICATION
    if not graph.exchanges:
        return 0.0
    off = np.where(talks, np.minimum(tasks.spread / _MIDDLE_HALF, _MOST_OFF), 0.0)
    longer, shorter = (
        replay(replace_tasks(graph, duration_ns=tasks.duration_ns * factor)).step_ns
        for factor in (1.0 + off, 1.0 - off)
    )
    return abs(longer - shorter) / 2


def walls(timeline: Timeline) -> tuple[Wall, ...]:
    """What the step's time goes to, each by itself taken away; the most first."""
    saved = [
        Wall(name, timeline.step_ns - replay(without(timeline.graph)).step_ns)
        for name, without in _WALLS.items()
    ]
    return tuple(sorted((w for w in saved if w.saved_ns > 0), key=lambda w: -w.saved_ns))


def _next(timeline: Timeline, found: tuple[Wall, ...]) -> str:
    """The first wall behind the first one."""
    if not found:
        return ""
    behind = walls(replay(_WALLS[found[0].name](timeline.graph)))
    return next((wall.name for wall in behind if wall.name != found[0].name), "")


def _phases(*phases: StepPhase) -> Callable[[Graph], Graph]:
    def without(graph: Graph) -> Graph:
        talks = graph.tasks.kind == Kind.COMMUNICATION
        waits = graph.tasks.kind == Kind.WAIT
        return _free(graph, np.isin(graph.tasks.phase, phases) & ~talks & ~waits)

    return without


def _free(graph: Graph, chosen: NDArray[np.bool_]) -> Graph:
    """`graph` with the chosen tasks, and the gaps behind them, taking no time."""
    tasks = graph.tasks
    return replace_tasks(
        graph,
        duration_ns=np.where(chosen, 0.0, tasks.duration_ns),
        gap_ns=np.where(chosen, 0.0, tasks.gap_ns),
    )


def _latencies(graph: Graph) -> NDArray[np.float64]:
    """float64 [n]: of each communication's time, what does not depend on its size."""
    latency = np.zeros(len(graph))
    for row in graph.exchanges:
        latency[row.task] = min(row.latency_ns, float(graph.tasks.duration_ns[row.task]))
    return latency


def _without_bytes(graph: Graph) -> Graph:
    talks = graph.tasks.kind == Kind.COMMUNICATION
    now = graph.tasks.duration_ns
    return replace_tasks(graph, duration_ns=np.where(talks, _latencies(graph), now))


_WALLS: dict[str, Callable[[Graph], Graph]] = {
    "compute": _phases(StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OTHER),
    "update": _phases(StepPhase.OPTIMIZER),
    "bandwidth": _without_bytes,
    "latency": lambda graph: replace_tasks(
        graph, duration_ns=graph.tasks.duration_ns - _latencies(graph)
    ),
    "slowest worker": lambda graph: _free(graph, graph.tasks.kind == Kind.WAIT),
}
