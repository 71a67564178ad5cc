"""An independent reference: the rules of the engine, stepped from time to time over sets.

No heap, no compressed rows, no queues: at every instant it looks at everything. Written from the
documented rules (`Policy`, `Resources`), not from the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.native import Policy, Program

Instance = tuple[int, int]  # (step, task); ordered like step * tasks + task


@dataclass
class Running:
    instance: Instance
    since: float
    until: float
    boundary: float = -1.0  # the end of a quantum that a task waits for


def brute_force(program: Program) -> tuple[dict[Instance, float], dict[Instance, float]]:
    """Return start and end of every instance, without resources, in O(instances^2) or worse."""
    assert program.needs is None
    lane = program.lane.tolist()
    instances = [(k, t) for k in range(program.steps) for t in range(program.tasks)]
    preds: dict[Instance, list[tuple[Instance, float]]] = {i: [] for i in instances}
    edges = program.edges
    for src, dst, delay, lag in zip(
        edges.src.tolist(),
        edges.dst.tolist(),
        edges.delay_ns.tolist(),
        edges.lag.tolist(),
        strict=True,
    ):
        for k in range(lag, program.steps):
            preds[k, dst].append(((k - lag, src), delay))

    start: dict[Instance, float] = {}
    end: dict[Instance, float] = {}
    running: dict[int, Running] = {}
    suspended: dict[int, list[tuple[Instance, float]]] = {lane_id: [] for lane_id in set(lane)}
    blocked_until = dict.fromkeys(set(lane), 0.0)

    def ready_time(instance: Instance) -> float:
        if any(pred not in end for pred, _ in preds[instance]):
            return math.inf
        return max((end[pred] + delay for pred, delay in preds[instance]), default=0.0)

    def urgency(instance: Instance) -> tuple[int, float, Instance]:
        ranked = program.policies[lane[instance[1]]] >= Policy.PRIORITY
        priority = int(program.priority[instance[1]]) if ranked else 0
        return (priority, ready_time(instance), instance)

    def begin(lane_id: int, instance: Instance, length: float) -> None:
        start.setdefault(instance, now)
        running[lane_id] = Running(instance, now, now + length)

    def settle(lane_id: int) -> None:
        policy = Policy(int(program.policies[lane_id]))
        own = [i for i in instances if lane[i[1]] == lane_id and i not in start]
        if policy is Policy.FIXED:
            own = own[:1]
        fresh = [i for i in own if ready_time(i) <= now]
        head = min(fresh, key=urgency, default=None)
        if lane_id not in running:
            if blocked_until[lane_id] > now:
                return
            waiting = suspended[lane_id]
            if waiting and (head is None or urgency(waiting[-1][0]) < urgency(head)):
                begin(lane_id, *waiting.pop())
            elif head is not None:
                begin(lane_id, head, float(program.duration_ns[head[1]]))
            return
        current = running[lane_id]
        if policy is not Policy.PREEMPTIVE or head is None:
            return
        if urgency(head)[0] >= urgency(current.instance)[0]:
            return
        quantum = float(program.quantum_ns[lane_id])
        boundary = now
        # Computed once: since + n * quantum, divided again, may round to a little more than n.
        if quantum > 0.0 and current.boundary != now:
            boundary = current.since + math.ceil((now - current.since) / quantum) * quantum
        if boundary > now:
            if boundary < current.until:
                alarms.add(boundary)
                current.boundary = boundary
            return
        suspended[lane_id].append((current.instance, current.until - now))
        begin(lane_id, head, float(program.duration_ns[head[1]]))

    now = 0.0
    alarms: set[float] = set()
    while len(end) < len(instances):
        for lane_id in sorted(suspended):
            settle(lane_id)
        moments = {r.until for r in running.values()} | alarms
        moments |= {b for b in blocked_until.values() if b > now}
        moments |= {r for r in map(ready_time, instances) if now < r < math.inf}
        now = min(moment for moment in moments if moment >= now)
        alarms.discard(now)
        for lane_id, current in list(running.items()):
            if current.until == now:
                del running[lane_id]
                end[current.instance] = now
                blocked_until[lane_id] = now + float(program.gap_ns[current.instance[1]])
    return start, end
