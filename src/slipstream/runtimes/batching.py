"""Dynamic batching: answer queries that wait at the same time together.

The load generator's system, the model server and the queue simulation share one policy, so it
depends on times and counts only.
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
    """When a free worker starts a batch: if `maximum` queries wait, or the oldest for `delay_ns`.

    Attributes:
        maximum: maximum number of queries per batch.
        delay_ns: maximum time that a query waits for others.
    """

    maximum: int = 1
    delay_ns: int = 0

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise InvalidArgumentError("batch", f"{self.maximum} is less than one query")
        if self.delay_ns < 0:
            raise InvalidArgumentError("delay", f"{self.delay_ns} ns is negative")

    def __str__(self) -> str:
        if self.maximum == 1:
            return "one at a time"
        delay = f", delayed by up to {format_duration(self.delay_ns)}" if self.delay_ns else ""
        return f"up to {self.maximum} at a time{delay}"


class Batcher(Generic[T]):
    """A thread-safe queue that forms batches by a policy.

    Args:
        capacity: maximum number of waiting items; None for no limit.
    """

    def __init__(self, policy: BatchPolicy, capacity: int | None = None) -> None:
        self.policy = policy
        self._capacity = capacity
        self._waiting: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()

    def put(self, item: T) -> bool:
        """Add an item; return False if the queue is full."""
        if self._capacity is not None and self._waiting.qsize() >= self._capacity:
            return False
        self._waiting.put((time.perf_counter_ns(), item))
        return True

    def end(self) -> None:
        """Let every `take` return None once the queue is empty."""
        self._waiting.put(None)

    def waiting(self) -> int:
        """Return the number of waiting items."""
        return self._waiting.qsize()

    def take(self) -> list[T] | None:
        """Wait for the next batch; None after `end`."""
        first = self._waiting.get()
        if first is None:
            self._waiting.put(None)
            return None
        batch, delay_ns = [first[1]], self.policy.delay_ns
        while len(batch) < self.policy.maximum:
            wait_s = (first[0] + delay_ns - time.perf_counter_ns()) / 1e9 if delay_ns else 0.0
            try:
                more = self._waiting.get(wait_s > 0, max(wait_s, 0.0))
            except queue.Empty:
                break
            if more is None:
                self._waiting.put(None)
                break
            batch.append(more[1])
        return batch
