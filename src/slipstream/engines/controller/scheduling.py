"""The order of launches: proportional shares, and admission by memory.

Source: stride scheduling of Waldspurger and Weihl, MIT/LCS/TM-528, 1995.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Launchable(Protocol):
    """A queued item of `FairQueue`."""

    @property
    def hosts(self) -> list[int]:
        """Hosts that it occupies."""


T = TypeVar("T", bound=Launchable)


@dataclass(eq=False)
class QueuedClient(Generic[T]):
    """A client's launches that have not started.

    Attributes:
        weight: its share, relative to others.
        time: device time it used, divided by its weight.
    """

    name: str
    weight: float
    time: float = 0.0
    waiting: deque[T] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Launches of several clients; the one that is furthest behind its share goes first."""

    def __init__(self) -> None:
        self.clients: list[QueuedClient[T]] = []
        self._now = 0.0

    def add(self, client: QueuedClient[T], item: T) -> None:
        if not client.waiting:
            # An idle client does not save up time.
            client.time = max(client.time, self._now)
        client.waiting.append(item)

    def take(self, admits: Callable[[T], bool]) -> T | None:
        """Remove and return the next item; None if none may start.

        An item that may not start blocks later ones on its hosts, so that it does not starve.

        Args:
            admits: whether an item may start now.
        """
        blocked: set[int] = set()
        ready = [client for client in self.clients if client.waiting]
        for client in sorted(ready, key=lambda client: client.time):
            item = client.waiting[0]
            if blocked.isdisjoint(item.hosts) and admits(item):
                self._now = client.time
                return client.waiting.popleft()
            blocked.update(item.hosts)
        return None

    def remove(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove and return all waiting items that match."""
        found: list[T] = []
        for client in self.clients:
            found += [item for item in client.waiting if matches(item)]
            client.waiting = deque(item for item in client.waiting if not matches(item))
        return found
