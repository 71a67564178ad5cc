"""How parameters are shared out: every rank has a slice of each, of as many numbers as the others.

A slice is of the order in which the numbers lie in memory, so that it is a view whatever the
parameter's strides. What goes to one rank is packed: its slices of all parameters in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.ranks.lines import shares


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's numbers in the order of its memory, [n]; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in memory without gaps, each once, in any order."""
    return torch.empty_like(tensor).stride() == tensor.stride()


class Shards:
    """Parameters of one dtype, and which slice of each belongs to which rank.

    Args:
        parameters: dense.
        ranks: how many.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: int) -> None:
        self.parameters, self.ranks = list(parameters), ranks
        self._starts = [shares(p.numel(), ranks) for p in parameters]
        self.place = {id(p): number for number, p in enumerate(parameters)}

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def slice(self, number: int, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's slice of parameter `number`, or of anything like it, in memory order."""
        begin, end = self._starts[number][rank : rank + 2]
        return flat[begin:end]

    def outside(self, number: int, like: torch.Tensor, rank: int) -> torch.Tensor:
        """A number of what is like parameter `number` that is not in the rank's slice, [1].

        [0] where the slice is all there is.
        """
        flat = flat_view(like)
        begin, end = self._starts[number][rank : rank + 2]
        return flat[:1] if begin > 0 else flat[end : end + 1]

    def length(self, rank: int, numbers: Sequence[int]) -> int:
        """How many numbers a rank has of these parameters."""
        return sum(self._starts[n][rank + 1] - self._starts[n][rank] for n in numbers)

    def pack(
        self, numbers: Sequence[int], flats: Sequence[torch.Tensor], rank: int
    ) -> torch.Tensor:
        """A rank's slices of tensors like the parameters `numbers`, in a row."""
        parts = [self.slice(n, flat, rank) for n, flat in zip(numbers, flats, strict=True)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def unpack(
        self, row: torch.Tensor, numbers: Sequence[int], flats: Sequence[torch.Tensor], rank: int
    ) -> None:
        """Undo `pack`."""
        begin = 0
        for n, flat in zip(numbers, flats, strict=True):
            target = self.slice(n, flat, rank)
            target.copy_(row[begin : begin + target.numel()])
            begin += target.numel()
