"""Reduce-scatter and all-gather along a line of ranks, by point-to-point messages.

Each of the three algorithms sends (n - 1) / n of the bytes per rank; gloo's reduce-scatter is an
all-reduce, which sends twice as much:

- ``direct``: every rank sends every other its piece. One latency; sums in the order of the ranks,
  16-bit numbers in 32 bits and rounded once.
- ``halving``, for powers of two: log2 n exchanges of halves that shrink, or grow for a gather.
- ``ring``, for any n: n - 1 messages to the neighbour, which uses only these links.

For many bytes each cable should carry one connection at a time: several senders to one receiver
search for their rates by trial and leave the cable idle in between.

Source: Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.wire import Wire, wait

ALGORITHMS = ("auto", "direct", "halving", "ring")
# Above, messages between all pairs of ranks would be too many.
_MAX_DIRECT_RANKS = 16
# Bytes of a piece up to which latency matters more than competing connections. Speed of a ring
# relative to direct for four ranks: at 60 Mbit/s 0.6 for 8 KiB, 1.0 for 16 KiB, 1.4 for 64 KiB; at
# 1 Gbit/s 0.7 for 16 KiB and 1.0 for 64 KiB.
_MAX_DIRECT_BYTES = 32 << 10

Pieces = Sequence[torch.Tensor]
"""A contiguous one-dimensional tensor per place of a line, all of one dtype."""


@dataclass(frozen=True)
class Line:
    """Ranks that exchange pieces, in the order of the pieces, including the wire's own rank."""

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
        """Places of the other ranks, starting with the next one to spread the load."""
        n = len(self.members)
        return [(self.place + k) % n for k in range(1, n)]

    def algorithm(self, requested: str, pieces: Pieces, *, sums: bool) -> str:
        """Resolve ``auto`` for the pieces; equal on all ranks, since all know all lengths."""
        if requested != "auto":
            return requested
        nbytes = sum(piece.numel() for piece in pieces) * pieces[0].element_size()
        return best_algorithm(
            len(self.members), nbytes, half_precision=sums and pieces[0].element_size() < 4
        )


def need_algorithm(
    algorithm: str, ranks: int, algorithms: Sequence[str], halves: str, others: str
) -> None:
    """Check the name of an algorithm and its number of ranks.

    Args:
        algorithms: valid names.
        halves: the one that requires a power of two of ranks.
        others: what to use instead of that.

    Raises:
        InvalidArgumentError: the name is unknown, or does not support this number of ranks.
    """
    if algorithm not in algorithms:
        raise InvalidArgumentError(
            "algorithm", f"'{algorithm}' is not an algorithm", remedy=" or ".join(algorithms)
        )
    if algorithm == halves and ranks & (ranks - 1):
        raise InvalidArgumentError(
            "algorithm", f"{halves} requires a power of two of ranks, not {ranks}", remedy=others
        )


