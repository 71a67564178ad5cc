"""Adasum between processes, with the bytes of an all-reduce.

In both algorithms a rank sends 2 n (p - 1) / p elements, and each element of the result is computed
on a single rank, so that all ranks have the same bits:

- ``gram``, any p: ranks exchange slices in an all-to-all and sum the dot products of all pairs per
  layer, which determine the weights of the whole tree; each rank combines its slice and sends it
  to all others. Two exchanges and one small all-reduce.
- ``rvh``, p a power of two: recursive vector halving, distance doubling, as published. log2 p
  exchanges of halves, each with a small all-reduce over the ranks that hold this pair of vectors,
  and log2 p exchanges back.

Most layers are inside one rank's slice, which then has their complete dot products. Only those of
layers that span two slices are all-reduced, at most p - 1 layers: p (p + 1) / 2 doubles per layer
with ``gram``, 3 with ``rvh``.

With nodes, ``per_node`` > 1, the ranks of a node first average, one slice per rank; ``gram``
combines the slices across nodes, with the weights of whole layers; the node then gathers them. A
node as a whole sends n elements to other nodes, instead of n per rank.

Dot products are computed in float64 for every dtype. Source: Maleki et al., MLSys 2021, 2006.02924.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.ranks.lines import (
    Line,
    Scatter,
    cut,
    gather,
    need_algorithm,
    room_for,
    shares,
)
from slipstream.ranks.wire import Wire, need_dense
from slipstream.techniques.distributed.adasum import kernels
from slipstream.techniques.distributed.adasum.rule import weights

ALGORITHMS = ("auto", "gram", "rvh")
# Maximum number of ranks for an all-to-all; above, messages would be many and small.
_MAX_GRAM_RANKS = 16
# Dtypes that kernels read directly. Others are widened in blocks of `_WIDENED` elements per row,
# which fit in the L2 cache.
_READ = (torch.float32, torch.float64)
_WIDENED = 1 << 14


def check(
    flat: torch.Tensor, layers: Sequence[int] | None, algorithm: str, size: int, per_node: int = 1
) -> Any:
    """Return the offsets of layers in `flat`, and its length, int64 [layers + 1].

    Raises:
        InvalidArgumentError: `flat` cannot be exchanged, `layers` do not fit it, or the algorithm
            is unknown or does not support these ranks and nodes.
    """
    if not need_dense(flat).is_contiguous():
        raise InvalidArgumentError("tensor", "it is not contiguous on CPU")
    check_algorithm(algorithm, size, per_node)
    starts = np.array([0] if layers is None else layers, np.int64)
    ordered = starts.ndim == 1 and len(starts) and starts[0] == 0 and (np.diff(starts) >= 0).all()
    if not ordered or starts[-1] > flat.numel():
        raise InvalidArgumentError(
            "layers",
            f"{list(layers or [])[:8]} are not offsets from 0 to {flat.numel()}, ascending",
        )
    return np.append(starts, flat.numel())


def check_algorithm(algorithm: str, size: int, per_node: int = 1) -> None:
    """Raise an `InvalidArgumentError` unless `algorithm` supports these ranks and nodes."""
    need_algorithm(algorithm, size, ALGORITHMS, "rvh", "gram, or auto")
    per_node = as_integer("per_node", per_node, None)
    if per_node < 1 or size % per_node:
        raise InvalidArgumentError(
            "per_node", f"{size} ranks cannot be split into nodes of {per_node}",
            remedy="the same number of ranks on every node, as torchrun's LOCAL_WORLD_SIZE",
        )  # fmt: skip
    if per_node > 1 and algorithm == "rvh":
        raise InvalidArgumentError(
            "algorithm", "rvh does not support per_node > 1", remedy="gram or auto, or per_node=1"
        )


def exchange(
    flat: torch.Tensor, starts: Any, wire: Wire, algorithm: str = "auto", per_node: int = 1
) -> bool:
    """Replace `flat` by the Adasum over all ranks.

    Args:
        flat: [n], contiguous on CPU, of `DTYPES`.
        starts: offsets of layers, int64 [layers + 1], from 0 to n; the same on all ranks.
        per_node: number of consecutive ranks that are averaged first; it divides the ranks.

    Returns:
        Whether the elements of all ranks are finite, the same on all ranks; if not, the content of
        `flat` is undefined.
    """
    if wire.size == 1:
        return bool(flat.isfinite().all())
    if per_node > 1:
        return _by_nodes(flat, starts, wire, per_node)
    if algorithm == "auto":
        halves = wire.size & (wire.size - 1) == 0 and wire.size > _MAX_GRAM_RANKS
        algorithm = "rvh" if halves else "gram"
    if algorithm == "rvh":
        return _rvh(flat, starts, wire)
    cuts = _cuts(0, flat.numel(), wire.size)
    return _gram(flat, starts, wire, range(wire.size), _divided(starts, cuts))


def _by_nodes(flat: torch.Tensor, starts: Any, wire: Wire, per_node: int) -> bool:
    node, place = divmod(wire.rank, per_node)
    nodes = wire.size // per_node
    cuts = _cuts(0, flat.numel(), per_node)
    slices = cut(flat, cuts)
    own = slices[place]
    neighbours = Line(wire, tuple(range(node * per_node, (node + 1) * per_node)))
    # Sum in rank order, as a plain mean does.
    rows = _scattered(neighbours, slices)
    whole = np.array([0, own.numel()])
    _combined(rows, whole, np.full((1, per_node), 1.0 / per_node), own)
    across = [k * per_node + place for k in range(nodes)]
    everywhere = [c for a, b in itertools.pairwise(cuts) for c in _cuts(a, b, nodes)]
    piece = _piece(starts, cuts[place], cuts[place + 1])
    finite = _gram(own, piece, wire, across, _divided(starts, everywhere))
    gather(neighbours, slices, "direct")
    return finite


def _gram(flat: torch.Tensor, starts: Any, wire: Wire, ranks: Sequence[int], divided: Any) -> bool:
    """Run ``gram`` among `ranks`; sum the dot products of the layers `divided` over all ranks."""
    line = Line(wire, tuple(ranks))
    cuts, place = _cuts(0, flat.numel(), len(ranks)), line.place
    slices = cut(flat, cuts)
    piece = _piece(starts, cuts[place], cuts[place + 1])
    finite = _weighed(_scattered(line, slices), piece, divided, wire, slices[place])
    gather(line, slices, "direct")
    return finite


def _scattered(line: Line, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all ranks' values of our slice, in rank order; ours is a view of `slices`."""
    room = line.wire.buffer(room_for(line, slices), slices[0].dtype)
    scatter = Scatter(line, slices, room)
    scatter.send()
    rows = scatter.rows()
    scatter.end()
    return rows


