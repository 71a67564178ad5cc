"""Reduce-scatter and all-gather along a line of ranks, in messages from one to another.

Three algorithms, each with (n - 1) / n of the bytes on the wire a rank, where the reduce-scatter of
gloo is an all-reduce with twice as much:

- ``direct``: everybody sends everybody its piece; one latency, sums in the order of the ranks, and
  16 bits are added up in 32 before they are rounded once.
- ``halving``, powers of two: log2 n exchanges of ever smaller halves; back, of ever larger ones.
- ``ring``, any n: n - 1 messages to the neighbour, which is all that is loaded.

Where many bytes are sent, what counts is that each cable carries one connection at a time: those of
three senders that meet before one receiver find their rates by trial, and leave it idle between.

Source: Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.wire import Wire, wait

ALGORITHMS = ("auto", "direct", "halving", "ring")
# Of more ranks, messages from everybody to everybody would be many.
_MOST_DIRECT = 16
# Bytes of a piece up to which latencies count more than what connections lose to each other. Four
# ranks at 60 Mbit/s: pieces of 8 KiB 0.6 times as fast around a ring, 16 KiB as fast, 64 KiB 1.4
# times; at 1 Gbit/s 16 KiB 0.7 times, 64 KiB as fast.
_MOST_DIRECT_BYTES = 32 << 10

Pieces = Sequence[torch.Tensor]
"""What belongs to each place of a line: contiguous, one-dimensional, of one dtype."""


@dataclass(frozen=True)
class Line:
    """Ranks that exchange pieces, in the order of the pieces; the wire's own rank is one."""

    wire: Wire
    members: tuple[int, ...]

    @classmethod
    def of(cls, wire: Wire) -> Line:
        return cls(wire, tuple(range(wire.size)))

    @property
    def place(self) -> int:
        return self.members.index(self.wire.rank)

    @property
    def peers(self) -> list[int]:
        """Places of the others, from the next one on, so that not all send to the same."""
        n = len(self.members)
        return [(self.place + k) % n for k in range(1, n)]

    def algorithm(self, asked: str, pieces: Pieces, *, sums: bool) -> str:
        """What ``auto`` is for such pieces; the same on all ranks, which all know all lengths."""
        if asked != "auto":
            return asked
        nbytes = sum(piece.numel() for piece in pieces) * pieces[0].element_size()
        return way(len(self.members), nbytes, whole=sums and pieces[0].element_size() < 4)


def need_algorithm(
    algorithm: str, ranks: int, known: Sequence[str], halves: str, others: str
) -> None:
    """See that there is an algorithm for so many ranks.

    Args:
        known: the algorithms there are.
        halves: which of them takes a power of two of ranks.
        others: what to take instead of that.

    Raises:
        InvalidArgumentError: there is none of that name, or not for so many ranks.
    """
    if algorithm not in known:
        raise InvalidArgumentError("algorithm", f"'{algorithm}' is none", remedy=" or ".join(known))
    if algorithm == halves and ranks & (ranks - 1):
        raise InvalidArgumentError(
            "algorithm", f"{halves} takes a power of two of ranks, not {ranks}", remedy=others
        )


