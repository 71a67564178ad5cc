"""Collective algorithms as phases of transfers between neighbours.

A phase is a set of simultaneous transfers; the next begins when all have arrived. Many small steps
of an algorithm over the same edges (a ring) are one transfer per edge with as many latencies. The
closed form sums phases, and the simulator runs them.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 2005 (ring, halving and doubling); Sanders, Speck, Traeff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", Parallel Computing 2009; Kumar et al., "Exploring
the limits of concurrency in ML training on Google TPUs", MLSys 2021 (two dimensions); Li et al.,
"Scaling distributed machine learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, UnknownNameError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_TRANSFERS = 2**23


@dataclass(frozen=True, eq=False)
class Phase:
    """Simultaneous transfers. Positions are ranks within the group.

    Attributes:
        src, dst: int64 [transfers]; positions from the group's size are servers.
        share: float64 [transfers]; shares of the collective's bytes.
        steps: number of consecutive messages, each with a latency.
        reduced: share of the collective's bytes that a rank sums.
        fill: share of the collective's bytes that passes before a pipeline is full.
        piece: share of the collective's bytes in one message; None if a transfer's `share` is split
            over the steps.
    """

    src: Ints
    dst: Ints
    share: Floats
    steps: int
    reduced: float = 0.0
    fill: float = 0.0
    piece: float | None = None

    @property
    def message(self) -> float:
        """Share of the collective's bytes in the largest message."""
        if self.piece is not None:
            return self.piece
        return float(self.share.max(initial=0.0)) / self.steps


# ---- one dimension ----------------------------------------------------------------------------
#
# Each gets the ranks of every line of a dimension, int64 [lines, n], and the share of the bytes of
# a line, and returns the phases of a reduce-scatter or an all-gather along it.


def _ring(lines: Ints, share: float, reduce: bool) -> list[Phase]:
    n = lines.shape[1]
    moved = share * (n - 1) / n
    src, dst = lines.reshape(-1), np.roll(lines, -1, axis=1).reshape(-1)
    return [Phase(src, dst, np.full(src.size, moved), n - 1, moved if reduce else 0.0)]


