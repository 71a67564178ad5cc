"""Work for a cluster: computations, communications, waits, and their dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.cluster.collective import Collective
from slipstream.cluster.groups import Group
from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Task:
    """One of `Tasks`.

    Attributes:
        name: name for display.
        after: numbers of the tasks it waits for.
        duration_ns: duration of a computation or a wait.
        rank: rank that computes; None for a wait or a communication.
        collective: the communication.
        priority: priority among the computations of one device; smaller goes first.
    """

    name: str
    after: tuple[int, ...]
    duration_ns: float = 0.0
    rank: int | None = None
    collective: Collective | None = None
    priority: int = 0


@dataclass
class Tasks:
    """One iteration of a job. Each method adds a task and returns its number.

    Ranks, and groups of collectives, count within the job; its placement maps them to devices. A
    device computes one task at a time, in order of priority, then of readiness.
    """

    tasks: list[Task] = field(default_factory=list)

    def compute(
        self,
        rank: int,
        duration_ns: float,
        after: Sequence[int] = (),
        *,
        name: str = "compute",
        priority: int = 0,
    ) -> int:
        """Add a computation of this duration on the device of `rank`.

        Raises:
            InvalidArgumentError: the duration is negative, infinite or not a number.
        """
        self._check(name, duration_ns, rank)
        return self._add(Task(name, tuple(after), duration_ns, rank, priority=priority))

    def communicate(
        self, collective: Collective, after: Sequence[int] = (), *, name: str = ""
    ) -> int:
        """Add a communication of the collective's group, after all of `after`."""
        label = name or collective.kind
        return self._add(Task(label, tuple(after), collective=collective))

    def wait(self, duration_ns: float, after: Sequence[int] = (), *, name: str = "wait") -> int:
        """Add a time in which no device is busy."""
        self._check(name, duration_ns, 0)
        return self._add(Task(name, tuple(after), duration_ns))

    def depend(self, task: int, on: int) -> None:
        """Let `task` also wait for `on`."""
        waiting = self.tasks[task]
        self.tasks[task] = replace(waiting, after=(*waiting.after, on))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _check(self, name: str, duration_ns: float, rank: int) -> None:
        place = f"task {len(self.tasks)} ({name})"
        if not (math.isfinite(duration_ns) and duration_ns >= 0.0):
            raise InvalidArgumentError(
                "duration_ns", f"{place} has {duration_ns} ns, but it must be finite and at least 0"
            )
        if rank < 0:
            raise InvalidArgumentError("rank", f"{place} has rank {rank}")


@dataclass(frozen=True)
class Job:
    """Tasks, repeated, on some devices.

    Attributes:
        tasks: tasks of one iteration; the next begins when all are done.
        iterations: number of iterations.
        placement: devices of the ranks, row after row; None: rank i is device i.
        arrival_ns: start time.
        priority: added to the priority of its communications and computations.
        weight: factor of the weight of its communications.
        name: name for display.
    """

    tasks: Tasks
    iterations: int = 1
    placement: Group | None = None
    arrival_ns: float = 0.0
    priority: int = 0
    weight: float = 1.0
    name: str = "job"

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InvalidArgumentError("iterations", f"{self.iterations} is less than 1")
        if not (math.isfinite(self.arrival_ns) and self.arrival_ns >= 0.0):
            raise InvalidArgumentError("arrival_ns", f"{self.arrival_ns} is not a time")
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise InvalidArgumentError("weight", f"{self.weight} is not a positive number")
        if not self.tasks.tasks:
            raise InvalidArgumentError("tasks", f"{self.name} has no tasks")
