"""Adasum between processes, in the bytes of an all-reduce.

Two algorithms, both with 2 n (p - 1) / p numbers on the wire a rank, and every number of the result
computed on one rank, so that all ranks have the same bits:

- ``gram``, any p: everybody sends everybody its slice, adds up scalar products of all pairs, layer
  by layer, which give the weights of the whole tree; each combines its slice and sends it to
  everybody. Two exchanges and one small all-reduce.
- ``rvh``, p a power of two: recursive vector halving, distance doubling, as published. log2 p
  exchanges of halves, each with a small all-reduce over the ranks that hold this pair of vectors,
  and as many back.

Most layers lie within one rank's numbers, which knows their scalar products then. Only those of the
layers that a cut between two ranks runs through are all-reduced, at most p - 1 of them however many
layers there are: p (p + 1) / 2 doubles each by ``gram``, 3 by ``rvh``.

By nodes, ``per_node`` > 1, ranks of a node average first, each a slice, slices are combined across
nodes by ``gram``, with the weights of whole layers, and gathered within the node: n numbers cross
to other nodes from all ranks of a node together instead of from each.

Scalar products are in float64 whatever travels. Source: Maleki et al., MLSys 2021, 2006.02924.
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
# Everybody sends to everybody up to so many ranks; beyond, messages would be many and small.
_MOST_GRAM = 16
# Kernels read these as they are. Others are widened, so many numbers of every row at a time: that
# stays in the second-level cache, and does not grow with the buffer.
_READ = (torch.float32, torch.float64)
_WIDENED = 1 << 14


def check(
    flat: torch.Tensor, layers: Sequence[int] | None, algorithm: str, size: int, per_node: int = 1
) -> Any:
    """Where layers start in `flat`, and where it ends, int64 [layers + 1].

    Raises:
        InvalidArgumentError: `flat` cannot be exchanged, `layers` do not fit it, or the algorithm
            is none, or not for so many ranks and nodes.
    """
    if not need_dense(flat).is_contiguous():
        raise InvalidArgumentError("tensor", "it is not contiguous on a processor")
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
    """See that there is an algorithm for `size` ranks, and that these fill nodes of `per_node`.

    Raises:
        InvalidArgumentError: there is none, or they do not.
    """
    need_algorithm(algorithm, size, ALGORITHMS, "rvh", "gram, or auto")
    per_node = as_integer("per_node", per_node, None)
    if per_node < 1 or size % per_node:
        raise InvalidArgumentError(
            "per_node", f"{per_node} ranks a node do not divide {size} ranks",
            remedy="as many on every node, neighbours in rank: torchrun's LOCAL_WORLD_SIZE",
        )  # fmt: skip
    if per_node > 1 and algorithm == "rvh":
        raise InvalidArgumentError(
            "algorithm", "rvh goes without nodes", remedy="gram or auto, or per_node=1"
        )


def exchange(
    flat: torch.Tensor, starts: Any, wire: Wire, algorithm: str = "auto", per_node: int = 1
) -> bool:
    """Put Adasum of all ranks' `flat` in its place.

    Args:
        flat: [n], contiguous on a processor, of `DTYPES`.
        starts: of layers, int64 [layers + 1], from 0 to n; the same on all ranks.
        per_node: neighbours in rank that are averaged first; see `check_algorithm`.

    Returns:
        False, on all ranks, where somebody's numbers are not finite; what is in `flat` then is of
        no use.
    """
    if wire.size == 1:
        return bool(flat.isfinite().all())
    if per_node > 1:
        return _by_nodes(flat, starts, wire, per_node)
    if algorithm == "auto":
        halves = wire.size & (wire.size - 1) == 0 and wire.size > _MOST_GRAM
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
    mine = slices[place]
    neighbours = Line(wire, tuple(range(node * per_node, (node + 1) * per_node)))
    # In the order of ranks, though nobody else computes these numbers: as a mean is written down.
    rows = _scattered(neighbours, slices)
    whole = np.array([0, mine.numel()])
    _combined(rows, whole, np.full((1, per_node), 1.0 / per_node), mine)
    across = [k * per_node + place for k in range(nodes)]
    everywhere = [c for a, b in itertools.pairwise(cuts) for c in _cuts(a, b, nodes)]
    piece = _piece(starts, cuts[place], cuts[place + 1])
    finite = _gram(mine, piece, wire, across, _divided(starts, everywhere))
    gather(neighbours, slices, "direct")
    return finite


def _gram(flat: torch.Tensor, starts: Any, wire: Wire, ranks: Sequence[int], divided: Any) -> bool:
    """Among `ranks`; scalar products of the layers `divided` are added up over all there are."""
    line = Line(wire, tuple(ranks))
    cuts, place = _cuts(0, flat.numel(), len(ranks)), line.place
    slices = cut(flat, cuts)
    piece = _piece(starts, cuts[place], cuts[place + 1])
    finite = _weighed(_scattered(line, slices), piece, divided, wire, slices[place])
    gather(line, slices, "direct")
    return finite


def _scattered(line: Line, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Everybody's numbers of our slice, in the order of ranks; ours is `slices`' own."""
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
        kept, sent = ((begin, middle), (middle, end)) if left else ((middle, end), (begin, middle))
        mine, theirs = flat[kept[0] : kept[1]], wire.buffer(kept[1] - kept[0], flat.dtype)
        wire.swap({peer: flat[sent[0] : sent[1]]}, {peer: theirs})
        # The left vector is first on both ranks, so that what they add up is of the same pair.
        rows = [mine, theirs] if left else [theirs, mine]
        cuts = sorted({*cuts, *((a + b) // 2 for a, b in itertools.pairwise(cuts))})
        inside = Wire(groups[2 * distance], 0, 2 * distance)
        # The last level's products are of all ranks' numbers: all ranks answer the same.
        finite = _weighed(rows, _piece(starts, *kept), _divided(starts, cuts), inside, mine)
        wire.product_bytes += inside.product_bytes
        levels.append((peer, *sent, distance))
        begin, end = kept
        distance *= 2
    for peer, a, b, _ in reversed(levels):
        wire.swap({peer: flat[begin:end]}, {peer: flat[a:b]})
        begin, end = min(begin, a), max(end, b)
    return finite


def _weighed(
    rows: list[torch.Tensor], piece: Any, divided: Any, wire: Wire, out: torch.Tensor
) -> bool:
    """Put Adasum of the rows, layer by layer, in `out`, which may be one of them.

    Args:
        rows: a vector each, its numbers of this rank.
        piece: where layers start within them; see `_piece`.
        divided: the layers that others of the wire have numbers of, too; ascending.

    Returns:
        Whether all numbers are finite, on all ranks of the wire.
    """
    here = np.flatnonzero(np.diff(piece))
    # Layers without numbers here lie before these, behind them or between two that touch.
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
    """By size, the contiguous groups of ranks that this one is in; made once for a wire."""
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
    """Where `parts` slices of the numbers `begin` to `end` begin and end, [parts + 1]."""
    return [begin + start for start in shares(end - begin, parts)]


def _divided(starts: Any, cuts: list[int]) -> Any:
    """The layers, ascending, that cuts may run through: each's last layer that starts before it."""
    inside = np.unique(cuts)[1:-1]
    return np.unique(np.searchsorted(starts, inside, "right") - 1)


def _piece(starts: Any, begin: int, end: int) -> Any:
    """Where layers start within numbers `begin` to `end`; what lies outside is empty."""
    return np.clip(starts, begin, end) - begin


def _products(rows: list[torch.Tensor], piece: Any) -> Any:
    """Scalar products of the rows' layers, float64 [layers, workers, workers]."""
    if rows[0].dtype in _READ:
        return kernels.products(rows, piece)
    total = np.zeros((len(piece) - 1, len(rows), len(rows)))
    for block, layers, inside in _blocks(piece):
        total[layers] += kernels.products([row[block].float() for row in rows], inside)
    return total


def _combined(rows: list[torch.Tensor], piece: Any, found: Any, out: torch.Tensor) -> None:
    """out = sum over workers of found [layers, workers] times rows; `out` may be a row."""
    if out.dtype in _READ:
        kernels.combine(rows, piece, found, out)
        return
    for block, layers, inside in _blocks(piece):
        wide = [row[block].float() for row in rows]
        kernels.combine(wide, inside, found[layers], wide[0])
        out[block] = wide[0]


def _blocks(piece: Any) -> Iterator[tuple[slice, slice, Any]]:
    """Of at most so many numbers: which, the layers with numbers there, and where these start."""
    for begin in range(0, int(piece[-1]), _WIDENED):
        end = min(begin + _WIDENED, int(piece[-1]))
        first = int(np.searchsorted(piece, begin, "right")) - 1
        last = int(np.searchsorted(piece, end))
        yield slice(begin, end), slice(first, last), _piece(piece[first : last + 1], begin, end)