def _ring2(lines: Ints, share: float, reduce: bool) -> list[Phase]:
    """Use both directions: half of the bytes and half of the steps in each."""
    n = lines.shape[1]
    if n == 2:
        return _ring(lines, share, reduce)
    moved = share * (n - 1) / n
    src = np.concatenate([lines, lines]).reshape(-1)
    dst = np.concatenate([np.roll(lines, -1, axis=1), np.roll(lines, 1, axis=1)]).reshape(-1)
    return [Phase(src, dst, np.full(src.size, moved / 2), n // 2, moved if reduce else 0.0)]


def _line(lines: Ints, share: float, reduce: bool) -> list[Phase]:
    """Use no cable from the last to the first: pieces travel in both directions of the line."""
    n = lines.shape[1]
    left, right = lines[:, :-1], lines[:, 1:]
    ahead = np.arange(n - 1, 0, -1) / n * share
    # A reduction collects the data beyond a cable, a gather distributes it: the same bytes.
    src = np.concatenate([left, right]).reshape(-1)
    dst = np.concatenate([right, left]).reshape(-1)
    shares = np.concatenate([np.tile(ahead, len(lines)), np.tile(ahead[::-1], len(lines))])
    return [Phase(src, dst, shares, n - 1, share * (n - 1) / n if reduce else 0.0)]


def _halving(lines: Ints, share: float, reduce: bool) -> list[Phase]:
    """Start with neighbours and the largest pieces; partners are twice as far at every step."""
    n = lines.shape[1]
    if n & (n - 1):
        raise InvalidArgumentError("group", f"{n} ranks are not a power of two")
    position = np.arange(n)
    phases = []
    for k in range(n.bit_length() - 1):
        part = share / 2 ** (k + 1)
        src, dst = lines.reshape(-1), lines[:, position ^ (1 << k)].reshape(-1)
        phases.append(Phase(src, dst, np.full(src.size, part), 1, part if reduce else 0.0))
    # A gather reverses a scatter, last step first.
    return phases if reduce else phases[::-1]


_Dimension = Callable[[Ints, float, bool], list[Phase]]
_DIMENSION: dict[str, _Dimension] = {
    "ring": _ring, "ring2": _ring2, "line": _line, "halving_doubling": _halving,
}  # fmt: skip


def _scatter_gather(kind: str, shape: tuple[int, ...], algorithms: tuple[str, ...]) -> list[Phase]:
    """Process dimensions from the last (fastest); each works on the rest of the one before."""
    grid = np.arange(math.prod(shape)).reshape(shape)
    scatter: list[Phase] = []
    gather: list[Phase] = []
    share = 1.0
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        lines = np.moveaxis(grid, d, -1).reshape(-1, shape[d])
        scatter += _DIMENSION[algorithms[d]](lines, share, True)
        gather = _DIMENSION[algorithms[d]](lines, share, False) + gather
        share /= shape[d]
    if kind == "reduce_scatter":
        return scatter
    if kind == "all_gather":
        return gather
    merged = scatter + gather
    middle = len(scatter)
    one_phase = algorithms[next((d for d, size in enumerate(shape) if size > 1), 0)]
    if one_phase in ("ring", "ring2", "line"):
        # In the slowest dimension a ring goes around twice without a barrier between.
        once = scatter[-1]
        twice = replace(once, share=2 * once.share, steps=2 * once.steps)
        merged[middle - 1 : middle + 1] = [twice]
    return merged


# ---- trees ------------------------------------------------------------------------------------


def tree_parents(n: int) -> tuple[Ints, Ints]:
    """Return two binary trees over ranks 0..n-1, parent of each rank (-1: root).

    Leaves of one are inside the other, so that together they use every rank's links in both
    directions. The first is in order over 1..n-1 under root 0; the second is its mirror image.
    """
    first = np.full(n, -1)
    for rank in range(1, n):
        low = rank & -rank
        parent = (rank ^ low) | (low << 1)
        first[rank] = parent if parent < n else rank ^ low
    if n % 2 == 0:
        # Mirrored: odd ranks are leaves of one tree, even ranks of the other.
        mirrored = first[::-1]
        second = np.where(mirrored >= 0, n - 1 - mirrored, -1)
    else:
        # Shifted by one rank, which swaps odd and even.
        shifted = np.roll(first, 1)
        second = np.where(shifted >= 0, (shifted + 1) % n, -1)
    return first, second


def _double_tree(shape: tuple[int, ...], chunks: int) -> list[Phase]:
    n = math.prod(shape)
    children, parents = [], []
    for parent in tree_parents(n):
        child = np.flatnonzero(parent >= 0)
        children.append(child)
        parents.append(parent[child])
    up, down = np.concatenate(children), np.concatenate(parents)
    depth = math.ceil(math.log2(n))
    src, dst = np.concatenate([up, down]), np.concatenate([down, up])
    share = np.full(src.size, 0.5)
    return [Phase(src, dst, share, 2 * depth, 1.0, depth / chunks, 0.5 / chunks)]


def _binomial(shape: tuple[int, ...], chunks: int) -> list[Phase]:
    """Every rank with the data forwards it: their number doubles with every step."""
    n, phases, have = math.prod(shape), [], 1
    while have < n:
        src = np.arange(min(have, n - have))
        phases.append(Phase(src, src + have, np.ones(src.size), 1))
        have *= 2
    return phases


def _chain(shape: tuple[int, ...], chunks: int) -> list[Phase]:
    n = math.prod(shape)
    src = np.arange(n - 1)
    return [Phase(src, src + 1, np.ones(src.size), n - 1, 0.0, (n - 2) / chunks, 1 / chunks)]


# ---- others -----------------------------------------------------------------------------------


def _halving_doubling(kind: str, n: int) -> list[Phase]:
    """Allow any n for an all-reduce: ranks beyond a power of two send first and receive last."""
    core = 1 << (n.bit_length() - 1)
    extra = n - core
    if extra == 0 or kind != "all_reduce":
        return _scatter_gather(kind, (n,), ("halving_doubling",))
    odd, even = np.arange(extra) * 2 + 1, np.arange(extra) * 2
    ones = np.ones(extra)
    participants = np.concatenate([odd, np.arange(2 * extra, n)])
    inner = _scatter_gather(kind, (core,), ("halving_doubling",))
    return [
        Phase(even, odd, ones, 1, 1.0),
        *(Phase(participants[p.src], participants[p.dst], p.share, p.steps, p.reduced)
          for p in inner),
        Phase(odd, even, ones, 1),
    ]  # fmt: skip


def _pairwise(n: int) -> list[Phase]:
    if n * (n - 1) > _MAX_TRANSFERS:
        raise InvalidArgumentError(
            "group",
            f"all_to_all of {n} ranks has {n * (n - 1)} transfers",
            remedy="use a smaller group",
        )
    src, dst = np.nonzero(~np.eye(n, dtype=bool))
    return [Phase(src, dst, np.full(src.size, 1.0 / n), n - 1, piece=1.0 / n)]


def _parameter_server(n: int, servers: int) -> list[Phase]:
    if servers == 0:
        raise InvalidArgumentError("servers", "is empty; a parameter server needs devices")
    worker = np.repeat(np.arange(n), servers)
    server = n + np.tile(np.arange(servers), n)
    share = np.full(worker.size, 1.0 / servers)
    return [Phase(worker, server, share, 1, n / servers), Phase(server, worker, share, 1)]


def _gloo_gather(n: int) -> list[Phase]:
    """Ring of half pieces, as in gloo: a rank sends one only when its neighbour requests it.

    The last rank to start already has a request, so that its first half piece is in transit before
    it sends its own request: the request waits for the piece in the cable, and the whole ring for
    the request (gloo/allgather.cc and transport/tcp/pair.cc; 3/2 of a ring's time for two ranks).
    """
    (ring,) = _ring(np.arange(n)[None, :], 1.0, False)
    return [Phase(ring.src, ring.dst, ring.share, ring.steps, fill=1.0 / (2 * n))]


def _halo(n: int) -> list[Phase]:
    left = np.arange(n - 1)
    src, dst = np.concatenate([left, left + 1]), np.concatenate([left + 1, left])
    return [Phase(src, dst, np.ones(src.size), 1)]


def _reshard(n: int, receivers: int) -> list[Phase]:
    """Send rows r, r + n, ... of each rank r to the ranks that have them among the receivers.

    Rank r is also receiver r.
    """
    if receivers == 0:
        raise InvalidArgumentError("servers", "is empty; a reshard needs receivers")
    period = np.arange(math.lcm(n, receivers))
    src, dst = period % n, period % receivers
    moved = src != dst
    src, dst = src[moved], dst[moved]
    if not src.size:
        return []
    messages = max(np.bincount(src).max(), np.bincount(dst).max())
    share = 1.0 / period.size
    return [Phase(src, n + dst, np.full(src.size, share), int(messages), piece=share)]


_BY_DIMENSIONS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "ring2", "line", "halving_doubling", "tree", "ps", "in_network"),
    "reduce_scatter": ("ring", "ring2", "line", "halving_doubling"),
    "all_gather": ("ring", "ring2", "line", "halving_doubling", "gloo"),
    "broadcast": ("tree", "chain"),
    "all_to_all": ("pairwise",),
    "p2p": ("direct",),
    "halo": ("neighbours",),
    "reshard": ("dealt",),
}
"""Algorithms by kind. ``ring2`` uses both directions, ``line`` no cable from the last to the first;
the first three can also be combined by dimension, as in ``line*ring2``. ``gloo`` is that library's
algorithm, which is never the cheapest, so ``auto`` ignores it. ``in_network`` uses aggregating
switches (`aggregation`): it depends on the network, and has no phases here."""


