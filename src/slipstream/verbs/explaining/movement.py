"""Show where bytes are moved and the possible gain, for ``slipstream explain --movement``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.durations import Durations
from slipstream.durations.movement import Moved, OperatorClass, ceiling, movement
from slipstream.durations.peaks import Peaks, peaks_of, probes
from slipstream.errors import GraphError, UnknownNameError
from slipstream.graph import Graph, Kind
from slipstream.measure import facts_machine
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent
from slipstream.verbs.results import named

_GROUPS = ("operator", "module", "line", "phase", "kind")
_NO_OPERATOR = "no operator"
_MEANING = (
    "Moved: each kernel reads its inputs once and writes its outputs once. Had to move: the part "
    "that crosses boundaries of regions of operators that could run as one kernel (slipstream "
    "predict -t fusion predicts the gain)."
)
# Maximum groups of one kind on a page.
_MAX_PAGE_ROWS = 60
_SAME_MACHINE = ("cpu.model", "cpu.logical")


@dataclass(frozen=True)
class MovedRow:
    """Bytes, arithmetic and time of a group of operators.

    Attributes:
        name: of the group.
        time_ns: of its tasks, as recorded.
        moved_bytes, needed_bytes: inputs read and outputs written once per kernel; the part of
            them that crosses the boundary of a region that could be one kernel.
        operations: multiplications and additions, counted separately.
        least_ns: minimum time by the machine's limits; None if they are unknown.
    """

    name: str
    time_ns: float
    tasks: int
    moved_bytes: int
    needed_bytes: int
    operations: int
    least_ns: float | None

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.operations / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def gap(self) -> float | None:
        """Ratio of the recorded time to the minimum; None if that is unknown."""
        return self.time_ns / self.least_ns if self.least_ns else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "time_ns": self.time_ns, "tasks": self.tasks,
            "moved_bytes": self.moved_bytes, "needed_bytes": self.needed_bytes,
            "operations": self.operations, "intensity": self.intensity,
            "least_ns": self.least_ns, "gap": self.gap,
        }  # fmt: skip


def movement_report(
    graph: Graph, by: str, top: int, report: Callable[[str], None]
) -> tuple[list[Table], dict[str, Any]]:
    """Return tables and JSON: classes, then the `top` groups with most avoidable bytes; in ns.

    Measures this machine's limits, which takes some seconds, if the step was recorded on it and
    they are not cached.
    """
    if by not in _GROUPS:
        raise UnknownNameError("group", by, _GROUPS)
    if not graph.calls:
        raise GraphError(
            "the recording has no operator arguments, which determine the bytes moved",
            remedy="record a step on one thread with slipstream profile",
        )
    limits = _peaks(graph, report)
    payload, classes = _totals(graph, limits)
    groups = _groups(graph, by, limits)
    payload |= {"by": by, "groups": [row.to_json() for row in groups]}
    step_ns = payload["step_ns"]
    shown = groups[:top]
    omitted = len(groups) - len(shown)
    notes = [in_a_sentence(payload, classes), _MEANING, _limits_note(limits)]
    title = f"{named(graph)}: {format_duration(step_ns)} per step"
    more = [f"{omitted} more groups omitted"] if omitted else []
    return [
        Table.of(classes, _fields("class", step_ns), title, notes),
        Table.of(shown, _fields(by, step_ns), f"most avoidable movement, by {by}", more),
    ], payload


def movement_page(graph: Graph) -> dict[str, Any] | None:
    """Return a page's sentence, notes and first groups of every grouping.

    Uses the machine's limits only if they are cached; measures nothing. None if operators'
    arguments were not recorded.
    """
    if not graph.calls:
        return None
    limits = _peaks(graph)
    payload, classes = _totals(graph, limits)
    return {
        "sentence": in_a_sentence(payload, classes),
        "notes": [_MEANING, _limits_note(limits)],
        "step_ns": payload["step_ns"],
        "groups": {
            "operator": [
                row.to_json() for row in _groups(graph, "operator", limits)[:_MAX_PAGE_ROWS]
            ],
            "class": payload["classes"],
            "source line": [
                row.to_json() for row in _groups(graph, "line", limits)[:_MAX_PAGE_ROWS]
            ],
            "phase": [row.to_json() for row in _groups(graph, "phase", limits)],
        },
    }


def _totals(graph: Graph, limits: Peaks | None) -> tuple[dict[str, Any], list[MovedRow]]:
    """Return the step's totals as JSON, and its classes, including one without an operator."""
    rows = movement(graph)
    classes = _grouped(graph, rows, _keys(graph, "kind"), limits)
    spent = {moved.task for moved in rows}
    outside = [t for t in range(len(graph)) if t not in spent]
    outside_ns = float(graph.tasks.duration_ns[outside].sum() + graph.tasks.gap_ns.sum())
    classes.append(MovedRow(_NO_OPERATOR, outside_ns, len(outside), 0, 0, 0, None))
    step_ns = sum(row.time_ns for row in classes)
    busy_ns = sum(row.time_ns for row in classes if row.name == OperatorClass.CONTRACTION)
    return {
        "step_ns": step_ns,
        "moved_bytes": sum(moved.moved_bytes for moved in rows),
        "needed_bytes": sum(moved.needed_bytes for moved in rows),
        "operations": sum(moved.operations for moved in rows),
        "ceiling": ceiling(busy_ns, step_ns) if busy_ns else None,
        "classes": [row.to_json() for row in classes],
        "limits": None if limits is None else limits.to_json(),
    }, classes


