"""Sharding of parameters: every rank has a slice of each, of equal length.

Slices follow the memory order of elements, so that they are views for any strides. Data for one
rank is packed: its slices of all parameters, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.ranks.lines import shares


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor in memory order, [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    return torch.empty_like(tensor).stride() == tensor.stride()


class Shards:
    """Parameters of one dtype, and the slice of each that belongs to each rank.

    Args:
        parameters: dense tensors.
        ranks: number of ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: int) -> None:
        self.parameters, self.ranks = list(parameters), ranks
        self._starts = [shares(p.numel(), ranks) for p in parameters]
        self.place = {id(p): number for number, p in enumerate(parameters)}

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def slice(self, number: int, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's slice of `flat`, which has the layout of parameter `number`."""
        begin, end = self._starts[number][rank : rank + 2]
        return flat[begin:end]

    def outside(self, number: int, like: torch.Tensor, rank: int) -> torch.Tensor:
        """Return an element of a tensor like parameter `number` outside the rank's slice, [1].

        It is empty, [0], if the slice is the whole tensor.
        """
        flat = flat_view(like)
        begin, end = self._starts[number][rank : rank + 2]
        return flat[:1] if begin > 0 else flat[end : end + 1]

    def length(self, rank: int, numbers: Sequence[int]) -> int:
        """Return the number of elements of these parameters on a rank."""
        return sum(self._starts[n][rank + 1] - self._starts[n][rank] for n in numbers)

    def pack(
        self, numbers: Sequence[int], flats: Sequence[torch.Tensor], rank: int
    ) -> torch.Tensor:
        """Concatenate a rank's slices of tensors like the parameters `numbers`."""
        parts = [self.slice(n, flat, rank) for n, flat in zip(numbers, flats, strict=True)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def unpack(
        self, row: torch.Tensor, numbers: Sequence[int], flats: Sequence[torch.Tensor], rank: int
    ) -> None:
        """Copy `row`, as from `pack`, back to the slices."""
        begin = 0
        for n, flat in zip(numbers, flats, strict=True):
            target = self.slice(n, flat, rank)
            target.copy_(row[begin : begin + target.numel()])
            begin += target.numel()
