"""The channel: slices that wait, are on their way, have arrived; and threads that move them.

A round is one backward pass: every slice is sent once in it, on every rank. An `Order` says which
slice is next, the same on all ranks. A slice is scattered and gathered directly (see
`slipstream.ranks.lines`): each number is summed on one rank, in the order of ranks. Three threads
pass it on, so that its second half is on the wire while the first half of the next one is: one
starts, one adds up, one ends it.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Flag, auto
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slipstream.errors import CommunicationError
from slipstream.ranks.group import ProcessGroup
from slipstream.ranks.lines import Gather, Line, Scatter, cut, room_for, shares
from slipstream.techniques.distributed.priority.layout import Slice, Unit

_WHERE = "PriorityDDP"


class Half(Flag):
    """Which halves of an exchange to do."""

    SCATTER = auto()
    GATHER = auto()
    BOTH = SCATTER | GATHER


class Order(Protocol):
    """Which slice is sent next: the one thing that all ranks have to agree on."""

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        """All slices of one round, each when there is room for it and it is ready here."""


class Channel:
    """What the training thread hands over and waits for; base of what moves it.

    Args:
        ranks: who exchanges.
        units: what is exchanged; already cut in slices.
        credit_bytes: so much may be on its way at once, and at least one slice.
    """

    def __init__(self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int) -> None:
        self.ranks, self.units = ranks, units
        self.slices = [one for unit in units for one in unit.slices]
        self.credit_bytes = credit_bytes
        self.changed = threading.Condition()
        self.closed = False
        self._error: CommunicationError | None = None
        self._failing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting: list[tuple[int, int]] = []
        self._ready: set[int] = set()
        self._rounds = 0
        self._flying = 0

    # What the training thread calls.

    def begin(self) -> None:
        """A round begins. The one before has arrived."""
        with self.changed:
            self.check()
            self._ready.clear()
            self._waiting.clear()
            self._rounds += 1
            for unit in self.units:
                unit.left = len(unit.slices)
                unit.handed = [False] * len(unit.parameters)
            self.changed.notify_all()

    def hand_over(self, unit: Unit) -> None:
        """The unit's buffer is filled; from now on it belongs to the channel, until it arrives."""
        with self.changed:
            for one in unit.slices:
                self._ready.add(one.number)
                heapq.heappush(self._waiting, (unit.number, one.number))
            self.changed.notify_all()

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Until all slices of the units are there.

        Raises:
            CommunicationError: they will never be.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._error or not any(unit.left for unit in units))
            self.check()

    def wait_for_some(self, units: Sequence[Unit]) -> list[Unit]:
        """Those that have arrived; where none has, the first that does.

        Raises:
            CommunicationError: none will ever.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._error or any(not unit.left for unit in units) or not units
            )
            self.check()
            return [unit for unit in units if not unit.left]

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait until a round that has begun is over, for the others' sake, and close."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self._error
                    or not (self._flying or any(u.left for u in self.units))
                    # Else the round needs something more of this rank's training.
                    or len(self._ready) < len(self.slices)
                )
            )
        self.close()

    def close(self) -> None:
        """End the threads. What is on its way is waited for as long as the group's time-out."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # What the threads call.

    def run(self, *loops: Callable[[], None]) -> None:
        """A thread for each, until it returns; what one raises is raised by `wait_for`."""
        for loop in loops:
            thread = threading.Thread(
                target=self._guarded, args=(loop,), daemon=True, name="slipstream-priority"
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def round_begun(self, done: int) -> bool:
        """Wait until more than `done` rounds have begun; False: the channel closes."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._error or self._rounds > done)
            return not (self.closed or self._error) and self._rounds > done

    def most_urgent(self) -> Slice:
        """Take the most urgent slice that is ready here, when there is one and room for it."""
        with self.changed:
            self._until(lambda: bool(self._waiting) and self._has_room())
            return self.slices[heapq.heappop(self._waiting)[1]]

    def until_ready(self, one: Slice) -> None:
        with self.changed:
            self._until(lambda: one.number in self._ready)

    def until_room(self) -> None:
        with self.changed:
            self._until(self._has_room)

    def departs(self, one: Slice) -> None:
        """Count it as on its way."""
        with self.changed:
            self._flying += one.nbytes

    def lands(self, one: Slice, *, arrived: bool) -> None:
        """Count it as no longer on its way; `arrived`: it is what it has to be."""
        with self.changed:
            self._flying -= one.nbytes
            one.unit.left -= arrived
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing will arrive any more: say so to all who wait."""
        # The first of several threads that fail at once asks the others who is the cause.
        with self._failing:
            if self._error is None:
                cause = self.ranks.explain(error, _WHERE)
                with self.changed:
                    self._error = cause
                    self.changed.notify_all()

    def _has_room(self) -> bool:
        return not self._flying or self._flying < self.credit_bytes

    def _until(self, true: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.closed or self._error or true())
        if self.closed or self._error:
            raise Closed

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Closed:
            pass
        except Exception as error:
            if not self.closed:
                self.fail(error)


class Closed(Exception):  # noqa: N818 - no error: a thread is asked to end
    """The channel closes, or has failed already."""


class Agreed(Channel):
    """Slices in an order that all ranks agree on."""

    def __init__(
        self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int, order: Order
    ) -> None:
        super().__init__(ranks, units, credit_bytes)
        self._order = order
        self._scattered: set[int] = set()
        self._line = Line.of(ranks.wire)
        self._adding: queue.SimpleQueue[tuple[Slice, Half, Scatter] | None] = queue.SimpleQueue()
        self._ending: queue.SimpleQueue[tuple[Slice, Gather] | None] = queue.SimpleQueue()
        self.run(self._start_all, self._add_all, self._end_all)

    def until_scattered(self, one: Slice) -> None:
        """Wait until this rank's part of a slice is added up."""
        with self.changed:
            self._until(lambda: one.number in self._scattered)

    def _start_all(self) -> None:
        done = 0
        try:
            while self.round_begun(done):
                done += 1
                self._scattered.clear()
                for one, half in self._order.picks(self):
                    self.departs(one)
                    if Half.SCATTER in half:
                        self._start_scatter(one, half)
                    else:
                        self._start_gather(one)
        finally:
            self._adding.put(None)

    def _add_all(self) -> None:
        try:
            while (item := self._adding.get()) is not None:
                one, half, scatter = item
                scatter.sum(self._parts(one)[self._line.place])
                scatter.end()
                if Half.GATHER in half:
                    self._start_gather(one)
                else:
                    with self.changed:
                        self._scattered.add(one.number)
                    self.lands(one, arrived=False)
        finally:
            self._ending.put(None)

    def _end_all(self) -> None:
        while (item := self._ending.get()) is not None:
            one, gather = item
            gather.end()
            self.lands(one, arrived=True)

    def _start_scatter(self, one: Slice, half: Half) -> None:
        """Send everybody the part of a slice that they add up."""
        parts = self._parts(one)
        room = torch.empty(room_for(self._line, parts), dtype=parts[0].dtype)
        scatter = Scatter(self._line, parts, room, 2 * one.number)
        scatter.send()
        self._adding.put((one, half, scatter))

    def _start_gather(self, one: Slice) -> None:
        gather = Gather(self._line, self._parts(one), 2 * one.number + 1)
        gather.send()
        self._ending.put((one, gather))

    def _parts(self, one: Slice) -> list[torch.Tensor]:
        """By rank, what that rank adds up."""
        flat = one.tensor()
        return cut(flat, shares(flat.numel(), len(self._line.members)))


class Leader:
    """Rank 0 sends its most urgent slice and tells the others which it is.

    The message travels while the slices before are still on their way.
    """

    def __init__(self) -> None:
        # What is being sent must not be freed: kept until the end of the next round.
        self._said: list[object] = []

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        ranks, tag = channel.ranks, control_tag(channel.slices)
        others = range(1, ranks.size)
        told = torch.zeros(1, dtype=torch.int32)
        works: list[object] = []
        for _ in channel.slices:
            if ranks.rank == 0:
                one = channel.most_urgent()
                pick = torch.tensor([one.number], dtype=torch.int32)
                works += [
                    (pick, dist.isend(pick, group_dst=peer, group=ranks.group, tag=tag))
                    for peer in others
                ]
            else:
                dist.recv(told, group_src=0, group=ranks.group, tag=tag)
                one = channel.slices[int(told)]
                channel.until_ready(one)
            yield one, Half.BOTH
        self._said = works


class Static:
    """One order for all rounds, found by simulating one."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        for number in self.order:
            one = channel.slices[number]
            channel.until_ready(one)
            channel.until_room()
            yield one, Half.BOTH


class Decoupled:
    """All first halves as gradients become ready, then all second halves as they are needed.

    Source: decoupled all-reduce as in Zhang et al., DeAR, ICDCS 2023, 2302.12445.
    """

    def __init__(self, released: Sequence[int]) -> None:
        self.released = list(released)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        for number in self.released:
            one = channel.slices[number]
            channel.until_ready(one)
            channel.until_room()
            yield one, Half.SCATTER
        for one in channel.slices:
            channel.until_scattered(one)
            channel.until_room()
            yield one, Half.GATHER


def control_tag(slices: Sequence[Any]) -> int:
    """A tag that no slice has."""
    return 2 * len(slices)