def _groups(graph: Graph, by: str, limits: Peaks | None) -> list[MovedRow]:
    groups = _grouped(graph, movement(graph), _keys(graph, by), limits)
    return sorted(groups, key=lambda row: (row.needed_bytes - row.moved_bytes, -row.time_ns))


def in_a_sentence(payload: Mapping[str, Any], classes: Sequence[MovedRow]) -> str:
    """Describe the maximum possible gain in a sentence."""
    bound = payload["ceiling"]
    moved, needed = payload["moved_bytes"], payload["needed_bytes"]
    avoidable = (
        f"{format_bytes(moved)} are moved, of which {format_bytes(needed)} are necessary "
        f"({format_percent(1 - needed / moved)} less)"
        if moved
        else "no bytes are moved"
    )
    if bound is None:
        return f"The step has no matmuls or convolutions; {avoidable}."
    share = 1 - 1 / bound
    return (
        "Everything but matmuls and convolutions is "
        f"{format_percent(share)} of this step: at most {bound:.2f}x if all of it took no time. "
        f"Bytes: {avoidable}."
    )


def _keys(graph: Graph, by: str) -> Callable[[Moved], str]:
    if by == "kind":
        return lambda moved: moved.kind.value
    if by == "phase":
        return lambda moved: graph.task(moved.task).phase.name.lower()
    column = {"operator": "name", "module": "module", "line": "source"}[by]
    empty = {"operator": "?", "module": "(no module)", "line": "(no source line)"}[by]
    texts = graph.texts(column)
    return lambda moved: texts[moved.task] or empty


def _grouped(
    graph: Graph, rows: Iterable[Moved], key: Callable[[Moved], str], limits: Peaks | None
) -> list[MovedRow]:
    parts: dict[str, list[Moved]] = {}
    for moved in rows:
        parts.setdefault(key(moved), []).append(moved)
    sums = [_sum(graph, name, group, limits) for name, group in parts.items()]
    return sorted(sums, key=lambda row: -row.moved_bytes)


def _sum(graph: Graph, name: str, group: Sequence[Moved], limits: Peaks | None) -> MovedRow:
    limit_ns: float | None = None
    if limits is not None:
        calls = ((moved, graph.task(moved.task).known_call) for moved in group)
        limit_ns = sum(limits.min_ns(moved, call) for moved, call in calls if moved.kind != "view")
    return MovedRow(
        name,
        float(graph.tasks.duration_ns[[moved.task for moved in group]].sum()),
        len(group),
        sum(moved.moved_bytes for moved in group),
        sum(moved.needed_bytes for moved in group),
        sum(moved.operations for moved in group),
        limit_ns,
    )


def _peaks(graph: Graph, report: Callable[[str], None] | None = None) -> Peaks | None:
    """Return this machine's limits if the step was recorded on it, on the CPU; else None."""
    recorded = graph.meta.get("machine")
    if not isinstance(recorded, Mapping) or Kind.KERNEL in set(graph.tasks.kind.tolist()):
        return None
    current = facts_machine.facts()
    if any(recorded.get(fact) != current.get(fact) for fact in _SAME_MACHINE):
        return None
    threads = graph.meta.get("threads")
    durations = Durations(threads if isinstance(threads, int) else 1)
    dtypes = frozenset(
        spec.dtype for call in graph.calls for spec in call.inputs if "float" in spec.dtype
    )
    if report is not None:
        durations.measure(probes(dtypes), report)
    return peaks_of(durations, dtypes)


def _limits_note(limits: Peaks | None) -> str:
    if limits is None:
        return (
            "Distance from the machine's limits is unknown: the step was recorded on another "
            "machine or a GPU, or they are not measured yet (slipstream explain --movement does)."
        )
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in limits.flops_per_s.items()
    )
    return (
        f"Limits measured here: {limits.bytes_per_s(1 << 30) / 1e9:.1f} GB/s from memory, "
        f"{limits.bytes_per_s(1) / 1e9:.1f} GB/s in the caches, {rates}."
    )


def _fields(first: str, step_ns: float) -> tuple[Field[MovedRow], ...]:
    return (
        Field.of(first, lambda row: row.name),
        Field.number("share of step", lambda row: format_percent(row.time_ns / step_ns)),
        Field.number("moved", lambda row: format_bytes(row.moved_bytes)),
        Field.number("had to move", lambda row: format_bytes(row.needed_bytes)),
        Field.number("operations", lambda row: f"{row.operations:.3g}", True),
        Field.number("per byte", lambda row: f"{row.intensity:.3g}", True),
        Field.number(
            "over the limit", lambda row: "-" if row.gap is None else f"{row.gap:.2f}x", True
        ),
    )
