"""Exposed communication of a step: how long it waits for each, and for which modules' tensors.

    for stretch in exposed_stretches(replay(graph)):
        stretch.exchange, stretch.waited_ns

Communication is exposed while the lane that computes has nothing to run. Each such stretch is
counted for the exchange whose end it ends with: what was awaited, whatever else travelled
meanwhile. What of a communication is hidden behind computation counts nowhere. So all stretches
together are the step less what its lane computes; where a communication holds up nothing but that
lane, they are the step less what it would take if communication took no time. The same can be
measured: it is the time the training thread spends waiting.
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
        exchange: whose end it ends with.
        task: what runs then.
        begin_ns, waited_ns: when it begins, in the timeline, and how long it is.
    """

    exchange: Exchange
    task: int
    begin_ns: float
    waited_ns: float

    def by_module(self, graph: Graph) -> dict[str, float]:
        """Nanoseconds by module, shared out by the size of its tensors in the exchange.

        An exchange of something else counts under what it is called, in parentheses.
        """
        row = self.exchange
        if not row.modules:
            return {f"({graph.task(row.task).name})": self.waited_ns}
        whole = sum(spec.nbytes for spec in row.tensors)
        shares: dict[str, float] = {}
        for module, spec in zip(row.modules, row.tensors, strict=True):
            share = spec.nbytes / whole if whole else 1.0 / len(row.modules)
            shares[module] = shares.get(module, 0.0) + share * self.waited_ns
        return shares


def exposed_stretches(timeline: Timeline) -> list[ExposedStretch]:
    """Those of the timeline's last step, in order; none of a graph without exchanges.

    Of several lanes that compute, the one that does so longest is looked at.
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
        # What it waited for may be what a helping thread does behind the communication.
        _, cause, _ = causes.of(step, task)
        while cause is not None and cause[1] not in rows and graph.tasks.lane[cause[1]] != lane:
            _, cause, _ = causes.of(*cause)
        if cause is not None and cause[1] in rows:
            stretches.append(
                ExposedStretch(rows[cause[1]], task, float(free[task]), float(waited[task]))
            )
    return stretches


def exposed_by_module(timeline: Timeline) -> dict[str, float]:
    """Nanoseconds of a step by module, see `ExposedStretch.by_module`; as they are awaited."""
    totals: dict[str, float] = {}
    for stretch in exposed_stretches(timeline):
        for module, spent in stretch.by_module(timeline.graph).items():
            totals[module] = totals.get(module, 0.0) + spent
    return totals


def computing_lane(timeline: Timeline) -> int:
    """The lane that computes longest: a device's, where one computes; -1 without any."""
    tasks = timeline.graph.tasks
    for kind in (Kind.KERNEL, Kind.OP):
        chosen = tasks.kind == kind
        if chosen.any():
            spent = (tasks.duration_ns + tasks.gap_ns)[chosen]
            return int(np.argmax(np.bincount(tasks.lane[chosen], spent)))
    return -1