def _rvh(flat: torch.Tensor, starts: Any, wire: Wire) -> bool:
    groups = _aligned_groups(wire)
    begin, end = 0, flat.numel()
    cuts = [begin, end]
    levels: list[tuple[int, int, int, int]] = []
    finite = True
    distance = 1
    while distance < wire.size:
        peer, middle = wire.rank ^ distance, (begin + end) // 2
        left = not wire.rank & distance
        retained, sent = (
            ((begin, middle), (middle, end)) if left else ((middle, end), (begin, middle))
        )
        own, theirs = (
            flat[retained[0] : retained[1]],
            wire.buffer(retained[1] - retained[0], flat.dtype),
        )
        wire.swap({peer: flat[sent[0] : sent[1]]}, {peer: theirs})
        # The left vector comes first on both ranks, so that they sum products of the same pair.
        rows = [own, theirs] if left else [theirs, own]
        cuts = sorted({*cuts, *((a + b) // 2 for a, b in itertools.pairwise(cuts))})
        inside = Wire(groups[2 * distance], 0, 2 * distance)
        # The last level covers all ranks, so that all return the same result.
        finite = _weighed(rows, _piece(starts, *retained), _divided(starts, cuts), inside, own)
        wire.product_bytes += inside.product_bytes
        levels.append((peer, *sent, distance))
        begin, end = retained
        distance *= 2
    for peer, a, b, _ in reversed(levels):
        wire.swap({peer: flat[begin:end]}, {peer: flat[a:b]})
        begin, end = min(begin, a), max(end, b)
    return finite


def _weighed(
    rows: list[torch.Tensor], piece: Any, divided: Any, wire: Wire, out: torch.Tensor
) -> bool:
    """Write the Adasum of the rows, per layer, to `out`, which may be one of them.

    Args:
        rows: this rank's part of each vector.
        piece: offsets of layers within the rows; see `_piece`.
        divided: ascending indices of layers that span several ranks of the wire.

    Returns:
        Whether the elements of all ranks of the wire are finite.
    """
    here = np.flatnonzero(np.diff(piece))
    # Drop layers without elements here; those that remain are adjacent.
    piece = np.append(piece[here], piece[-1])
    products = _products(rows, piece)
    upper = np.triu_indices(len(rows))
    _, ours, of_all = np.intersect1d(here, divided, assume_unique=True, return_indices=True)
    sums = np.zeros((len(divided), len(upper[0])))
    sums[of_all] = products[ours][:, *upper]
    total = wire.add_up(np.append(sums, not np.isfinite(products).all()))
    sums = total[:-1].reshape(sums.shape)[of_all]
    for i, j in (upper, upper[::-1]):
        products[ours[:, None], i, j] = sums
    _combined(rows, piece, np.nan_to_num(weights(products)), out)
    return bool(np.isfinite(total).all()) and total[-1] == 0


def _aligned_groups(wire: Wire) -> dict[int, Any]:
    """Return the contiguous groups of ranks that contain this one, by size; created once."""
    if not wire.aligned:
        members = dist.get_process_group_ranks(wire.group or dist.group.WORLD)
        size = 2
        while size < wire.size:
            first = wire.rank // size * size
            wire.aligned[size] = dist.new_group(
                members[first : first + size], timeout=wire.timeout,
                use_local_synchronization=True,
            )  # fmt: skip
            size *= 2
    return {**wire.aligned, wire.size: wire.group}


def _cuts(begin: int, end: int, parts: int) -> list[int]:
    """Return the bounds of `parts` slices of the range `begin` to `end`, [parts + 1]."""
    return [begin + start for start in shares(end - begin, parts)]


def _divided(starts: Any, cuts: list[int]) -> Any:
    """Return the ascending indices of layers that `cuts` may split."""
    inside = np.unique(cuts)[1:-1]
    return np.unique(np.searchsorted(starts, inside, "right") - 1)


def _piece(starts: Any, begin: int, end: int) -> Any:
    """Return offsets of layers within `begin` to `end`; layers outside are empty."""
    return np.clip(starts, begin, end) - begin


def _products(rows: list[torch.Tensor], piece: Any) -> Any:
    """Return dot products of the rows per layer, float64 [layers, workers, workers]."""
    if rows[0].dtype in _READ:
        return kernels.products(rows, piece)
    total = np.zeros((len(piece) - 1, len(rows), len(rows)))
    for block, layers, inside in _blocks(piece):
        total[layers] += kernels.products([row[block].float() for row in rows], inside)
    return total


def _combined(rows: list[torch.Tensor], piece: Any, factors: Any, out: torch.Tensor) -> None:
    """Write the sum of rows weighted by `factors` [layers, workers] to `out`, possibly a row."""
    if out.dtype in _READ:
        kernels.combine(rows, piece, factors, out)
        return
    for block, layers, inside in _blocks(piece):
        wide = [row[block].float() for row in rows]
        kernels.combine(wide, inside, factors[layers], wide[0])
        out[block] = wide[0]


def _blocks(piece: Any) -> Iterator[tuple[slice, slice, Any]]:
    """Yield blocks of at most `_WIDENED` elements, their layers and the offsets of these."""
    for begin in range(0, int(piece[-1]), _WIDENED):
        end = min(begin + _WIDENED, int(piece[-1]))
        first = int(np.searchsorted(piece, begin, "right")) - 1
        last = int(np.searchsorted(piece, end))
        yield slice(begin, end), slice(first, last), _piece(piece[first : last + 1], begin, end)
