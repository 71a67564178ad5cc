"""Check that rates are max-min fair from a timeline alone, without code of the solver."""

from __future__ import annotations

import numpy as np

from slipstream.native import Flows, Schedule


def certificate_violations(schedule: Schedule, *, tolerance: float = 1e-9) -> tuple[int, int]:
    """Return how often a flow lacked its certificate after an event, and the number of events.

    After every instant with a change: no link carries more than its capacity, and every active flow
    has a link on its path that is full with flows of its priority and more urgent ones, on which no
    flow of its priority has a higher rate per weight. Such rates are the unique max-min fair ones
    (Bertsekas and Gallager, "Data Networks", section 6.5.2).

    Args:
        schedule: simulated with ``rate_changes=True``.
        tolerance: relative tolerance.
    """
    program, changes = schedule.program, schedule.rate_changes
    assert program.flows is not None
    assert changes is not None
    flows = program.flows
    ended_ns = schedule.end_ns.reshape(-1)
    moving = np.flatnonzero(np.tile(flows.nbytes > 0.0, program.steps))
    instants = np.unique(np.concatenate([changes.time_ns, ended_ns[moving]]))
    ends = moving[np.argsort(ended_ns[moving], kind="stable")]
    rate: dict[int, float] = {}
    violations = change = end = 0
    for now in instants:
        while change < changes.time_ns.size and changes.time_ns[change] == now:
            rate[int(changes.instance[change])] = float(changes.rate[change])
            change += 1
        while end < ends.size and ended_ns[ends[end]] == now:
            rate.pop(int(ends[end]), None)
            end += 1
        if rate:
            active = np.fromiter(rate.keys(), np.int64, len(rate))
            rates = np.fromiter(rate.values(), np.float64, len(rate))
            violations += _violations(flows, program.priority, active % program.tasks, rates,
                                      tolerance)  # fmt: skip
    return violations, instants.size


def _violations(
    flows: Flows,
    priority: np.ndarray,
    task: np.ndarray,
    rate: np.ndarray,
    tolerance: float,
) -> int:
    count = flows.path_offset[task + 1] - flows.path_offset[task]
    owner = np.repeat(np.arange(task.size), count)
    first = np.repeat(flows.path_offset[task] - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
    link = flows.path_link[first + np.arange(owner.size)]
    level = rate / flows.weight[task]
    urgency = priority[task]
    links = flows.capacity.size
    load = np.bincount(link, rate[owner], links)
    wrong = int(np.count_nonzero(load > flows.capacity * (1.0 + tolerance)))
    for urgency_level in np.unique(urgency):
        hops = urgency[owner] <= urgency_level
        used = np.bincount(link[hops], rate[owner[hops]], links)
        full = used >= flows.capacity * (1.0 - tolerance)
        own = urgency[owner] == urgency_level
        top = np.zeros(links)
        np.maximum.at(top, link[own], level[owner[own]])
        good = full[link] & (level[owner] >= top[link] * (1.0 - tolerance)) & own
        has = np.zeros(task.size, np.bool_)
        has[owner[good]] = True
        wrong += int(np.count_nonzero(~has & (urgency == urgency_level)))
    return wrong