@functools.lru_cache(maxsize=256)
def phases(
    kind: str, algo: str, shape: tuple[int, ...], chunks: int = 16, servers: int = 0
) -> tuple[Phase, ...]:
    """Return the phases of a collective over a group of this shape.

    Raises:
        UnknownNameError: the collective has no such algorithm.
        InvalidArgumentError: the algorithm does not fit the group.
    """
    n = math.prod(shape)
    parts = tuple(algo.split("*"))
    if len(parts) > 1:
        if len(parts) != len(shape):
            raise InvalidArgumentError("algo", f"'{algo}' is for {len(parts)} dimensions, but the "
                                       f"group has {len(shape)}")  # fmt: skip
        if kind not in _BY_DIMENSIONS:
            raise InvalidArgumentError("algo", f"{kind} has no algorithms by dimension")
        for part in parts:
            if part not in _DIMENSION:
                raise UnknownNameError("algorithm", part, _DIMENSION)
    elif algo not in ALGORITHMS[kind]:
        raise UnknownNameError(f"{kind} algorithm", algo, ALGORITHMS[kind])
    if kind == "p2p" and n != 2:
        raise InvalidArgumentError("group", f"p2p is between 2 devices, not {n}")
    if n == 1 and algo not in ("ps", "dealt"):
        return ()
    if algo == "in_network":
        raise InvalidArgumentError("algo", "in_network has no phases without a network")
    sequence: list[Phase]
    if len(parts) > 1:
        sequence = _scatter_gather(kind, shape, parts)
    elif algo == "halving_doubling":
        sequence = _halving_doubling(kind, n)
    elif algo in _DIMENSION:
        sequence = _scatter_gather(kind, (n,), (algo,))
    elif algo == "tree":
        sequence = _double_tree(shape, chunks) if kind == "all_reduce" else _binomial(shape, chunks)
    elif algo == "chain":
        sequence = _chain(shape, chunks)
    elif algo == "ps":
        sequence = _parameter_server(n, servers)
    elif algo == "gloo":
        sequence = _gloo_gather(n)
    elif algo == "pairwise":
        sequence = _pairwise(n)
    elif algo == "neighbours":
        sequence = _halo(n)
    elif algo == "dealt":
        sequence = _reshard(n, servers)
    else:
        first = np.array([0])
        sequence = [Phase(first, first + 1, np.ones(1), 1)]
    return tuple(sequence)


def candidates(kind: str, shape: tuple[int, ...], *, direct: bool, algo: str) -> list[str]:
    """Return the algorithms that ``auto`` (or ``2d``) chooses from.

    With switches, using both directions gains no bandwidth and no library does it, so only direct
    networks have these algorithms.
    """
    n = math.prod(shape)
    dims = ("ring", "ring2", "line") if direct else ("ring", "halving_doubling")
    algorithms: list[str] = []
    if algo == "auto":
        algorithms = [
            a for a in ALGORITHMS[kind]
            if a not in ("ps", "in_network")
            and (kind not in _BY_DIMENSIONS or a in dims or a == "tree"
                              or (a == "halving_doubling" and not direct))
            and not (a == "halving_doubling" and kind != "all_reduce" and n & (n - 1))
        ]  # fmt: skip
    if kind in _BY_DIMENSIONS and sum(size > 1 for size in shape) > 1:
        per_dimension = [
            [a for a in dims if a != "halving_doubling" or not size & (size - 1)] for size in shape
        ]
        algorithms += ["*".join(chosen) for chosen in itertools.product(*per_dimension)]
    return algorithms
