"""What made a step slower or faster: the difference of two graphs, operator by operator.

What counts is the critical path: the contributions on it add up to the step's time, so their
differences add up to the difference of the steps, to the nanosecond. Work off the path is listed
beside it, for it may come onto the path tomorrow.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.graph.critical_path import Contribution, find_critical_path, namer
from slipstream.graph.graph import Dependency, Graph, Kind
from slipstream.graph.timeline import replay


@dataclass(frozen=True)
class Row:
    """One operator, module or source line, before and after.

    Attributes:
        before_ns, after_ns: on the critical path, gaps before its tasks left out.
        waited_before_ns, waited_after_ns: gaps and delays before its tasks on the path.
        work_before_ns, work_after_ns: all its tasks, on and off the path.
        tasks_before, tasks_after: how often it is called.
    """

    name: str
    before_ns: float
    after_ns: float
    waited_before_ns: float
    waited_after_ns: float
    work_before_ns: float
    work_after_ns: float
    tasks_before: int
    tasks_after: int

    @property
    def change_ns(self) -> float:
        """What it adds to the step's time; negative: what it saves."""
        busy = self.after_ns - self.before_ns
        return busy + (self.waited_after_ns - self.waited_before_ns)

    @property
    def status(self) -> str:
        """ "added", "removed", or "" for what is in both."""
        if not self.tasks_before:
            return "added"
        return "" if self.tasks_after else "removed"


@dataclass(frozen=True)
class Difference:
    """Two steps compared.

    Attributes:
        before_ns, after_ns: the simulated steps.
        rows: by "operator", "module" and "line"; the largest change first. The changes of each
            add up to `change_ns`.
        gaps_before_ns, gaps_after_ns: untracked time and delays on the path, by what was waited
            for.
    """

    before_ns: float
    after_ns: float
    rows: dict[str, tuple[Row, ...]]
    gaps_before_ns: dict[Dependency, float]
    gaps_after_ns: dict[Dependency, float]

    @property
    def change_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    @property
    def change(self) -> float:
        """Relative to before; 0.05 is five percent slower."""
        return self.change_ns / self.before_ns if self.before_ns else 0.0

    def added(self) -> tuple[Row, ...]:
        """Operators that only the second graph has."""
        return tuple(row for row in self.rows["operator"] if row.status == "added")

    def removed(self) -> tuple[Row, ...]:
        """Operators that only the first graph has."""
        return tuple(row for row in self.rows["operator"] if row.status == "removed")


def difference(before: Graph, after: Graph) -> Difference:
    """Compare two graphs of what is meant to be the same step.

    Raises:
        GraphError: one of them has a cycle.
    """
    paths = [find_critical_path(replay(graph)) for graph in (before, after)]
    rows = {}
    for group in ("operator", "module", "line"):
        on_path = [{c.name: c for c in path.by(group)} for path in paths]
        work = [_work(graph, group) for graph in (before, after)]
        names = sorted({*work[0], *work[1]})
        compared = [
            _row(name, [found.get(name) for found in on_path], [found.get(name) for found in work])
            for name in names
        ]
        rows[group] = tuple(sorted(compared, key=lambda row: (-abs(row.change_ns), row.name)))
    return Difference(
        paths[0].step_ns,
        paths[1].step_ns,
        rows,
        paths[0].by_dependency(),
        paths[1].by_dependency(),
    )


def _row(
    name: str, on_path: list[Contribution | None], work: list[tuple[float, int] | None]
) -> Row:
    (busy_a, waited_a), (busy_b, waited_b) = (
        (c.busy_ns, c.waited_ns) if c else (0.0, 0.0) for c in on_path
    )
    (work_a, tasks_a), (work_b, tasks_b) = (found or (0.0, 0) for found in work)
    return Row(name, busy_a, busy_b, waited_a, waited_b, work_a, work_b, tasks_a, tasks_b)


def _work(graph: Graph, group: str) -> dict[str, tuple[float, int]]:
    """Total duration and number of calls by group; the rest of a call is not one more."""
    name = namer(graph, group)
    found: dict[str, tuple[float, int]] = {}
    durations, kinds = graph.tasks.duration_ns.tolist(), graph.tasks.kind.tolist()
    host = int(Kind.HOST)
    for task, (duration, kind) in enumerate(zip(durations, kinds, strict=True)):
        key = name(task)
        total, count = found.get(key, (0.0, 0))
        found[key] = (total + duration, count + (kind != host))
    # What is only ever the rest of something (the begin of a step) is there all the same.
    return {key: (total, max(count, 1)) for key, (total, count) in found.items()}
