"""The channel: state of slices (waiting, in transit, arrived), and threads that exchange them.

In a round, which is a backward pass, every rank sends every slice once. An `Order` determines the
next slice, the same on all ranks. A slice is scattered and gathered directly (see
`slipstream.ranks.lines`): each element is summed on one rank, in the order of ranks. Three threads
start, sum and end exchanges, so that the gather of a slice overlaps the scatter of the next.
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
    """Halves of an exchange."""

    SCATTER = auto()
    GATHER = auto()
    BOTH = SCATTER | GATHER


class Order(Protocol):
    """Order in which slices are sent, on which all ranks must agree."""

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        """Yield all slices of a round, each once it is ready on this rank and the credit allows."""


class Channel:
    """Base of channels: the training thread hands units over and waits for them.

    Args:
        ranks: the processes that exchange.
        units: the units to exchange, already cut into slices.
        credit_bytes: maximum bytes in transit; at least one slice may always be sent.
    """

    def __init__(self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int) -> None:
        self.ranks, self.units = ranks, units
        self.slices = [slice_ for unit in units for slice_ in unit.slices]
        self.credit_bytes = credit_bytes
        self.changed = threading.Condition()
        self.closed = False
        self._error: CommunicationError | None = None
        self._failing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting: list[tuple[int, int]] = []
        self._ready: set[int] = set()
        self._rounds = 0
        self._in_transit = 0

    # Called by the training thread.

    def begin(self) -> None:
        """Begin a round, after the preceding one has arrived."""
        with self.changed:
            self.check()
            self._ready.clear()
            self._waiting.clear()
            self._rounds += 1
            for unit in self.units:
                unit.missing = len(unit.slices)
                unit.handed = [False] * len(unit.parameters)
            self.changed.notify_all()

    def hand_over(self, unit: Unit) -> None:
        """Hand over the unit's filled buffer, which the channel owns until it arrives."""
        with self.changed:
            for slice_ in unit.slices:
                self._ready.add(slice_.number)
                heapq.heappush(self._waiting, (unit.number, slice_.number))
            self.changed.notify_all()

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Wait until all slices of the units have arrived.

        Raises:
            CommunicationError: the exchange has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._error or not any(unit.missing for unit in units))
            self.check()

    def wait_for_some(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units that have arrived, after waiting for at least one.

        Raises:
            CommunicationError: the exchange has failed.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._error or any(not unit.missing for unit in units) or not units
            )
            self.check()
            return [unit for unit in units if not unit.missing]

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Complete a round that has begun, because other ranks need it, and close."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self._error
                    or not (self._in_transit or any(u.missing for u in self.units))
                    # Otherwise the round needs further gradients of this rank.
                    or len(self._ready) < len(self.slices)
                )
            )
        self.close()

    def close(self) -> None:
        """End the threads; they wait for slices in transit up to the group's time-out."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # Called by the channel's threads.

    def run(self, *loops: Callable[[], None]) -> None:
        """Run each loop in a thread; its errors are raised by `wait_for`."""
        for loop in loops:
            thread = threading.Thread(
                target=self._guarded, args=(loop,), daemon=True, name="slipstream-priority"
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def round_begun(self, done: int) -> bool:
        """Wait until more than `done` rounds have begun; return False if the channel closes."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._error or self._rounds > done)
            return not (self.closed or self._error) and self._rounds > done

    def most_urgent(self) -> Slice:
        """Wait for a ready slice and for credit; take the most urgent slice."""
        with self.changed:
            self._until(lambda: bool(self._waiting) and self._has_credit())
            return self.slices[heapq.heappop(self._waiting)[1]]

    def until_ready(self, slice_: Slice) -> None:
        with self.changed:
            self._until(lambda: slice_.number in self._ready)

    def until_credit(self) -> None:
        with self.changed:
            self._until(self._has_credit)

    def departs(self, slice_: Slice) -> None:
        """Count a slice as in transit."""
        with self.changed:
            self._in_transit += slice_.nbytes

    def lands(self, slice_: Slice, *, arrived: bool) -> None:
        """Count a slice as no longer in transit; `arrived`: whether its exchange is complete."""
        with self.changed:
            self._in_transit -= slice_.nbytes
            slice_.unit.missing -= arrived
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Record an error, and wake all waiting threads."""
        # Of several threads that fail together, the first asks other ranks for the cause.
        with self._failing:
            if self._error is None:
                cause = self.ranks.explain(error, _WHERE)
                with self.changed:
                    self._error = cause
                    self.changed.notify_all()

    def _has_credit(self) -> bool:
        return not self._in_transit or self._in_transit < self.credit_bytes

    def _until(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.closed or self._error or condition())
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


class Closed(Exception):  # noqa: N818 - not an error: it ends a thread
    """The channel closes, or has failed."""


class Agreed(Channel):
    """Channel that sends slices in an order on which all ranks agree."""

    def __init__(
        self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int, order: Order
    ) -> None:
        super().__init__(ranks, units, credit_bytes)
        self._order = order
        self._scattered: set[int] = set()
        self._line = Line.of(ranks.wire)
        self._sums: queue.SimpleQueue[tuple[Slice, Half, Scatter] | None] = queue.SimpleQueue()
        self._gathers: queue.SimpleQueue[tuple[Slice, Gather] | None] = queue.SimpleQueue()
        self.run(self._start_all, self._add_all, self._end_all)

    def until_scattered(self, slice_: Slice) -> None:
        """Wait until this rank's part of a slice is summed."""
        with self.changed:
            self._until(lambda: slice_.number in self._scattered)

    def _start_all(self) -> None:
        rounds = 0
        try:
            while self.round_begun(rounds):
                rounds += 1
                self._scattered.clear()
                for slice_, halves in self._order.picks(self):
                    self.departs(slice_)
                    if Half.SCATTER in halves:
                        self._start_scatter(slice_, halves)
                    else:
                        self._start_gather(slice_)
        finally:
            self._sums.put(None)

    def _add_all(self) -> None:
        try:
            while (item := self._sums.get()) is not None:
                slice_, halves, scatter = item
                scatter.sum(self._parts(slice_)[self._line.place])
                scatter.end()
                if Half.GATHER in halves:
                    self._start_gather(slice_)
                else:
                    with self.changed:
                        self._scattered.add(slice_.number)
                    self.lands(slice_, arrived=False)
        finally:
            self._gathers.put(None)

    def _end_all(self) -> None:
        while (item := self._gathers.get()) is not None:
            slice_, gather = item
            gather.end()
            self.lands(slice_, arrived=True)

    def _start_scatter(self, slice_: Slice, halves: Half) -> None:
        """Send each rank the part of a slice that it sums."""
        parts = self._parts(slice_)
        buffer = torch.empty(room_for(self._line, parts), dtype=parts[0].dtype)
        scatter = Scatter(self._line, parts, buffer, 2 * slice_.number)
        scatter.send()
        self._sums.put((slice_, halves, scatter))

    def _start_gather(self, slice_: Slice) -> None:
        gather = Gather(self._line, self._parts(slice_), 2 * slice_.number + 1)
        gather.send()
        self._gathers.put((slice_, gather))

    def _parts(self, slice_: Slice) -> list[torch.Tensor]:
        """Return the part of a slice that each rank sums."""
        flat = slice_.tensor()
        return cut(flat, shares(flat.numel(), len(self._line.members)))


