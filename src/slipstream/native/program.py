"""The input of the event engine: tasks on lanes, and their dependencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.native.engine import Compiled, compile_program
from slipstream.native.inputs import (
    DEFAULT,
    MAX_BYTES,
    MAX_INDEX,
    Edges,
    Float64s,
    Flows,
    Int32s,
    Int64s,
    Integers,
    Names,
    Policy,
    Resources,
    Tensors,
    check_index,
    put,
    put_integers,
    put_times,
)

# Below the resolution of any clock; counting smaller quanta would overflow.
MIN_QUANTUM_NS = 2.0**-10


@dataclass(frozen=True, eq=False)
class Program:
    """The program that the engine simulates. Checked at construction; its arrays must not change.

    Attributes:
        lane: int32 [tasks]; the lane each task runs on.
        duration_ns: float64 [tasks].
        gap_ns: float64 [tasks]; time for which a lane remains blocked after a task, while
            successors may already start. Default 0.
        priority: int32 [tasks]; **smaller is more urgent**. Default 0.
        policies: uint8 [lanes] of `Policy`; by default every used lane is FIXED.
        quantum_ns: float64 [lanes]; granularity of preemption, 0 (default) for immediate
            preemption, otherwise at least `MIN_QUANTUM_NS`.
        edges: dependencies.
        steps: number of repetitions of the tasks; instance (k, t) is task t of step k.
        resources: resources that tasks hold while they run.
        flows: transfers over links. Not on PREEMPTIVE lanes.
        tensors: tensors in memory.
        names: [tasks], only for messages.

    Raises:
        InvalidArgumentError: a shape, dtype, index or value is not allowed; the error names the
            element.
        GraphError: a task needs more of a resource than its capacity.
    """

    lane: Integers
    duration_ns: Float64s
    gap_ns: Float64s = DEFAULT
    priority: Integers = DEFAULT
    policies: Integers = DEFAULT
    quantum_ns: Float64s = DEFAULT
    edges: Edges = field(
        default_factory=lambda: Edges(np.empty(0, np.int32), np.empty(0, np.int32))
    )
    steps: int = 1
    resources: Resources | None = None
    flows: Flows | None = None
    tensors: Tensors | None = None
    names: Names | None = None

    def __post_init__(self) -> None:
        lane = put_integers(self, "lane", np.int32)
        tasks = lane.size
        put_times(self, "duration_ns", tasks, self.task_name)
        put_times(self, "gap_ns", tasks, self.task_name)
        put_integers(self, "priority", np.int32, tasks, -(2**31))
        policies: Any = self.policies
        if policies is None:
            put(self, "policies", np.zeros(int(lane.max()) + 1 if tasks else 0, np.uint8))
        put_integers(self, "policies", np.uint8, high=max(Policy))
        put_times(self, "quantum_ns", self.lanes, "lane")
        tiny = np.flatnonzero((self.quantum_ns > 0.0) & (self.quantum_ns < MIN_QUANTUM_NS))
        if tiny.size:
            raise InvalidArgumentError(
                "quantum_ns",
                f"lane {tiny[0]} has {self.quantum_ns[tiny[0]]} ns",
                remedy=f"use 0 for immediate preemption, or at least {MIN_QUANTUM_NS} ns",
            )
        if self.names is not None and len(self.names) != tasks:
            raise InvalidArgumentError("names", f"has {len(self.names)} entries for {tasks} tasks")
        check_index("lane", lane, self.lanes, self.task_name, "lane")
        check_index("edges.src", self.edges.src, tasks, "edge", "task")
        check_index("edges.dst", self.edges.dst, tasks, "edge", "task")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidArgumentError("steps", f"{self.steps!r} is not a positive integer")
        if self.steps * max(tasks, 1) > MAX_INDEX:
            raise InvalidArgumentError(
                "steps", f"{self.steps} steps of {tasks} tasks exceed 2^31 - 1 instances"
            )
        if self.edges.src.size > MAX_INDEX:
            raise InvalidArgumentError("edges", "more than 2^31 - 1 edges")
        if self.resources is not None:
            check_index("resources.task", self.resources.task, tasks, "need", "task")
            put(self, "_needs", self._sum_needs(self.resources))
        self._check_concurrent()
        if self.flows is not None:
            self._check_flows(self.flows)
        if self.tensors is not None:
            self._check_tensors(self.tensors)

    @property
    def tasks(self) -> int:
        """Number of tasks in one step."""
        return self.lane.size

    @property
    def lanes(self) -> int:
        return self.policies.size

    @property
    def needs(self) -> tuple[Int64s, Int32s, Int64s] | None:
        """Needs by task: offset [tasks + 1], resource and positive amount; None without needs."""
        needs: tuple[Int64s, Int32s, Int64s] | None = getattr(self, "_needs", None)
        return needs if needs is not None and needs[1].size else None

    def task_name(self, task: int) -> str:
        """Return ``task 17 (aten::mm)``."""
        return f"task {task} ({self.names[task]})" if self.names else f"task {task}"

    def compile(self, backend: Literal["auto", "native", "python"] = "auto") -> Compiled:
        """Return the part that does not depend on durations, built once and cached in the program.

        Raises:
            GraphError: dependencies form a cycle; the error names its tasks.
        """
        return compile_program(self, backend)

    def __getstate__(self) -> dict[str, Any]:
        # A compiled program is a pointer, valid only in its process.
        return {key: value for key, value in self.__dict__.items() if key != "_compiled"}

    def _sum_needs(self, resources: Resources) -> tuple[Int64s, Int32s, Int64s]:
        positive = resources.amount > 0
        pair = (
            resources.task[positive].astype(np.int64) * resources.capacity.size
            + resources.resource[positive]
        )
        pairs, inverse = np.unique(pair, return_inverse=True)
        amount = np.zeros(pairs.size, np.int64)
        np.add.at(amount, inverse, resources.amount[positive])
        # If the exact sum may have wrapped around, use the largest possible amount.
        rounded = np.bincount(inverse, resources.amount[positive], minlength=pairs.size)
        amount[rounded > MAX_BYTES] = np.iinfo(np.int64).max
        task = pairs // max(resources.capacity.size, 1)
        resource = (pairs % max(resources.capacity.size, 1)).astype(np.int32)
        over = np.flatnonzero(amount > resources.capacity[resource])
        if over.size:
            i = int(over[0])
            raise GraphError(
                f"{self.task_name(int(task[i]))} needs {amount[i]} of resource {resource[i]}, "
                f"which has {resources.capacity[resource[i]]}",
                where="resources.amount",
                remedy="raise the capacity or lower the amount, since the task can never start",
            )
        offset = np.zeros(self.tasks + 1, np.int64)
        np.cumsum(np.bincount(task, minlength=self.tasks), out=offset[1:])
        return offset, resource, amount

    def _check_concurrent(self) -> None:
        if not (self.policies == Policy.CONCURRENT).any():
            return
        concurrent = self.policies[self.lane] == Policy.CONCURRENT
        needy = np.zeros(self.tasks, np.bool_)
        if self.needs is not None:
            needy = np.diff(self.needs[0]) > 0
        for wrong, what in ((self.gap_ns > 0.0, "a gap"), (needy, "a resource")):
            offenders = np.flatnonzero(concurrent & wrong)
            if offenders.size:
                raise InvalidArgumentError(
                    "policies",
                    f"{self.task_name(int(offenders[0]))} has {what}, but its lane is CONCURRENT",
                    remedy="use a lane that runs one task at a time",
                )

    def _check_flows(self, flows: Flows) -> None:
        if flows.nbytes.size != self.tasks:
            raise InvalidArgumentError(
                "flows.nbytes", f"has {flows.nbytes.size} entries for {self.tasks} tasks"
            )
        preemptive = self.policies[self.lane] == Policy.PREEMPTIVE
        offenders = np.flatnonzero(preemptive & (flows.nbytes > 0.0))
        if offenders.size:
            raise InvalidArgumentError(
                "flows",
                f"{self.task_name(int(offenders[0]))} transfers on a PREEMPTIVE lane",
                remedy="use a CONCURRENT lane: less urgent transfers are delayed there too",
            )

    def _check_tensors(self, tensors: Tensors) -> None:
        produced = np.where(tensors.producer < 0, 0, tensors.producer)
        if self.tasks or np.any(tensors.producer >= 0):
            check_index("tensors.producer", produced, self.tasks, "tensor", "task")
        check_index("tensors.consumer_task", tensors.consumer_task, self.tasks, "use", "task")
        if float(tensors.nbytes.sum(dtype=np.float64)) * self.steps > MAX_BYTES:
            raise InvalidArgumentError("tensors.nbytes", "add up to more than 2^62 bytes")
