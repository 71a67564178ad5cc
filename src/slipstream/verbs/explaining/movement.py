"""What ``slipstream explain --movement`` shows: where bytes go, and what there is to win."""

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
    "Moved: inputs read once and outputs written once, by every kernel. Had to move: what crosses "
    "the boundaries of regions of operators that could run as one kernel (slipstream predict -t "
    "fusion says what that gives)."
)
# Groups of one kind on a page.
_SHOWN = 60
_SAME_MACHINE = ("cpu.model", "cpu.logical")


@dataclass(frozen=True)
class MovedRow:
    """A group of operators.

    Attributes:
        name: what they have in common.
        time_ns: of their tasks, as recorded.
        moved_bytes, needed_bytes: inputs read and outputs written once per kernel; of these, what
            crosses the boundary of a region that could be one kernel.
        operations: arithmetic, multiplications and additions counting one each.
        least_ns: what the machine's limits leave; None where they are not known.
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
        """How many times as long as the limits leave."""
        return self.time_ns / self.least_ns if self.least_ns else None

    def to_json(self) -> dict[str, Any]:
        """As the payload has it."""
        return {
            "name": self.name, "time_ns": self.time_ns, "tasks": self.tasks,
            "moved_bytes": self.moved_bytes, "needed_bytes": self.needed_bytes,
            "operations": self.operations, "intensity": self.intensity,
            "least_ns": self.least_ns, "gap": self.gap,
        }  # fmt: skip


def movement_report(
    graph: Graph, by: str, top: int, say: Callable[[str], None]
) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON: classes, then the `top` groups that move most without need; times in ns.

    This machine's limits are measured where the step was recorded on it and they are not known
    yet, which takes some seconds.

    Args:
        by: operator, module, line, phase or kind (the operator's class).
        say: called with a line before anything slow.

    Raises:
        UnknownNameError: there are no such groups.
        GraphError: operators' arguments were not recorded.
    """
    if by not in _GROUPS:
        raise UnknownNameError("group", by, _GROUPS)
    if not graph.calls:
        raise GraphError(
            "the arguments of its operators, which tell their bytes, are not in this recording",
            remedy="slipstream profile records them, of a step on one thread",
        )
    limits = _peaks(graph, say)
    payload, classes = _totals(graph, limits)
    groups = _groups(graph, by, limits)
    payload |= {"by": by, "groups": [one.to_json() for one in groups]}
    step_ns = payload["step_ns"]
    shown = groups[:top]
    left = len(groups) - len(shown)
    notes = [in_a_sentence(payload, classes), _MEANING, _limits_note(limits)]
    title = f"{named(graph)}: {format_duration(step_ns)} per step"
    more = [f"{left} more groups are left out"] if left else []
    return [
        Table.of(classes, _fields("class", step_ns), title, notes),
        Table.of(shown, _fields(by, step_ns), f"what moves most without need, by {by}", more),
    ], payload