def shares(numel: int, ranks: int) -> list[int]:
    """Return the start of each rank's share and the end of the last: [ranks + 1].

    Shares differ by at most one number; some are empty if there are fewer numbers than ranks.

    Raises:
        InvalidArgumentError: `numel` is negative, or `ranks` is not positive.
    """
    if numel < 0 or ranks < 1:
        raise InvalidArgumentError("numel", f"{numel} numbers cannot be shared among {ranks}")
    return [rank * numel // ranks for rank in range(ranks + 1)]


def cut(flat: torch.Tensor, starts: list[int]) -> list[torch.Tensor]:
    """Return views of a flat tensor from each start to the next."""
    return [flat[a:b] for a, b in itertools.pairwise(starts)]


def best_algorithm(ranks: int, nbytes: float, *, half_precision: bool = False) -> str:
    """Return the algorithm for ``auto``.

    Args:
        nbytes: total bytes of all pieces.
        half_precision: whether sums are rounded to 16 bits, which direct does only once.
    """
    small = nbytes <= ranks * _MAX_DIRECT_BYTES
    if ranks <= 2 or (ranks <= _MAX_DIRECT_RANKS and (small or half_precision)):
        return "direct"
    return "halving" if small and not ranks & (ranks - 1) else "ring"


class Scatter:
    """A direct reduce-scatter in progress, which receives the others' parts of our piece."""

    def __init__(self, line: Line, pieces: Pieces, room: torch.Tensor, tag: int = 0) -> None:
        """Start to receive into `room`, of the pieces' dtype and the size of `room_for`."""
        self._line, self._pieces, self._tag = line, pieces, tag
        local = pieces[line.place]
        table = room.view(len(line.peers), local.numel())
        self._rows = dict(zip(line.peers, table, strict=True))
        members = line.members
        self._works = line.wire.post({}, {members[p]: row for p, row in self._rows.items()}, tag)
        self._sent: dict[int, Any] = {}

    def send(self) -> None:
        line = self._line
        sent = {line.members[p]: self._pieces[p] for p in line.peers}
        self._sent = line.wire.post(sent, {}, self._tag)

    def rows(self) -> list[torch.Tensor]:
        """Wait for all parts of our piece; return them in the order of the line."""
        wait(list(self._works.values()))
        local = self._pieces[self._line.place]
        return [self._rows.get(p, local) for p in range(len(self._pieces))]

    def sum(self, out: torch.Tensor, divisor: int = 1) -> None:
        """Wait for all parts; store their sum over `divisor` in `out`, which may be our piece."""
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
                # Reuse a received part that was read; never overwrite another piece.
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
        """Wait until our pieces are sent."""
        wait(list(self._sent.values()))


class Gather:
    """A direct all-gather in progress, which receives the others' pieces in place."""

    def __init__(self, line: Line, pieces: Pieces, tag: int = 0) -> None:
        self._line, self._pieces, self._tag = line, pieces, tag
        received = {line.members[p]: pieces[p] for p in line.peers}
        self._works = list(line.wire.post({}, received, tag).values())

    def send(self) -> None:
        line = self._line
        local = self._pieces[line.place]
        sent = dict.fromkeys([line.members[p] for p in line.peers], local)
        self._works += line.wire.post(sent, {}, self._tag).values()

    def end(self) -> None:
        """Wait until all pieces are received and ours is sent."""
        wait(self._works)


def room_for(line: Line, pieces: Pieces) -> int:
    """Return the number of elements that `Scatter` receives."""
    return (len(line.members) - 1) * pieces[line.place].numel()


def scatter(line: Line, pieces: Pieces, out: torch.Tensor, algorithm: str, divisor: int) -> None:
    """Store the sum over ranks of the piece for our place, over `divisor`, in `out`.

    Args:
        out: shaped like our piece; may be our piece.
        algorithm: one of `ALGORITHMS`; ``halving`` requires a power of two of ranks.
    """
    resolved = line.algorithm(algorithm, pieces, sums=True)
    if len(line.members) == 1 or resolved == "direct":
        dtype = pieces[line.place].dtype
        direct = Scatter(line, pieces, line.wire.buffer(room_for(line, pieces), dtype))
        direct.send()
        direct.sum(out, divisor)
        direct.end()
        return
    (_scatter_ring if resolved == "ring" else _scatter_halves)(line, pieces, out)
    if divisor != 1:
        out.div_(divisor)


def gather(line: Line, pieces: Pieces, algorithm: str) -> None:
    """Send our piece to all ranks, and receive the others' in place."""
    resolved = line.algorithm(algorithm, pieces, sums=False)
    if resolved == "direct":
        direct = Gather(line, pieces)
        direct.send()
        direct.end()
    elif resolved == "ring":
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
    max_numel = max(piece.numel() for piece in pieces)
    buffers = line.wire.buffer(2 * max_numel, out.dtype).view(2, max_numel)
    sent = pieces[(place - 1) % n]
    for step in range(n - 1):
        local = pieces[(place - step - 2) % n]
        received = buffers[step % 2, : local.numel()]
        line.wire.swap({after: sent}, {before: received})
        sent = torch.add(received, local, out=out if step == n - 2 else received)


def _halves(line: Line) -> list[tuple[int, list[int], list[int]]]:
    """Return per level the partner, the places that remain here, and the partner's places.

    Neighbours exchange the largest halves, since they are on the same host or rack.
    """
    places, place = list(range(len(line.members))), line.place
    halves = []
    bit = 1
    while len(places) > 1:
        local = [p for p in places if p & bit == place & bit]
        remote = [p for p in places if p & bit != place & bit]
        halves.append((line.members[place ^ bit], local, remote))
        places, bit = local, 2 * bit
    return halves


def _scatter_halves(line: Line, pieces: Pieces, out: torch.Tensor) -> None:
    current = dict(enumerate(pieces))
    levels = _halves(line)
    rows = len(pieces), max(piece.numel() for piece in pieces)
    # One buffer suffices, since each level receives as much as all later ones together.
    room = iter(line.wire.buffer(math.prod(rows), out.dtype).view(rows))
    for partner, local, remote in levels:
        received = {p: next(room)[: pieces[p].numel()] for p in local}
        _swap_many(line, partner, [current[p] for p in remote], list(received.values()))
        for p, row in received.items():
            into = out if len(local) == 1 else row
            current[p] = torch.add(current[p], row, out=into)


def _gather_halves(line: Line, pieces: Pieces) -> None:
    for partner, local, remote in reversed(_halves(line)):
        _swap_many(line, partner, [pieces[p] for p in local], [pieces[p] for p in remote])


def _swap_many(line: Line, partner: int, sent: Pieces, received: Pieces) -> None:
    works: list[Any] = []
    for row in received:
        works += line.wire.post({}, {partner: row}).values()
    for row in sent:
        works += line.wire.post({partner: row}, {}).values()
    wait(works)
