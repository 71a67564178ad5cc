"""The event engine in Python: a readable reference, a check of the native one, and the fallback.

Bitwise equal to the native engine: both only add, subtract and compare float64, in the same
association, and neither depends on the order of events within an instant.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slipstream.errors import GraphError
from slipstream.native._network_reference import Network
from slipstream.native._packets_reference import PacketNetwork
from slipstream.native.inputs import Edges, Float64s, Policy
from slipstream.native.results import CycleError, RateChanges, Simulation

if TYPE_CHECKING:
    from slipstream.native.program import Program

Key = tuple[int, float, int]  # (priority, ready ns, instance)
_Links = list[list[tuple[int, float]]]  # per task: (other task, delay ns)


class ReferenceProgram:
    """A compiled program; the Python counterpart of `NativeProgram`.

    Raises:
        GraphError: dependencies form a cycle.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lane = program.lane.tolist()
        self.gap_ns = program.gap_ns.tolist()
        self.priority = program.priority.tolist()
        self.policy = [Policy(value) for value in program.policies.tolist()]
        self.preds = _links(program.tasks, program.edges, lag=0, by_dst=True)
        self.lagged_preds = _links(program.tasks, program.edges, lag=1, by_dst=True)
        self.succs = _links(program.tasks, program.edges, lag=0, by_dst=False)
        self.lagged_succs = _links(program.tasks, program.edges, lag=1, by_dst=False)
        self.lane_tasks: list[list[int]] = [[] for _ in range(program.lanes)]
        for task, lane in enumerate(self.lane):
            self.lane_tasks[lane].append(task)
        self.needs = _needs(program)
        self.transfers = program.flows is not None and bool((program.flows.nbytes > 0.0).any())
        self.fixed_order = (
            program.needs is None
            and not self.transfers
            and all(p is Policy.FIXED for p in self.policy)
        )
        self.order = self._topological_order()

    def simulate(
        self, duration_ns: Float64s, *, rate_changes: bool = False, force_event_loop: bool = False
    ) -> Simulation:
        """Run one simulation; see `Compiled.simulate`."""
        changes, queues = RateChanges.room_for(0) if rate_changes else None, None
        if self.fixed_order and not (force_event_loop or rate_changes):
            start, end = self._one_pass(duration_ns.tolist())
        else:
            loop = _Loop(self, duration_ns.tolist())
            loop.run()
            start, end = loop.start, loop.end
            if isinstance(loop.network, PacketNetwork):
                queues = loop.network.counts
            elif rate_changes and loop.network is not None:
                changes = loop.network.changes()
        shape = (self.program.steps, self.program.tasks)
        ends = np.array(end, np.float64).reshape(shape)
        starts = np.array(start, np.float64).reshape(shape)
        return Simulation(starts, ends, ends.max(axis=1, initial=0.0), changes, queues)

    def _one_pass(self, duration: list[float]) -> tuple[list[float], list[float]]:
        tasks = self.program.tasks
        progress = [0.0] * self.program.lanes
        start = [0.0] * (tasks * self.program.steps)
        end = list(start)
        for k in range(self.program.steps):
            base = k * tasks
            for task in self.order:
                lane = self.lane[task]
                ready = progress[lane]
                for pred, delay in self.preds[task]:
                    ready = max(ready, end[base + pred] + delay)
                if k > 0:
                    for pred, delay in self.lagged_preds[task]:
                        ready = max(ready, end[base - tasks + pred] + delay)
                start[base + task] = ready
                end[base + task] = ready + duration[task]
                progress[lane] = end[base + task] + self.gap_ns[task]
        return start, end

    def _topological_order(self) -> list[int]:
        """Sort depth-first over predecessors, by id; the native engine has the same order."""
        before: list[int | None] = [None] * self.program.tasks
        for lane, tasks in enumerate(self.lane_tasks):
            if self.policy[lane] is Policy.FIXED:
                for earlier, later in itertools.pairwise(tasks):
                    before[later] = earlier
        new, opened, done = 0, 1, 2
        state = [new] * self.program.tasks
        order: list[int] = []
        for root in range(self.program.tasks):
            if state[root] != new:
                continue
            state[root] = opened
            stack = [(root, self._waits_for(root, before[root]))]
            while stack:
                task, waits_for = stack[-1]
                pred = next((p for p in waits_for if state[p] != done), None)
                if pred is None:
                    state[task] = done
                    order.append(task)
                    stack.pop()
                elif state[pred] == opened:
                    path = [entry[0] for entry in stack]
                    raise CycleError(self.program, path[path.index(pred) :][::-1])
                else:
                    state[pred] = opened
                    stack.append((pred, self._waits_for(pred, before[pred])))
        return order

    def _waits_for(self, task: int, before: int | None) -> list[int]:
        preds = [pred for pred, _ in self.preds[task]]
        return preds if before is None else [before, *preds]


