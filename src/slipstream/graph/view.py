"""`TaskView`: one task of a graph, with decoded columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import GraphError
from slipstream.graph.call import Call
from slipstream.graph.values import Kind, StepPhase

if TYPE_CHECKING:
    from slipstream.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class TaskView:
    """Task `number` of `graph`; for many tasks use the columns of `Graph.tasks`."""

    graph: Graph
    number: int

    @property
    def name(self) -> str:
        """Name of the operator or kernel."""
        return self.graph.string(int(self.graph.tasks.name[self.number]))

    @property
    def scope(self) -> str:
        """The chain of enclosing operators, separated by slashes."""
        return self.graph.string(int(self.graph.tasks.scope[self.number]))

    @property
    def module(self) -> str:
        """Qualified name of the innermost module; empty outside modules."""
        return self.graph.string(int(self.graph.tasks.module[self.number]))

    @property
    def source(self) -> str:
        """The user's ``file:line`` that called it; empty if unknown."""
        return self.graph.string(int(self.graph.tasks.source[self.number]))

    @property
    def kind(self) -> Kind:
        """The type of the task."""
        return Kind(self.graph.tasks.kind[self.number])

    @property
    def phase(self) -> StepPhase:
        """The part of the step it belongs to."""
        return StepPhase(self.graph.tasks.phase[self.number])

    @property
    def sequence(self) -> int:
        """Autograd's number; -1 for none."""
        return int(self.graph.tasks.sequence[self.number])

    @property
    def duration_ns(self) -> float:
        """The duration."""
        return float(self.graph.tasks.duration_ns[self.number])

    @property
    def gap_ns(self) -> float:
        """Untracked time of its lane after it."""
        return float(self.graph.tasks.gap_ns[self.number])

    @property
    def spread(self) -> float:
        """Relative half-width of the middle half of its durations."""
        return float(self.graph.tasks.spread[self.number])

    @property
    def call(self) -> Call | None:
        """The operator call; None if its arguments are unknown."""
        number = int(self.graph.tasks.call[self.number])
        return self.graph.calls[number] if number >= 0 else None

    @property
    def known_call(self) -> Call:
        """The operator call.

        Raises:
            GraphError: its arguments are unknown.
        """
        call = self.call
        if call is None:
            raise GraphError(f"the arguments of task {self.number} ({self.name}) are unknown")
        return call

    @property
    def storages(self) -> list[int]:
        """Storages of its call's inputs, then outputs."""
        storages: list[int] = self.graph.storages(self.number).tolist()
        return storages

    @property
    def operands(self) -> tuple[list[int], list[int]]:
        """Storages of its call's inputs, and of its outputs; empty without a call."""
        call, storages = self.call, self.storages
        inputs = 0 if call is None else len(call.inputs)
        return storages[:inputs], storages[inputs:] if call is not None else []


def calls_of(graph: Graph, tasks: Sequence[int]) -> list[Call]:
    """Return the calls of `tasks`, in order.

    Raises:
        GraphError: the arguments of one are unknown.
    """
    return [graph.task(task).known_call for task in tasks]
