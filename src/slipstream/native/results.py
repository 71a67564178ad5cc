"""Results of a simulation: times, transfer rates, counts of packets; or a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from slipstream.errors import GraphError
from slipstream.native.inputs import Float64s, Int32s, Int64s

if TYPE_CHECKING:
    from slipstream.native.program import Program

_CYCLE_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulation by either engine.

    Attributes:
        start_ns, end_ns: float64 [steps, tasks].
        step_end_ns: float64 [steps]; latest end of each step.
        rate_changes: changes of rates, if requested; None for packets.
        queues: counts of packets, if transfers travel as packets.
    """

    start_ns: Float64s
    end_ns: Float64s
    step_end_ns: Float64s
    rate_changes: RateChanges | None = None
    queues: QueueCounts | None = None


@dataclass(frozen=True, eq=False)
class RateChanges:
    """Changes of a transfer's rate or bottleneck, in order, without the end of the transfer, which
    is that of its task.

    Attributes:
        time_ns: float64 [changes].
        rate: float64 [changes], bytes per nanosecond from then on.
        instance: int32 [changes], step * tasks + task.
        link: int32 [changes]; its bottleneck from then on: a full link of its path on which no
            transfer of its priority has a higher rate per weight.
    """

    time_ns: Float64s
    rate: Float64s
    instance: Int32s
    link: Int32s

    @classmethod
    def room_for(cls, count: int) -> RateChanges:
        return cls(
            np.empty(count), np.empty(count), np.empty(count, np.int32), np.empty(count, np.int32)
        )

    def first(self, count: int) -> RateChanges:
        """Return the first `count` changes."""
        return RateChanges(*(getattr(self, column.name)[:count].copy() for column in fields(self)))


@dataclass(frozen=True, eq=False)
class QueueCounts:
    """Counts of packets, updated during a simulation.

    Attributes:
        peak_bytes: float64 [links]; maximum of waiting bytes.
        dropped, marked: int64 [links].
        sent_again: int64 [steps * tasks]; number of retransmissions of each transfer.
    """

    peak_bytes: Float64s
    dropped: Int64s
    marked: Int64s
    sent_again: Int64s

    @classmethod
    def zeros(cls, links: int, instances: int) -> QueueCounts:
        """Return counts of 0."""
        return cls(
            np.zeros(links), np.zeros(links, np.int64), np.zeros(links, np.int64),
            np.zeros(instances, np.int64),
        )  # fmt: skip


class CycleError(GraphError):
    """Tasks that wait for each other.

    Attributes:
        tasks: ids in order; each gates the next, the last gates the first. A task of a FIXED lane
            also gates the task after it in that lane.
    """

    def __init__(self, program: Program, tasks: Sequence[int]) -> None:
        self.tasks = tuple(tasks)
        shown = [program.task_name(task) for task in self.tasks[:_CYCLE_SHOWN]]
        shown.append(shown[0] if len(shown) == len(self.tasks) else "...")
        super().__init__(
            "dependencies form a cycle: " + " -> ".join(shown),
            where=f"{len(self.tasks)} tasks",
            remedy="remove one of these dependencies; tasks of a FIXED lane also wait for the task "
            "before them in that lane",
        )
