"""The mean of a slice over all ranks, in two halves that send each number once.

Scatter: everybody sends each rank its part of the slice, which that rank adds up, in the order of
ranks; gather: each sends its sum to everybody. In all 2 n (p - 1) / p numbers a rank, as any
all-reduce, and every sum is computed on one rank: all have the same bits, whatever the slices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from slipstream.techniques.distributed.collectives.scatter import cut, shares


@dataclass
class Halves:
    """One slice on its way.

    Attributes:
        flat: the slice, contiguous.
        tag: this and the next number are the slice's own.
    """

    flat: torch.Tensor
    tag: int
    rank: int
    size: int
    group: Any
    _works: list[Any] = field(default_factory=list)
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> list[torch.Tensor]:
        """By rank, what that rank adds up."""
        return cut(self.flat, shares(self.flat.numel(), self.size))

    def start_scatter(self) -> None:
        """Send everybody their part."""
        mine = self.parts[self.rank]
        for peer in self._others():
            if mine.numel():
                self._rows[peer] = torch.empty_like(mine)
                self._receive(self._rows[peer], peer, self.tag)
            self._send(self.parts[peer], peer, self.tag)

    def finish_scatter(self) -> None:
        """Wait for all of my part, and add it up."""
        self._wait()
        mine = self.parts[self.rank]
        if mine.numel():
            self._rows[self.rank] = mine
            rows = [self._rows[rank] for rank in range(self.size)]
            torch.add(functools.reduce(torch.add, rows[:-1]), rows[-1], out=mine)
        self._rows = {}

    def start_gather(self) -> None:
        """Send my sum to everybody."""
        for peer in self._others():
            self._receive(self.parts[peer], peer, self.tag + 1)
            self._send(self.parts[self.rank], peer, self.tag + 1)

    def finish_gather(self) -> None:
        """Wait for all sums."""
        self._wait()

    def _others(self) -> list[int]:
        """Peers, each rank beginning with the next one, so that not all send to the same."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if tensor.numel():
            self._works.append(dist.isend(tensor, group_dst=peer, group=self.group, tag=tag))

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if tensor.numel():
            self._works.append(dist.irecv(tensor, group_src=peer, group=self.group, tag=tag))

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
