"""Another order on a lane: of the tasks that are ready, the most urgent first."""

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
    """`graph` with the tasks of a lane in the order in which that lane would take them.

    The order is settled by one simulation of the step by itself, in which the lane takes, whenever
    it is free, the most urgent of the tasks that are ready; the lane then keeps it. A task that has
    begun is not interrupted.

    Args:
        lane: its name, one of ``graph.lanes``.
        urgency: of a task by its number; larger comes first, equal ones in the order they had.
        what: is said of the edit.

    Raises:
        InvalidArgumentError: no such lane, or an urgency that is NaN.
        GraphError: dependencies form a cycle.
    """
    if lane not in graph.lanes:
        raise InvalidArgumentError(
            "lane", f"there is no '{lane}'", remedy="one of " + ", ".join(graph.lanes)
        )
    number = graph.lanes.index(lane)
    places = np.flatnonzero(graph.tasks.lane == number)
    wanted = np.array([float(urgency(task)) for task in places.tolist()])
    if np.isnan(wanted).any():
        task = int(places[np.isnan(wanted)][0])
        raise InvalidArgumentError("urgency", f"that of task {task} is not a number")
    priority = np.zeros(len(graph), np.int32)
    priority[places[np.argsort(-wanted, kind="stable")]] = np.arange(len(places))
    policies = np.zeros(len(graph.lanes), np.uint8)
    policies[number] = Policy.PRIORITY
    program = replace(lower(graph, steps=1), priority=priority, policies=policies)
    begins = np.asarray(native.simulate(program).start_ns[0])[places]
    order = np.arange(len(graph))
    order[places] = places[np.lexsort((priority[places], begins))]
    edit = Editor(graph, "schedule")
    edit.reorder(order)
    return edit.apply(what)
