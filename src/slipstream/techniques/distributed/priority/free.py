"""Slices without an agreed order: each has a rank that adds it up, and travels when it likes.

The pattern of a parameter server, with every rank a server of its share: whoever has a slice ready
pushes it to the slice's rank, which adds up what has come from all and sends everybody the sum. A
rank sends what is most urgent to itself; a line before each message says what comes, and receivers
say what they have, because what a send has handed to the system may still lie in its queues.
Source: Jayarajan et al., SysML 2019, 1905.03960.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from slipstream.ranks.group import ProcessGroup
from slipstream.techniques.distributed.priority.channel import Channel, control_tag
from slipstream.techniques.distributed.priority.layout import Slice, Unit

_AHEAD = 16


class _Line(IntEnum):
    """What a line of two numbers announces."""

    DATA = 0
    RECEIVED = 1


class Free(Channel):
    """See the module's text. Receives into as many bytes again as the gradients take."""

    def __init__(self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int) -> None:
        super().__init__(ranks, units, credit_bytes)
        self._peers = [rank for rank in range(ranks.size) if rank != ranks.rank]
        owned = [self._owner(one) for one in self.slices]
        mine = owned.count(ranks.rank)
        # Lines that a peer sends in a round: of data to me, and of what it has had from me.
        self._lines = {peer: 2 * (mine + owned.count(peer)) for peer in self._peers}
        self._posted = 0
        self._missing: dict[int, int] = {}
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._coming: dict[tuple[int, int], Any] = {}
        self._kept: list[Any] = []
        self._before: list[Any] = []
        loops = [functools.partial(self._receive_all, peer) for peer in self._peers]
        self.run(self._send_all, *loops)

    def hand_over(self, unit: Unit) -> None:
        with self.changed:
            for one in unit.slices:
                self._ready.add(one.number)
                if self._owner(one) != self.ranks.rank:
                    heapq.heappush(self._waiting, (unit.number, one.number))
                else:
                    self._count(one)
            self.changed.notify_all()

    def begin(self) -> None:
        with self.changed:
            mine = (one for one in self.slices if self._owner(one) == self.ranks.rank)
            self._missing = {one.number: self.ranks.size for one in mine}
            super().begin()

    def close(self) -> None:
        """See `Channel.close`. A peer may not have had the last lines yet."""
        super().close()
        with contextlib.suppress(RuntimeError):
            for _, work in (*self._before, *self._kept):
                work.wait()

    def _owner(self, one: Slice) -> int:
        return one.number % self.ranks.size

    def _count(self, one: Slice) -> None:
        """One more rank's numbers of a slice of mine are here; when all are, it may be sent."""
        self._missing[one.number] -= 1
        if not self._missing[one.number]:
            heapq.heappush(self._waiting, (one.unit.number, one.number))

    def _send_all(self) -> None:
        done = 0
        while self.round_begun(done):
            done += 1
            self._post()
            with self.changed:
                self._posted = done
                self.changed.notify_all()
            for _ in self.slices:
                one = self.most_urgent()
                owner = self._owner(one)
                if owner == self.ranks.rank:
                    self._add(one)
                    for peer in self._peers:
                        self._send(one, peer)
                    with self.changed:
                        one.unit.left -= 1
                        self.changed.notify_all()
                else:
                    self._send(one, owner)

    def _post(self) -> None:
        """Say to the system where to put what will come in this round."""
        self._before, self._kept = self._kept, []
        group, rank = self.ranks.group, self.ranks.rank
        for one in self.slices:
            owner = self._owner(one)
            for peer in self._peers if owner == rank else (owner,):
                into = one.tensor()
                if owner == rank:
                    into = self._rows.setdefault((one.number, peer), torch.empty_like(into))
                work = dist.irecv(into, group_src=peer, group=group, tag=2 * one.number)
                self._coming[one.number, peer] = work

    def _add(self, one: Slice) -> None:
        mine, rank = one.tensor(), self.ranks.rank
        rows = [
            mine if peer == rank else self._rows[one.number, peer]
            for peer in range(self.ranks.size)
        ]
        torch.add(functools.reduce(torch.add, rows[:-1]), rows[-1], out=mine)

    def _send(self, one: Slice, peer: int) -> None:
        self.departs(one)
        self._say(_Line.DATA, one, peer)
        self._put(one.tensor(), peer, 2 * one.number)

    def _say(self, line: _Line, one: Slice, peer: int) -> None:
        message = torch.tensor([line, one.number], dtype=torch.int32)
        self._put(message, peer, control_tag(self.slices))

    def _put(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        work = dist.isend(tensor, group_dst=peer, group=self.ranks.group, tag=tag)
        # What is being sent must not be freed: kept until the round after the next begins.
        self._kept.append((tensor, work))

    def _receive_all(self, peer: int) -> None:
        done = 0
        while self.round_begun(done):
            done += 1
            for line, number in self._lines_of(peer):
                one = self.slices[number]
                if line == _Line.RECEIVED:
                    self.lands(one, arrived=False)
                else:
                    self._take(one, peer, done)

    def _lines_of(self, peer: int) -> Iterator[list[int]]:
        """All lines of a round. Several are asked for ahead, or each would cost a round trip."""
        group, tag = self.ranks.group, control_tag(self.slices)
        asked: deque[tuple[torch.Tensor, Any]] = deque()
        for number in range(self._lines[peer] + _AHEAD):
            if number < self._lines[peer]:
                told = torch.zeros(2, dtype=torch.int32)
                asked.append((told, dist.irecv(told, group_src=peer, group=group, tag=tag)))
            if number >= _AHEAD and asked:
                told, work = asked.popleft()
                work.wait()
                yield told.tolist()

    def _take(self, one: Slice, peer: int, done: int) -> None:
        with self.changed:
            self._until(lambda: self._posted >= done)
        self._coming.pop((one.number, peer)).wait()
        # Said before anything of a next round can be.
        self._say(_Line.RECEIVED, one, peer)
        with self.changed:
            if self._owner(one) == self.ranks.rank:
                self._count(one)
            else:
                one.unit.left -= 1
            self.changed.notify_all()
