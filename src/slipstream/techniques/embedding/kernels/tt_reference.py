"""Rows of tensor trains in torch's operators.

Implements ``native/src/tt/`` for any dtype and device and two to four cores, and is differentiable
any number of times, but tens of times slower: it gathers the slices of every id and multiplies
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from slipstream.techniques.embedding.kernels.bags import reduced

HASH = -7046029254386353131
"""Multiplier of ids in the hash table of hot rows: 2^64 over the golden ratio."""


def rows_of(cores: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the rows `ids`, [n], of cores [p, R, q, R'] each: [n, q_1 ... q_d]."""
    remaining = ids.to(torch.int64)
    slices = []
    for core in reversed(cores):
        slices.append(core.index_select(0, remaining % core.shape[0]))
        remaining = torch.div(remaining, core.shape[0], rounding_mode="floor")
    product, width = slices.pop().flatten(1, 2), cores[0].shape[2]
    while slices:
        right = slices.pop()
        product = product.reshape(-1, width, right.shape[1]) @ right.flatten(2)
        width *= right.shape[2]
    return product.reshape(-1, width)


def of_three(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return three cores for kernels; two are preceded by the constant 1."""
    return list(cores) if len(cores) == 3 else [cores[0].new_ones(1, 1, 1, 1), *cores]


def start(ids: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the first slots to probe in a hash table: the top bits of id * HASH."""
    bits = capacity.bit_length() - 1
    if bits == 0:
        return torch.zeros_like(ids)
    return ((ids * HASH) >> (64 - bits)) & (capacity - 1)


def slots_of(hot: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the cached row of each id, or -1, int64 [n].

    Args:
        hot: hash table, int64 [capacity, 2], of pairs of an id, or -1, and its row in the cache.
    """
    cached, order = hot[:, 0].sort()
    place = torch.searchsorted(cached, ids.to(torch.int64)).clamp(max=len(cached) - 1)
    return torch.where(cached[place] == ids, hot[:, 1][order][place], -1)


def bags_of(
    cores: Sequence[torch.Tensor],
    cache: torch.Tensor | None,
    hot: torch.Tensor | None,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    padding: int,
    bags: int,
    mode: str,
    made_by: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] = rows_of,
) -> torch.Tensor:
    """Compute ``slipstream::tt`` by ``embedding_bag`` over materialized rows.

    Args:
        made_by: function that computes rows, by default `rows_of`.
    """
    rows = made_by(cores, ids)
    if bags == 0:
        return rows.new_zeros(0, rows.shape[1]) + 0 * rows.sum()
    if cache is not None and hot is not None:
        slot = slots_of(hot, ids)
        cached = functional.embedding(slot.clamp(min=0), cache)
        rows = torch.where((slot >= 0)[:, None], cached, rows)
    if offsets is None:
        offsets = torch.arange(bags, device=ids.device) * (ids.numel() // bags)
    return reduced(rows, ids, offsets[:bags], mode, weights, padding)