@dataclass
class _Lane:
    policy: Policy
    quantum_ns: float
    running: Key | None = None
    run_start_ns: float = 0.0
    run_end_ns: float = 0.0
    boundary_ns: float = -1.0  # quantum boundary requested during this run
    end_event: int = 0  # sequence number of the end event that is not stale
    in_gap: bool = False
    waiting: Key | None = None  # head that waits for resources
    next: int = 0  # fixed lanes: number of instances that have started
    ready: list[Key] = field(default_factory=list)  # heap; other lanes
    suspended: list[tuple[Key, float]] = field(default_factory=list)  # with the remaining ns


def _network(program: Program) -> Network | PacketNetwork | None:
    if program.flows is None:
        return None
    if program.flows.packets is not None:
        return PacketNetwork(program, program.flows, program.flows.packets)
    return Network(program, program.flows)


class _Loop:
    """One simulation. At every instant, in rounds until nothing more happens at that time:

    1. all events of the instant are applied;
    2. every lane they touched is settled: it starts, resumes or preempts, or its head begins to
       wait for resources;
    3. waiting heads whose needs are all free start;
    4. a preemptive lane left idle by a waiting head resumes its suspended task.

    Since (1) is finished before (2) begins, a lane chooses among all tasks ready at that time. The
    rates of transfers are updated before time advances.
    time advances, the rates of transfers are brought up to date.
    """

    def __init__(self, compiled: ReferenceProgram, duration: list[float]) -> None:
        program = compiled.program
        self.compiled = compiled
        self.duration = duration
        self.tasks = program.tasks
        self.now = 0.0
        instances = program.steps * program.tasks
        self.start, self.end = [0.0] * instances, [0.0] * instances
        self.ready_ns = [0.0] * instances
        self.missing = [0] * instances
        self.released = [False] * instances
        self.lanes = [
            _Lane(policy, quantum)
            for policy, quantum in zip(compiled.policy, program.quantum_ns.tolist(), strict=True)
        ]
        self.events: list[tuple[float, int, str, int]] = []
        self.sequence = 0
        self.touched: set[int] = set()
        self.free = [] if program.resources is None else program.resources.capacity.tolist()
        # Per resource: (ready ns, instance, lane) of the waiting heads, sorted.
        self.queues: list[list[tuple[float, int, int]]] = [[] for _ in self.free]
        self.to_serve: list[int] = []
        self.left_idle: set[int] = set()
        self.ended = 0
        self.network = _network(program)
        self.moves = [False] * self.tasks
        if program.flows is not None:
            self.moves = (program.flows.nbytes > 0.0).tolist()

    def run(self) -> None:
        self._release_roots()
        self._settle_all()
        while self._advance():
            while self.events and self.events[0][0] == self.now:
                _, sequence, kind, index = heapq.heappop(self.events)
                self._apply(sequence, kind, index)
            if self.network is not None:
                for instance in self.network.take_ended(self.now):
                    self._end_instance(instance)
            self._settle_all()
        if self.ended != len(self.end):
            raise GraphError("tasks left over without a cycle", remedy="report this as a defect")

    def _advance(self) -> bool:
        """Advance to the next instant with an event; return False if there is none."""
        next_ns = self.events[0][0] if self.events else math.inf
        if self.network is not None and next_ns != self.now:
            self.network.solve(self.now)
            next_ns = min(next_ns, self.network.next_end_ns())
        self.now = next_ns
        return next_ns < math.inf

    def _push(self, time_ns: float, kind: str, index: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time_ns, self.sequence, kind, index))

    def _key(self, instance: int) -> Key:
        task = instance % self.tasks
        ranked = self.compiled.policy[self.compiled.lane[task]] >= Policy.PRIORITY
        priority = self.compiled.priority[task] if ranked else 0
        return (priority, self.ready_ns[instance], instance)

    # ---- 1. events ---------------------------------------------------------------------------

    def _release_roots(self) -> None:
        for instance in range(len(self.end)):
            step, task = divmod(instance, self.tasks)
            self.missing[instance] = len(self.compiled.preds[task])
            if step > 0:
                self.missing[instance] += len(self.compiled.lagged_preds[task])
            if self.missing[instance] == 0:
                self._release(instance)

    def _release(self, instance: int) -> None:
        self.released[instance] = True
        lane_id = self.compiled.lane[instance % self.tasks]
        lane = self.lanes[lane_id]
        if lane.policy is not Policy.FIXED:
            heapq.heappush(lane.ready, self._key(instance))
        self.touched.add(lane_id)

    def _apply(self, sequence: int, kind: str, index: int) -> None:
        if kind == "ready":
            self._release(index)
            return
        if kind == "task end":
            self._finish(index)
            return
        if kind == "flow":
            assert self.network is not None
            self.network.begin(index)
            return
        lane = self.lanes[index]
        if kind == "end":
            # Preemption leaves the old end event in the heap; it is stale.
            if lane.running is not None and sequence == lane.end_event:
                self._end_running(index, lane)
            return
        if kind == "gap over":
            lane.in_gap = False
        self.touched.add(index)

    def _end_instance(self, instance: int) -> None:
        """End the task of a transfer."""
        lane_id = self.compiled.lane[instance % self.tasks]
        if self.lanes[lane_id].policy is Policy.CONCURRENT:
            self._finish(instance)
        else:
            self._end_running(lane_id, self.lanes[lane_id])

    def _end_running(self, lane_id: int, lane: _Lane) -> None:
        assert lane.running is not None
        instance = lane.running[2]
        task = instance % self.tasks
        lane.running = None
        free_at = self.now + self.compiled.gap_ns[task]
        if free_at > self.now:
            lane.in_gap = True
            self._push(free_at, "gap over", lane_id)
        self.touched.add(lane_id)
        for resource, amount in self.compiled.needs[task]:
            self.free[resource] += amount
            if self.queues[resource]:
                self.touched.add(self.queues[resource][0][2])
        self._finish(instance)

    def _finish(self, instance: int) -> None:
        step, task = divmod(instance, self.tasks)
        self.end[instance] = self.now
        self.ended += 1
        self._notify(self.compiled.succs[task], step * self.tasks)
        if (step + 1) * self.tasks < len(self.end):
            self._notify(self.compiled.lagged_succs[task], (step + 1) * self.tasks)

    def _notify(self, succs: list[tuple[int, float]], first_of_step: int) -> None:
        for task, delay in succs:
            instance = first_of_step + task
            self.ready_ns[instance] = max(self.ready_ns[instance], self.now + delay)
            self.missing[instance] -= 1
            if self.missing[instance] > 0:
                continue
            if self.ready_ns[instance] <= self.now:
                self._release(instance)
            else:
                self._push(self.ready_ns[instance], "ready", instance)

    # ---- 2. lanes ----------------------------------------------------------------------------

    def _settle_all(self) -> None:
        for lane_id in sorted(self.touched):
            self._settle(lane_id)
        self.touched.clear()
        self._serve_waiters()
        self._resume_behind_waiters()

    def _candidate(self, lane_id: int) -> tuple[Key | None, bool]:
        """Return the task the lane would run next, and whether it is suspended."""
        lane = self.lanes[lane_id]
        if lane.in_gap:
            return None, False
        if lane.policy is Policy.FIXED:
            instance = self._next_in_fixed_order(lane_id)
            if lane.running is not None or instance is None or not self.released[instance]:
                return None, False
            return self._key(instance), False
        head = lane.ready[0] if lane.ready else None
        if lane.running is not None:
            urgent = head is not None and head[0] < lane.running[0]
            return (head if lane.policy is Policy.PREEMPTIVE and urgent else None), False
        if lane.suspended and (head is None or lane.suspended[-1][0] < head):
            return lane.suspended[-1][0], True
        return head, False

    def _next_in_fixed_order(self, lane_id: int) -> int | None:
        tasks = self.compiled.lane_tasks[lane_id]
        step, place = divmod(self.lanes[lane_id].next, max(len(tasks), 1))
        if not tasks or step >= self.compiled.program.steps:
            return None
        return step * self.tasks + tasks[place]

    def _settle(self, lane_id: int) -> None:
        lane = self.lanes[lane_id]
        if lane.policy is Policy.CONCURRENT:
            for key in lane.ready:
                self._start_concurrent(key[2])
            lane.ready.clear()
            return
        head, is_suspended = self._candidate(lane_id)
        if lane.waiting is not None and (is_suspended or head != lane.waiting):
            self._withdraw(lane_id)
        if head is None:
            return
        if is_suspended:
            self._resume(lane)
        elif not self.compiled.needs[head[2] % self.tasks]:
            if lane.running is None or self._at_boundary(lane_id):
                self._start(lane_id, head)
        else:
            if lane.waiting is None:
                self._enqueue(lane_id, head)
            self.to_serve.append(lane_id)

    def _at_boundary(self, lane_id: int) -> bool:
        """Whether the running task may be preempted now; if not, request a call at the boundary."""
        lane = self.lanes[lane_id]
        if lane.quantum_ns == 0.0 or lane.boundary_ns == self.now:
            return True
        quanta = float(math.ceil((self.now - lane.run_start_ns) / lane.quantum_ns))
        boundary = lane.run_start_ns + quanta * lane.quantum_ns
        if boundary <= self.now:
            return True
        if boundary < lane.run_end_ns and boundary != lane.boundary_ns:
            lane.boundary_ns = boundary
            self._push(boundary, "boundary", lane_id)
        return False

    def _run_until(self, lane: _Lane, key: Key, remaining_ns: float) -> None:
        lane.running = key
        lane.run_start_ns = self.now
        lane.run_end_ns = self.now + remaining_ns
        lane.boundary_ns = -1.0
        if self.moves[key[2] % self.tasks]:
            lane.end_event = 0
            self._start_flow(key[2], remaining_ns)
            return
        self._push(lane.run_end_ns, "end", self.compiled.lane[key[2] % self.tasks])
        lane.end_event = self.sequence

    def _start_flow(self, instance: int, latency_ns: float) -> None:
        if latency_ns > 0.0:
            self._push(self.now + latency_ns, "flow", instance)
        else:
            assert self.network is not None
            self.network.begin(instance)

    def _start_concurrent(self, instance: int) -> None:
        """Start a task on a concurrent lane."""
        duration_ns = self.duration[instance % self.tasks]
        self.start[instance] = self.now
        if self.moves[instance % self.tasks]:
            self._start_flow(instance, duration_ns)
        else:
            self._push(self.now + duration_ns, "task end", instance)

    def _start(self, lane_id: int, key: Key) -> None:
        lane = self.lanes[lane_id]
        if lane.running is not None:
            lane.suspended.append((lane.running, lane.run_end_ns - self.now))
        if lane.policy is Policy.FIXED:
            lane.next += 1
        else:
            heapq.heappop(lane.ready)
        self.start[key[2]] = self.now
        self._run_until(lane, key, self.duration[key[2] % self.tasks])

    def _resume(self, lane: _Lane) -> None:
        self._run_until(lane, *lane.suspended.pop())

    # ---- 3. and 4. resources -----------------------------------------------------------------

    def _enqueue(self, lane_id: int, key: Key) -> None:
        self.lanes[lane_id].waiting = key
        for resource, _ in self.compiled.needs[key[2] % self.tasks]:
            bisect.insort(self.queues[resource], (key[1], key[2], lane_id))

    def _withdraw(self, lane_id: int) -> None:
        """Leave the queues; the new first of each may now be served."""
        key = self.lanes[lane_id].waiting
        assert key is not None
        self.lanes[lane_id].waiting = None
        for resource, _ in self.compiled.needs[key[2] % self.tasks]:
            queue = self.queues[resource]
            queue.pop(bisect.bisect_left(queue, (key[1], key[2], lane_id)))
            if queue:
                self.to_serve.append(queue[0][2])

    def _can_have_all(self, instance: int) -> bool:
        return all(
            self.queues[resource][0][1] == instance and self.free[resource] >= amount
            for resource, amount in self.compiled.needs[instance % self.tasks]
        )

    def _serve_waiters(self) -> None:
        while self.to_serve:
            lane_id = self.to_serve.pop()
            lane = self.lanes[lane_id]
            key = lane.waiting
            if key is None:
                continue
            if not self._can_have_all(key[2]):
                if lane.running is None and lane.suspended:
                    self.left_idle.add(lane_id)
                continue
            if lane.running is not None and not self._at_boundary(lane_id):
                continue
            for resource, amount in self.compiled.needs[key[2] % self.tasks]:
                self.free[resource] -= amount
            self._withdraw(lane_id)
            self._start(lane_id, key)

    def _resume_behind_waiters(self) -> None:
        # In order of lanes, because a resumed task may dismiss its waiter, which serves others.
        while self.left_idle:
            lane_id = min(self.left_idle)
            self.left_idle.remove(lane_id)
            lane = self.lanes[lane_id]
            if lane.running is not None or lane.waiting is None:
                continue
            self._resume(lane)
            if self._candidate(lane_id)[0] != lane.waiting:
                self._withdraw(lane_id)
            self._serve_waiters()


def _links(tasks: int, edges: Edges, *, lag: int, by_dst: bool) -> _Links:
    links: _Links = [[] for _ in range(tasks)]
    row, item = (edges.dst, edges.src) if by_dst else (edges.src, edges.dst)
    chosen = edges.lag == lag
    columns = (row[chosen].tolist(), item[chosen].tolist(), edges.delay_ns[chosen].tolist())
    for task, other, delay in zip(*columns, strict=True):
        links[task].append((other, delay))
    return links


def _needs(program: Program) -> list[list[tuple[int, int]]]:
    if program.needs is None:
        return [[] for _ in range(program.tasks)]
    offset, resource, amount = (part.tolist() for part in program.needs)
    return [
        list(zip(resource[a:b], amount[a:b], strict=True)) for a, b in itertools.pairwise(offset)
    ]
