"""Exchange of slices without an agreed order: each slice has a rank that sums it.

As with a parameter server, of which every rank serves a share: a rank pushes each ready slice to
the slice's owner, which sums the contributions of all ranks and sends them the result. A rank sends
its most urgent slice first. An announcement precedes each message, and receivers acknowledge it,
because a completed send may still be in the system's queues.

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


class _Notice(IntEnum):
    """Kind of an announcement, which consists of a kind and a slice number."""

    DATA = 0
    RECEIVED = 1


class Free(Channel):
    """Channel without an agreed order; its receive buffers double the gradients' memory."""

    def __init__(self, ranks: ProcessGroup, units: Sequence[Unit], credit_bytes: int) -> None:
        super().__init__(ranks, units, credit_bytes)
        self._peers = [rank for rank in range(ranks.size) if rank != ranks.rank]
        owned = [self._owner(slice_) for slice_ in self.slices]
        own_count = owned.count(ranks.rank)
        # Notices from a peer in a round: of data it sends, and of data it has received.
        self._notices = {peer: 2 * (own_count + owned.count(peer)) for peer in self._peers}
        self._posted = 0
        self._missing: dict[int, int] = {}
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._receives: dict[tuple[int, int], Any] = {}
        self._sends: list[Any] = []
        self._earlier_sends: list[Any] = []
        loops = [functools.partial(self._receive_all, peer) for peer in self._peers]
        self.run(self._send_all, *loops)

    def hand_over(self, unit: Unit) -> None:
        with self.changed:
            for slice_ in unit.slices:
                self._ready.add(slice_.number)
                if self._owner(slice_) != self.ranks.rank:
                    heapq.heappush(self._waiting, (unit.number, slice_.number))
                else:
                    self._count(slice_)
            self.changed.notify_all()

    def begin(self) -> None:
        with self.changed:
            own = (slice_ for slice_ in self.slices if self._owner(slice_) == self.ranks.rank)
            self._missing = {slice_.number: self.ranks.size for slice_ in own}
            super().begin()

    def close(self) -> None:
        """Close, after peers have received the last notices; see `Channel.close`."""
        super().close()
        with contextlib.suppress(RuntimeError):
            for _, work in (*self._earlier_sends, *self._sends):
                work.wait()

    def _owner(self, slice_: Slice) -> int:
        return slice_.number % self.ranks.size

    def _count(self, slice_: Slice) -> None:
        """Count a contribution to an own slice; when all have arrived, queue it for sending."""
        self._missing[slice_.number] -= 1
        if not self._missing[slice_.number]:
            heapq.heappush(self._waiting, (slice_.unit.number, slice_.number))

    def _send_all(self) -> None:
        rounds = 0
        while self.round_begun(rounds):
            rounds += 1
            self._post()
            with self.changed:
                self._posted = rounds
                self.changed.notify_all()
            for _ in self.slices:
                slice_ = self.most_urgent()
                owner = self._owner(slice_)
                if owner == self.ranks.rank:
                    self._add(slice_)
                    for peer in self._peers:
                        self._send(slice_, peer)
                    with self.changed:
                        slice_.unit.missing -= 1
                        self.changed.notify_all()
                else:
                    self._send(slice_, owner)

    def _post(self) -> None:
        """Post the receives of this round."""
        self._earlier_sends, self._sends = self._sends, []
        group, rank = self.ranks.group, self.ranks.rank
        for slice_ in self.slices:
            owner = self._owner(slice_)
            for peer in self._peers if owner == rank else (owner,):
                target = slice_.tensor()
                if owner == rank:
                    target = self._rows.setdefault((slice_.number, peer), torch.empty_like(target))
                work = dist.irecv(target, group_src=peer, group=group, tag=2 * slice_.number)
                self._receives[slice_.number, peer] = work

    def _add(self, slice_: Slice) -> None:
        own, rank = slice_.tensor(), self.ranks.rank
        rows = [
            own if peer == rank else self._rows[slice_.number, peer]
            for peer in range(self.ranks.size)
        ]
        torch.add(functools.reduce(torch.add, rows[:-1]), rows[-1], out=own)

    def _send(self, slice_: Slice, peer: int) -> None:
        self.departs(slice_)
        self._notify(_Notice.DATA, slice_, peer)
        self._put(slice_.tensor(), peer, 2 * slice_.number)

    def _notify(self, kind: _Notice, slice_: Slice, peer: int) -> None:
        message = torch.tensor([kind, slice_.number], dtype=torch.int32)
        self._put(message, peer, control_tag(self.slices))

    def _put(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        work = dist.isend(tensor, group_dst=peer, group=self.ranks.group, tag=tag)
        # Tensors being sent must not be freed until the round after the next begins.
        self._sends.append((tensor, work))

    def _receive_all(self, peer: int) -> None:
        rounds = 0
        while self.round_begun(rounds):
            rounds += 1
            for kind, number in self._notices_of(peer):
                slice_ = self.slices[number]
                if kind == _Notice.RECEIVED:
                    self.lands(slice_, arrived=False)
                else:
                    self._take(slice_, peer, rounds)

    def _notices_of(self, peer: int) -> Iterator[list[int]]:
        """Yield all notices of a round; receives are posted ahead, to save round trips."""
        group, tag = self.ranks.group, control_tag(self.slices)
        posted: deque[tuple[torch.Tensor, Any]] = deque()
        for number in range(self._notices[peer] + _AHEAD):
            if number < self._notices[peer]:
                message = torch.zeros(2, dtype=torch.int32)
                posted.append((message, dist.irecv(message, group_src=peer, group=group, tag=tag)))
            if number >= _AHEAD and posted:
                message, work = posted.popleft()
                work.wait()
                yield message.tolist()

    def _take(self, slice_: Slice, peer: int, rounds: int) -> None:
        with self.changed:
            self._until(lambda: self._posted >= rounds)
        self._receives.pop((slice_.number, peer)).wait()
        # Sent before any notice of a next round.
        self._notify(_Notice.RECEIVED, slice_, peer)
        with self.changed:
            if self._owner(slice_) == self.ranks.rank:
                self._count(slice_)
            else:
                slice_.unit.missing -= 1
            self.changed.notify_all()
