"""Explain a step's time and what made it slower, from graphs in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.graph import Graph, difference, replay
from slipstream.tables import Table
from slipstream.verbs.explaining.change import Change
from slipstream.verbs.explaining.path import Shown, path_report


@dataclass(frozen=True)
class Explanation:
    """Tables, and their data.

    Attributes:
        data: the JSON payload of ``slipstream explain``; times in ns.
    """

    tables: tuple[Table, ...]
    data: dict[str, Any]

    def __str__(self) -> str:
        return "\n\n".join(table.to_markdown() for table in self.tables)

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables)


def explain(graph: Graph, by: str = "operator", *, top: int = 20, show: Shown = "groups"
            ) -> Explanation:  # fmt: skip
    """Explain the step's length: its critical path, summed by operator, module, line, ...

    Args:
        by: operator, module, line, phase, lane or kind.
        top: number of rows.
        show: ``groups``, ``path`` (its tasks in order) or ``causal`` (what the step would gain if
            one group were faster).

    Raises:
        InvalidArgumentError: unknown group.
        GraphError: the graph has a cycle.
    """
    tables, data = path_report(replay(graph), by, top, show)
    return Explanation(tuple(tables), data)


def diff(before: Graph, after: Graph, fail_over: float | None = None) -> Change:
    """Compare two recordings of a step.

    Args:
        fail_over: relative change above which the step counts as slower.

    Raises:
        GraphError: a graph has a cycle.
    """
    return Change(difference(before, after), fail_over)
