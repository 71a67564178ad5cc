"""`reduce_scatter` and `all_gather`: the two halves of an all-reduce, each with half its bytes."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from slipstream.ranks.group import process_group
from slipstream.ranks.lines import (
    ALGORITHMS,
    Line,
    cut,
    gather,
    need_algorithm,
    scatter,
    shares,
)
from slipstream.ranks.wire import need_dense


def reduce_scatter(
    tensor: torch.Tensor, *, mean: bool = False, group: Any = None, algorithm: str = "auto"
) -> torch.Tensor:
    """Return this rank's share of the sum of all ranks' tensors.

    A rank sends (n - 1) / n of the tensor's bytes; ``reduce_scatter_tensor`` on gloo sends twice
    as many.

    Args:
        tensor: float32, float64, float16 or bfloat16 on CPU, of the same shape on all ranks; it is
            not modified. Its length need not be divisible, see `shares`.
        mean: divide by the number of ranks.
        group: process group; None for the default group.
        algorithm: ``direct``, ``halving`` (powers of two), ``ring`` or ``auto``; see
            `slipstream.ranks.lines`.

    Returns:
        A new tensor, [share], of the same dtype: the flat sum from ``shares(n)[rank]`` on.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument is not one of these.
        CommunicationError: on every rank: ranks disagree on shape, dtype or settings, or one
            exited or hung (after 25 s at most).
    """
    need_dense(tensor)
    ranks = process_group(group)
    need_algorithm(algorithm, ranks.size, ALGORITHMS, "halving", "direct, ring or auto")
    ranks.need_same_call("reduce_scatter", tensor, f"{mean} {algorithm}")
    wire = ranks.wire
    flat = tensor.detach().contiguous().view(-1)
    pieces = cut(flat, shares(flat.numel(), wire.size))
    out = torch.empty_like(pieces[wire.rank])
    divisor = wire.size if mean else 1
    ranks.run("reduce_scatter", lambda: scatter(Line.of(wire), pieces, out, algorithm, divisor))
    return out


def all_gather(share: torch.Tensor, *, group: Any = None, algorithm: str = "auto") -> torch.Tensor:
    """Return the shares of all ranks, in rank order, as one flat tensor.

    Args:
        share: of the same dtype on all ranks, of any length; it is not modified.
        group, algorithm: see `reduce_scatter`.

    Raises:
        See `reduce_scatter`.
    """
    need_dense(share, "share")
    ranks = process_group(group)
    need_algorithm(algorithm, ranks.size, ALGORITHMS, "halving", "direct, ring or auto")
    rows = ranks.announce("all_gather", share, algorithm)
    starts = [0, *itertools.accumulate(row[-1] for row in rows)]
    flat = torch.empty(starts[-1], dtype=share.dtype)
    pieces = cut(flat, starts)
    pieces[ranks.wire.rank].copy_(share.detach().reshape(-1))
    ranks.run("all_gather", lambda: gather(Line.of(ranks.wire), pieces, algorithm))
    return flat