def movement_page(graph: Graph) -> dict[str, Any] | None:
    """What a page shows of it: words, and the first groups by everything there is to group by.

    The machine's limits are in it where they were measured before: nothing is measured here. None
    where operators' arguments were not recorded.
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
            "operator": [one.to_json() for one in _groups(graph, "operator", limits)[:_SHOWN]],
            "class": payload["classes"],
            "source line": [one.to_json() for one in _groups(graph, "line", limits)[:_SHOWN]],
            "phase": [one.to_json() for one in _groups(graph, "phase", limits)],
        },
    }


def _totals(graph: Graph, limits: Peaks | None) -> tuple[dict[str, Any], list[MovedRow]]:
    """What the whole step moves, as JSON, and its classes with what is no operator."""
    rows = movement(graph)
    classes = _grouped(graph, rows, _keys(graph, "kind"), limits)
    spent = {one.task for one in rows}
    outside = [t for t in range(len(graph)) if t not in spent]
    rest_ns = float(graph.tasks.duration_ns[outside].sum() + graph.tasks.gap_ns.sum())
    classes.append(MovedRow(_NO_OPERATOR, rest_ns, len(outside), 0, 0, 0, None))
    step_ns = sum(one.time_ns for one in classes)
    busy_ns = sum(one.time_ns for one in classes if one.name == OperatorClass.CONTRACTION)
    return {
        "step_ns": step_ns,
        "moved_bytes": sum(one.moved_bytes for one in rows),
        "needed_bytes": sum(one.needed_bytes for one in rows),
        "operations": sum(one.operations for one in rows),
        "ceiling": ceiling(busy_ns, step_ns) if busy_ns else None,
        "classes": [one.to_json() for one in classes],
        "limits": None if limits is None else limits.to_json(),
    }, classes


def _groups(graph: Graph, by: str, limits: Peaks | None) -> list[MovedRow]:
    """Those that move most without need first."""
    groups = _grouped(graph, movement(graph), _keys(graph, by), limits)
    return sorted(groups, key=lambda one: (one.needed_bytes - one.moved_bytes, -one.time_ns))


def in_a_sentence(payload: Mapping[str, Any], classes: Sequence[MovedRow]) -> str:
    """How much there is to win, at most."""
    bound = payload["ceiling"]
    moved, needed = payload["moved_bytes"], payload["needed_bytes"]
    avoidable = (
        f"{format_bytes(moved)} are moved and {format_bytes(needed)} had to be "
        f"({format_percent(1 - needed / moved)} less)"
        if moved
        else "nothing is moved"
    )
    if bound is None:
        return f"The step has no matrix products or convolutions; {avoidable}."
    share = 1 - 1 / bound
    return (
        "Everything but matrix products and convolutions is "
        f"{format_percent(share)} of this step: at most {bound:.2f}x if all of it took no time. "
        f"Of bytes, {avoidable}."
    )


def _keys(graph: Graph, by: str) -> Callable[[Moved], str]:
    if by == "kind":
        return lambda one: one.kind.value
    if by == "phase":
        return lambda one: graph.task(one.task).phase.name.lower()
    column = {"operator": "name", "module": "module", "line": "source"}[by]
    empty = {"operator": "?", "module": "(no module)", "line": "(no source line)"}[by]
    texts = graph.texts(column)
    return lambda one: texts[one.task] or empty


def _grouped(
    graph: Graph, rows: Iterable[Moved], key: Callable[[Moved], str], limits: Peaks | None
) -> list[MovedRow]:
    """Sums by group, the largest movers first."""
    parts: dict[str, list[Moved]] = {}
    for one in rows:
        parts.setdefault(key(one), []).append(one)
    sums = [_sum(graph, name, group, limits) for name, group in parts.items()]
    return sorted(sums, key=lambda one: -one.moved_bytes)


def _sum(graph: Graph, name: str, group: Sequence[Moved], limits: Peaks | None) -> MovedRow:
    least: float | None = None
    if limits is not None:
        calls = ((one, graph.task(one.task).known_call) for one in group)
        least = sum(limits.least_ns(one, call) for one, call in calls if one.kind != "view")
    return MovedRow(
        name,
        float(graph.tasks.duration_ns[[one.task for one in group]].sum()),
        len(group),
        sum(one.moved_bytes for one in group),
        sum(one.needed_bytes for one in group),
        sum(one.operations for one in group),
        least,
    )


def _peaks(graph: Graph, say: Callable[[str], None] | None = None) -> Peaks | None:
    """This machine's limits where the step was recorded on it, on a processor; else None.

    Args:
        say: called with a line before they are measured; None: not measured, if not known.
    """
    recorded = graph.meta.get("machine")
    if not isinstance(recorded, Mapping) or Kind.KERNEL in set(graph.tasks.kind.tolist()):
        return None
    here = facts_machine.facts()
    if any(recorded.get(fact) != here.get(fact) for fact in _SAME_MACHINE):
        return None
    threads = graph.meta.get("threads")
    durations = Durations(threads if isinstance(threads, int) else 1)
    dtypes = frozenset(
        spec.dtype for call in graph.calls for spec in call.inputs if "float" in spec.dtype
    )
    if say is not None:
        durations.measure(probes(dtypes), say)
    return peaks_of(durations, dtypes)


def _limits_note(limits: Peaks | None) -> str:
    if limits is None:
        return (
            "How far from the machine's limits is not told: the step was recorded on another "
            "machine or on a device, or nobody measured them (slipstream explain --movement does)."
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
