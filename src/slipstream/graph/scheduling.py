"""Priority scheduling of a lane: the most urgent of the ready tasks runs first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from slipstream import native
from slipstream.errors import InvalidArgumentError
from slipstream.graph.edit import Editor
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import lower
from slipstream.native import Policy


def schedule(graph: Graph, lane: str, urgency: Callable[[int], float], what: str) -> Graph:
    """Reorder the tasks of a lane by urgency.

    The order is that of a simulation of one isolated step in which the lane, whenever it is free,
    runs the most urgent of the ready tasks without preemption.

    Args:
        lane: a name of ``graph.lanes``.
        urgency: the urgency of a task by its number; larger runs first, ties in the present order.
        what: the description of the edit.

    Raises:
        InvalidArgumentError: the lane does not exist, or an urgency is NaN.
        GraphError: dependencies form a cycle.
    """
    if lane not in graph.lanes:
        raise InvalidArgumentError(
            "lane", f"'{lane}' does not exist", remedy="pass one of " + ", ".join(graph.lanes)
        )
    number = graph.lanes.index(lane)
    places = np.flatnonzero(graph.tasks.lane == number)
    urgencies = np.array([float(urgency(task)) for task in places.tolist()])
    if np.isnan(urgencies).any():
        task = int(places[np.isnan(urgencies)][0])
        raise InvalidArgumentError("urgency", f"the urgency of task {task} is NaN")
    priority = np.zeros(len(graph), np.int32)
    priority[places[np.argsort(-urgencies, kind="stable")]] = np.arange(len(places))
    policies = np.zeros(len(graph.lanes), np.uint8)
    policies[number] = Policy.PRIORITY
    program = replace(lower(graph, steps=1), priority=priority, policies=policies)
    begins = np.asarray(native.simulate(program).start_ns[0])[places]
    order = np.arange(len(graph))
    order[places] = places[np.lexsort((priority[places], begins))]
    edit = Editor(graph, "schedule")
    edit.reorder(order)
    return edit.apply(what)
