"""Work for a cluster to do: computations, communications, waits, and what waits for what."""

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
        name: for people.
        after: numbers of the tasks it waits for.
        duration_ns: of a computation or a wait.
        rank: who computes; None for a wait or a communication.
        collective: what is communicated.
        priority: among the computations of one device; smaller goes first.
    """

    name: str
    after: tuple[int, ...]
    duration_ns: float = 0.0
    rank: int | None = None
    collective: Collective | None = None
    priority: int = 0


@dataclass
class Tasks:
    """One iteration of a job. Each method adds a task and gives its number.

    Ranks, and groups of collectives, count within the job; its placement says which devices they
    are. A device computes one task at a time, in order of priority, then of when they are ready.
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
        """The device of `rank` is busy for so long.

        Raises:
            InvalidArgumentError: a duration that is negative, infinite or not a number.
        """
        self._check(name, duration_ns, rank)
        return self._add(Task(name, tuple(after), duration_ns, rank, priority=priority))

    def communicate(
        self, collective: Collective, after: Sequence[int] = (), *, name: str = ""
    ) -> int:
        """The ranks of its group exchange data, once all of `after` are done."""
        label = name or collective.kind
        return self._add(Task(label, tuple(after), collective=collective))

    def wait(self, duration_ns: float, after: Sequence[int] = (), *, name: str = "wait") -> int:
        """Time passes; nobody is busy."""
        self._check(name, duration_ns, 0)
        return self._add(Task(name, tuple(after), duration_ns))

    def depend(self, task: int, on: int) -> None:
        """`task` also waits for `on`."""
        known = self.tasks[task]
        self.tasks[task] = replace(known, after=(*known.after, on))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _check(self, name: str, duration_ns: float, rank: int) -> None:
        place = f"task {len(self.tasks)} ({name})"
        if not (math.isfinite(duration_ns) and duration_ns >= 0.0):
            raise InvalidArgumentError(
                "duration_ns", f"{place} has {duration_ns} ns, must be finite and at least 0"
            )
        if rank < 0:
            raise InvalidArgumentError("rank", f"{place} has rank {rank}")


@dataclass(frozen=True)
class Job:
    """Tasks, repeated, on some devices.

    Attributes:
        tasks: of one iteration; the next begins when all of it are done.
        iterations: how often.
        placement: which devices the ranks are, row after row; None: rank i is device i.
        arrival_ns: when it begins.
        priority: added to that of its communications and computations.
        weight: multiplies that of its communications.
        name: for people.
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
