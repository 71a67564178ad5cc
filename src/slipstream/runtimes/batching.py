"""Dynamic batching: queries that wait together are answered together.

One policy for whoever batches: the load generator's system, our server, and the queue simulation,
which is why the decision is a function of times and counts, and nothing else.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from slipstream.errors import InvalidArgumentError
from slipstream.units import format_duration

T = TypeVar("T")


@dataclass(frozen=True)
class BatchPolicy:
    """When a free worker starts, and with how many: as soon as `maximum` queries wait, or the
    oldest has waited for `delay_ns`.

    Attributes:
        maximum: queries in a batch at most.
        delay_ns: how long a query may be held back for others to join it.
    """

    maximum: int = 1
    delay_ns: int = 0

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise InvalidArgumentError("batch", f"{self.maximum} is less than one query")
        if self.delay_ns < 0:
            raise InvalidArgumentError("delay", "it is negative")

    def __str__(self) -> str:
        if self.maximum == 1:
            return "one at a time"
        held = f", held back {format_duration(self.delay_ns)} at most" if self.delay_ns else ""
        return f"up to {self.maximum} at a time{held}"


class Batcher(Generic[T]):
    """A queue that gives batches by a policy; any number of threads may put and take.

    Args:
        capacity: how many may wait, those who are being answered not counted; None: no limit.
    """

    def __init__(self, policy: BatchPolicy, capacity: int | None = None) -> None:
        self.policy = policy
        self._capacity = capacity
        self._waiting: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()

    def put(self, item: T) -> bool:
        """Let it wait; False where no more may, and it is not taken."""
        if self._capacity is not None and self._waiting.qsize() >= self._capacity:
            return False
        self._waiting.put((time.perf_counter_ns(), item))
        return True

    def end(self) -> None:
        """Let every `take` return None once nothing waits any more."""
        self._waiting.put(None)

    def waiting(self) -> int:
        """How many wait."""
        return self._waiting.qsize()

    def take(self) -> list[T] | None:
        """The next batch, when the policy says so; None after `end`."""
        first = self._waiting.get()
        if first is None:
            self._waiting.put(None)
            return None
        batch, most, delay_ns = [first[1]], self.policy.maximum, self.policy.delay_ns
        while len(batch) < most:
            left_s = (first[0] + delay_ns - time.perf_counter_ns()) / 1e9 if delay_ns else 0.0
            try:
                if left_s > 0:
                    more = self._waiting.get(timeout=left_s)
                else:
                    more = self._waiting.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            batch.append(more[1])
        return batch