class Leader:
    """Rank 0 picks its most urgent slice and announces it to the others.

    The announcement overlaps the exchange of preceding slices.
    """

    def __init__(self) -> None:
        # Tensors being sent must not be freed before the end of the next round.
        self._announced: list[object] = []

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        ranks, tag = channel.ranks, control_tag(channel.slices)
        others = range(1, ranks.size)
        number = torch.zeros(1, dtype=torch.int32)
        works: list[object] = []
        for _ in channel.slices:
            if ranks.rank == 0:
                slice_ = channel.most_urgent()
                message = torch.tensor([slice_.number], dtype=torch.int32)
                works += [
                    (message, dist.isend(message, group_dst=peer, group=ranks.group, tag=tag))
                    for peer in others
                ]
            else:
                dist.recv(number, group_src=0, group=ranks.group, tag=tag)
                slice_ = channel.slices[int(number)]
                channel.until_ready(slice_)
            yield slice_, Half.BOTH
        self._announced = works


class Static:
    """A fixed order for all rounds, found by simulation."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        for number in self.order:
            slice_ = channel.slices[number]
            channel.until_ready(slice_)
            channel.until_credit()
            yield slice_, Half.BOTH


class Decoupled:
    """All scatters as gradients become ready, then all gathers as they are needed.

    Source: decoupled all-reduce as in Zhang et al., DeAR, ICDCS 2023, 2302.12445.
    """

    def __init__(self, released: Sequence[int]) -> None:
        self.released = list(released)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        for number in self.released:
            slice_ = channel.slices[number]
            channel.until_ready(slice_)
            channel.until_credit()
            yield slice_, Half.SCATTER
        for slice_ in channel.slices:
            channel.until_scattered(slice_)
            channel.until_credit()
            yield slice_, Half.GATHER


def control_tag(slices: Sequence[Any]) -> int:
    """Return a message tag that no slice uses."""
    return 2 * len(slices)
