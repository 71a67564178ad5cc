"""Exposed communication of a step, by exchange and module.

    for stretch in exposed_stretches(replay(graph)):
        stretch.exchange, stretch.waited_ns

Communication is exposed while the computing lane has nothing to run. Each such stretch is assigned
to the exchange with whose end it ends; hidden communication is not counted. The stretches add up
to the step time minus the work of the computing lane. If communications delay only that lane, they
add up to the step time minus that with instant communication. The measured counterpart is the
time that the training thread spends waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import Graph
from slipstream.graph.timeline import Timeline
from slipstream.graph.values import Kind
from slipstream.graph.views.critical_path import Causes


@dataclass(frozen=True)
class ExposedStretch:
    """One stretch in which the computing lane waits for a communication.

    Attributes:
        exchange: the exchange with whose end it ends.
        task: the task that runs next.
        begin_ns: its begin in the timeline.
        waited_ns: its length.
    """

    exchange: Exchange
    task: int
    begin_ns: float
    waited_ns: float

    def by_module(self, graph: Graph) -> dict[str, float]:
        """Return ns by module, divided by the sizes of its tensors in the exchange.

        An exchange of other data counts under its name, in parentheses.
        """
        row = self.exchange
        if not row.modules:
            return {f"({graph.task(row.task).name})": self.waited_ns}
        total = sum(spec.nbytes for spec in row.tensors)
        shares: dict[str, float] = {}
        for module, spec in zip(row.modules, row.tensors, strict=True):
            share = spec.nbytes / total if total else 1.0 / len(row.modules)
            shares[module] = shares.get(module, 0.0) + share * self.waited_ns
        return shares


def exposed_stretches(timeline: Timeline) -> list[ExposedStretch]:
    """Return the stretches of the timeline's last step, in order; none without exchanges.

    Of several computing lanes, the busiest one counts.
    """
    graph = timeline.graph
    lane = computing_lane(timeline)
    if lane < 0 or not graph.exchanges:
        return []
    rows = {row.task: row for row in graph.exchanges}
    causes, step = Causes(timeline), timeline.schedule.program.steps - 1
    free = causes.free_ns(step)
    waited = np.where(graph.tasks.lane == lane, timeline.schedule.start_ns[step] - free, 0.0)
    stretches = []
    for task in np.flatnonzero(waited > 0.0).tolist():
        # It may have waited for a helper thread's work after the communication.
        _, cause, _ = causes.of(step, task)
        while cause is not None and cause[1] not in rows and graph.tasks.lane[cause[1]] != lane:
            _, cause, _ = causes.of(*cause)
        if cause is not None and cause[1] in rows:
            stretches.append(
                ExposedStretch(rows[cause[1]], task, float(free[task]), float(waited[task]))
            )
    return stretches


def exposed_by_module(timeline: Timeline) -> dict[str, float]:
    """Return ns of a step by module, see `ExposedStretch.by_module`, in the order of waits."""
    totals: dict[str, float] = {}
    for stretch in exposed_stretches(timeline):
        for module, spent in stretch.by_module(timeline.graph).items():
            totals[module] = totals.get(module, 0.0) + spent
    return totals


def computing_lane(timeline: Timeline) -> int:
    """Return the lane with most computation, of devices if any compute; -1 for none."""
    tasks = timeline.graph.tasks
    for kind in (Kind.KERNEL, Kind.OP):
        chosen = tasks.kind == kind
        if chosen.any():
            spent = (tasks.duration_ns + tasks.gap_ns)[chosen]
            return int(np.argmax(np.bincount(tasks.lane[chosen], spent)))
    return -1