def shares(numel: int, ranks: int) -> list[int]:
    """Where the share of each rank begins, and where the last ends: [ranks + 1].

    Shares differ by one number at most; of fewer numbers than ranks some are empty.

    Raises:
        InvalidArgumentError: less than no number, or no rank.
    """
    if numel < 0 or ranks < 1:
        raise InvalidArgumentError("numel", f"{numel} numbers cannot be shared among {ranks}")
    return [rank * numel // ranks for rank in range(ranks + 1)]


def cut(flat: torch.Tensor, starts: list[int]) -> list[torch.Tensor]:
    """Views of a flat tensor from each start to the next."""
    return [flat[a:b] for a, b in itertools.pairwise(starts)]


def way(ranks: int, nbytes: float, *, whole: bool = False) -> str:
    """Which algorithm ``auto`` is.

    Args:
        nbytes: of all pieces together.
        whole: whether what is added up is rounded to 16 bits, once if all terms are there.
    """
    small = nbytes <= ranks * _MOST_DIRECT_BYTES
    if ranks <= 2 or (ranks <= _MOST_DIRECT and (small or whole)):
        return "direct"
    return "halving" if small and not ranks & (ranks - 1) else "ring"


class Scatter:
    """A direct reduce-scatter under way: made, it expects the others' parts of our piece."""

    def __init__(self, line: Line, pieces: Pieces, room: torch.Tensor, tag: int = 0) -> None:
        """`room`: memory of the pieces' dtype for (n - 1) pieces like ours; see `room_for`."""
        self._line, self._pieces, self._tag = line, pieces, tag
        mine = pieces[line.place]
        table = room.view(len(line.peers), mine.numel())
        self._rows = dict(zip(line.peers, table, strict=True))
        members = line.members
        self._works = line.wire.post({}, {members[p]: row for p, row in self._rows.items()}, tag)
        self._sent: dict[int, Any] = {}

    def send(self) -> None:
        line = self._line
        sent = {line.members[p]: self._pieces[p] for p in line.peers}
        self._sent = line.wire.post(sent, {}, self._tag)

    def rows(self) -> list[torch.Tensor]:
        """Wait for all parts: everybody's of our piece, in the order of the line."""
        wait(list(self._works.values()))
        mine = self._pieces[self._line.place]
        return [self._rows.get(p, mine) for p in range(len(self._pieces))]

    def sum(self, out: torch.Tensor, divisor: int = 1) -> None:
        """Wait for all parts; put their sum, divided, in `out`, which may be our own piece."""
        members, place = self._line.members, self._line.place
        wide = out.dtype.itemsize < 4
        total: torch.Tensor | None = None
        last = len(members) - 1
        for p, member in enumerate(members):
            if p != place and member in self._works:
                self._works[member].wait()
            term = self._pieces[place] if p == place else self._rows[p]
            if total is None:
                total = term.float() if wide else term
            elif wide:
                total.add_(term)
            else:
                # Into memory of ours that has been read; never into a piece that is not ours.
                into = out if p == last else self._rows[0 if place else 1]
                total = torch.add(total, term, out=into)
        assert total is not None
        if wide and divisor != 1:
            total.div_(divisor)
        if total is not out:
            out.copy_(total)
        if not wide and divisor != 1:
            out.div_(divisor)

    def end(self) -> None:
        """Wait until our pieces have gone."""
        wait(list(self._sent.values()))


class Gather:
    """A direct all-gather under way: made, it expects the others' pieces in their places."""

    def __init__(self, line: Line, pieces: Pieces, tag: int = 0) -> None:
        self._line, self._pieces, self._tag = line, pieces, tag
        received = {line.members[p]: pieces[p] for p in line.peers}
        self._works = list(line.wire.post({}, received, tag).values())

    def send(self) -> None:
        line = self._line
        mine = self._pieces[line.place]
        sent = dict.fromkeys([line.members[p] for p in line.peers], mine)
        self._works += line.wire.post(sent, {}, self._tag).values()

    def end(self) -> None:
        """Wait until all pieces have come, and ours has gone."""
        wait(self._works)


def room_for(line: Line, pieces: Pieces) -> int:
    """How many numbers `Scatter` receives."""
    return (len(line.members) - 1) * pieces[line.place].numel()


def scatter(line: Line, pieces: Pieces, out: torch.Tensor, algorithm: str, divisor: int) -> None:
    """Put the sum of everybody's `pieces` for our place, divided, in `out`; the rest stays.

    Args:
        out: like our piece, which it may be.
        algorithm: of `ALGORITHMS`; ``halving`` for powers of two.
    """
    chosen = line.algorithm(algorithm, pieces, sums=True)
    if len(line.members) == 1 or chosen == "direct":
        like = pieces[line.place]
        under_way = Scatter(line, pieces, line.wire.buffer(room_for(line, pieces), like.dtype))
        under_way.send()
        under_way.sum(out, divisor)
        under_way.end()
        return
    (_scatter_ring if chosen == "ring" else _scatter_halves)(line, pieces, out)
    if divisor != 1:
        out.div_(divisor)


def gather(line: Line, pieces: Pieces, algorithm: str) -> None:
    """Send our piece to everybody, and receive the others' in their places."""
    chosen = line.algorithm(algorithm, pieces, sums=False)
    if chosen == "direct":
        under_way = Gather(line, pieces)
        under_way.send()
        under_way.end()
    elif chosen == "ring":
        n, place, members = len(line.members), line.place, line.members
        after, before = members[(place + 1) % n], members[place - 1]
        for step in range(n - 1):
            sent, received = pieces[(place - step) % n], pieces[(place - step - 1) % n]
            line.wire.swap({after: sent}, {before: received})
    else:
        _gather_halves(line, pieces)


def _scatter_ring(line: Line, pieces: Pieces, out: torch.Tensor) -> None:
    n, place, members = len(line.members), line.place, line.members
    after, before = members[(place + 1) % n], members[place - 1]
    longest = max(piece.numel() for piece in pieces)
    two = line.wire.buffer(2 * longest, out.dtype).view(2, longest)
    sent = pieces[(place - 1) % n]
    for step in range(n - 1):
        ours = pieces[(place - step - 2) % n]
        received = two[step % 2, : ours.numel()]
        line.wire.swap({after: sent}, {before: received})
        sent = torch.add(received, ours, out=out if step == n - 2 else received)


def _halves(line: Line) -> list[tuple[int, list[int], list[int]]]:
    """By level: the partner, the places that stay here, and those that are its.

    Neighbours first, with the largest halves: these are the ranks of one host or rack.
    """
    places, place = list(range(len(line.members))), line.place
    halves = []
    bit = 1
    while len(places) > 1:
        kept = [p for p in places if p & bit == place & bit]
        given = [p for p in places if p & bit != place & bit]
        halves.append((line.members[place ^ bit], kept, given))
        places, bit = kept, 2 * bit
    return halves


def _scatter_halves(line: Line, pieces: Pieces, out: torch.Tensor) -> None:
    current = dict(enumerate(pieces))
    levels = _halves(line)
    longest = max(piece.numel() for piece in pieces)
    # One room for all levels: each receives as much as all later ones together.
    room = iter(line.wire.buffer(len(pieces) * longest, out.dtype).view(len(pieces), longest))
    for partner, kept, given in levels:
        received = {p: next(room)[: pieces[p].numel()] for p in kept}
        _swap_many(line, partner, [current[p] for p in given], list(received.values()))
        for p, row in received.items():
            into = out if len(kept) == 1 else row
            current[p] = torch.add(current[p], row, out=into)


def _gather_halves(line: Line, pieces: Pieces) -> None:
    for partner, kept, given in reversed(_halves(line)):
        _swap_many(line, partner, [pieces[p] for p in kept], [pieces[p] for p in given])


def _swap_many(line: Line, partner: int, sent: Pieces, received: Pieces) -> None:
    works: list[Any] = []
    for row in received:
        works += line.wire.post({}, {partner: row}).values()
    for row in sent:
        works += line.wire.post({partner: row}, {}).values()
    wait(works)
