"""Simulate a graph: lower it to the event engine and read the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream import native
from slipstream.graph.graph import Graph

_STEPS = 2
"""Two steps, so that what one step leaves open (a gap, a lagging edge) delays the next."""


@dataclass(frozen=True)
class Timeline:
    """When every task of a graph runs in the simulated world.

    Attributes:
        schedule: of two consecutive steps.
    """

    graph: Graph
    schedule: native.Schedule

    @cached_property
    def step_ns(self) -> float:
        """Time from one step's end to the next one's: what a step costs in a long run."""
        ends = self.schedule.step_end_ns
        return float(ends[-1] - ends[-2])

    @cached_property
    def start_ns(self) -> NDArray[np.float64]:
        """float64 [n], of the tasks of the first step."""
        return np.asarray(self.schedule.start_ns[0])

    @cached_property
    def end_ns(self) -> NDArray[np.float64]:
        """float64 [n], of the tasks of the first step."""
        return np.asarray(self.schedule.end_ns[0])

    @cached_property
    def lane_busy_ns(self) -> NDArray[np.float64]:
        """float64 [lanes], time per step each lane runs tasks; gaps left out."""
        busy: NDArray[np.float64] = self.schedule.lane_busy_ns / _STEPS
        return busy


def lower(graph: Graph, steps: int = _STEPS) -> native.Program:
    """The engine's form of `graph`: lanes in program order, edges with delay and lag."""
    edges = graph.edges
    return native.Program(
        lane=graph.tasks.lane,
        duration_ns=native.quantize_ns(graph.tasks.duration_ns),
        gap_ns=native.quantize_ns(graph.tasks.gap_ns),
        policies=np.zeros(len(graph.lanes), np.uint8),
        edges=native.Edges(
            edges.source, edges.target, native.quantize_ns(edges.delay_ns), edges.lag
        ),
        steps=steps,
        names=[graph.strings[name] for name in graph.tasks.name],
    )


def replay(graph: Graph) -> Timeline:
    """The timeline of `graph` as the engine simulates it.

    Raises:
        GraphError: its dependencies form a cycle.
    """
    return Timeline(graph, native.simulate(lower(graph)))
