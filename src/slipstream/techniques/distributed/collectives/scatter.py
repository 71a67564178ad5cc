"""`reduce_scatter` and `all_gather`: the halves of an all-reduce, in half of its bytes each."""

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
    """This rank's share of the sum of all ranks' tensors.

    A rank sends (n - 1) / n of the tensor's bytes, where ``reduce_scatter_tensor`` on gloo sends
    twice as much.

    Args:
        tensor: float32, float64, float16 or bfloat16 on a processor, of the same shape on all
            ranks; it stays as it is. Its length needs not be divisible, see `shares`.
        mean: divide by the number of ranks.
        group: the processes; None: all.
        algorithm: ``direct``, ``halving`` (powers of two), ``ring`` or ``auto``; see
            `slipstream.ranks.lines`.

    Returns:
        A new tensor, [share], of the same dtype: numbers ``shares(n)[rank]`` on of the flat sum.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument that is none of these.
        CommunicationError: on every rank: they disagree on shape, dtype or settings, or one of
            them ended or hung (after 25 s at most).
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
    """The shares of all ranks, in their order, as one flat tensor.

    Args:
        share: of the same dtype on all ranks, of any length; it stays as it is.
        group, algorithm: as of `reduce_scatter`.

    Raises:
        As `reduce_scatter`.
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
