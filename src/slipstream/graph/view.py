"""`TaskView`: one task of a graph, with what its codes and numbers stand for."""

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
    """Task `number` of `graph`; what many tasks are asked for is a column of `Graph.tasks`."""

    graph: Graph
    number: int

    @property
    def name(self) -> str:
        """Of the operator or kernel."""
        return self.graph.string(int(self.graph.tasks.name[self.number]))

    @property
    def scope(self) -> str:
        """The chain of enclosing operators, with slashes between."""
        return self.graph.string(int(self.graph.tasks.scope[self.number]))

    @property
    def module(self) -> str:
        """Qualified name of the innermost module; empty outside of any."""
        return self.graph.string(int(self.graph.tasks.module[self.number]))

    @property
    def source(self) -> str:
        """The user's ``file:line`` that called it; empty where unknown."""
        return self.graph.string(int(self.graph.tasks.source[self.number]))

    @property
    def kind(self) -> Kind:
        """What it is."""
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
        """How long it takes."""
        return float(self.graph.tasks.duration_ns[self.number])

    @property
    def gap_ns(self) -> float:
        """Untracked time of its lane behind it."""
        return float(self.graph.tasks.gap_ns[self.number])

    @property
    def spread(self) -> float:
        """Relative half-width of the middle half of its durations."""
        return float(self.graph.tasks.spread[self.number])

    @property
    def call(self) -> Call | None:
        """What it calls; None where its arguments are not known."""
        number = int(self.graph.tasks.call[self.number])
        return self.graph.calls[number] if number >= 0 else None

    @property
    def known_call(self) -> Call:
        """What it calls.

        Raises:
            GraphError: its arguments are not known.
        """
        call = self.call
        if call is None:
            raise GraphError(f"the arguments of task {self.number} ({self.name}) are not known")
        return call

    @property
    def storages(self) -> list[int]:
        """Of its call's inputs, then outputs."""
        storages: list[int] = self.graph.storages(self.number).tolist()
        return storages

    @property
    def operands(self) -> tuple[list[int], list[int]]:
        """Storages of its call's inputs, and of its outputs; none where there is no call."""
        call, storages = self.call, self.storages
        inputs = 0 if call is None else len(call.inputs)
        return storages[:inputs], storages[inputs:] if call is not None else []


def calls_of(graph: Graph, tasks: Sequence[int]) -> list[Call]:
    """What `tasks` call, in order.

    Raises:
        GraphError: the arguments of one are not known.
    """
    return [graph.task(task).known_call for task in tasks]
