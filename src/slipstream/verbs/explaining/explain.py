"""What a step's time consists of, and what made it slower: of graphs, in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.graph import Graph, difference, replay
from slipstream.tables import Table
from slipstream.verbs.explaining.change import Change
from slipstream.verbs.explaining.path import Shown, path_report


@dataclass(frozen=True)
class Explanation:
    """Tables, and what is in them.

    Attributes:
        data: what ``slipstream explain --json`` prints; times in ns.
    """

    tables: tuple[Table, ...]
    data: dict[str, Any]

    def __str__(self) -> str:
        return "\n\n".join(table.to_markdown() for table in self.tables)

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in self.tables)


def explain(graph: Graph, by: str = "operator", *, top: int = 20, show: Shown = "groups"
            ) -> Explanation:  # fmt: skip
    """What the step is as long as: its critical path, summed by operator, module, line, ...

    Args:
        by: operator, module, line, phase, lane or kind.
        top: rows to show.
        show: ``groups``, ``path`` (its tasks one by one) or ``causal`` (what the step would gain
            if one group were faster).

    Raises:
        InvalidArgumentError: no such group.
        GraphError: the graph has a cycle.
    """
    tables, data = path_report(replay(graph), by, top, show)
    return Explanation(tuple(tables), data)


def diff(before: Graph, after: Graph, fail_over: float | None = None) -> Change:
    """What made a step slower or faster, and whether that is certain.

    Args:
        fail_over: relative, from which on the step counts as slower.

    Raises:
        GraphError: one of them has a cycle.
    """
    return Change(difference(before, after), fail_over)
