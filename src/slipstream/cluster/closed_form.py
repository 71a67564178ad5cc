"""Cost of a collective on identical links without other traffic.

Hockney's model with a term for summation: a message costs `alpha_ns` plus its bytes over
`bytes_per_s`, and a rank sums at `reduce_ns_per_byte`. On a topology with different or shared links
`Cluster.cost` computes the same terms from the phases of the algorithm (`patterns`); tests check
that both agree if all links are identical.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.cluster.patterns import ALGORITHMS
from slipstream.cluster.topology import Aggregator
from slipstream.errors import InvalidArgumentError, UnknownNameError

Floats = npt.NDArray[np.float64]
# Coefficients of the latency, of S over B, and of S times gamma, for n (float64) and the chunks.
_Terms = Callable[[Floats, int], tuple[Any, Any, Any]]


def closed_form_ns(
    kind: str,
    algo: str,
    nbytes: npt.ArrayLike,
    n: npt.ArrayLike,
    *,
    alpha_ns: float,
    bytes_per_s: float,
    reduce_ns_per_byte: float = 0.0,
    chunks: int = 16,
    servers: int = 1,
    depth: int = 1,
    aggregator: Aggregator | None = None,
) -> Floats:
    """Return nanoseconds, float64 of the broadcast shape of `nbytes` and `n`.

    Args:
        kind, algo: keys of `patterns.ALGORITHMS`, one dimension.
        nbytes: S, as `Collective.nbytes`.
        n: ranks.
        alpha_ns: latency of one message from rank to rank.
        bytes_per_s: bandwidth of one direction of a rank's link.
        reduce_ns_per_byte: time to sum one byte.
        depth: hops from a rank to the root of the aggregating switches (``in_network``).
        aggregator: properties of each of these; `alpha_ns` is then the latency of one hop.
        servers: shards of a parameter server, each on a link like those of workers.

    Raises:
        UnknownNameError: there is no such algorithm.
        InvalidArgumentError: a size is negative or not a number, or there is less than one rank.
    """
    size, ranks = np.asarray(nbytes, np.float64), np.asarray(n, np.float64)
    if not np.all(size >= 0.0) or not np.all(np.isfinite(size)):
        raise InvalidArgumentError("nbytes", "contains a size that is not finite and at least 0")
    if not np.all(ranks >= 1.0):
        raise InvalidArgumentError("n", "contains less than one rank")
    if kind not in ALGORITHMS:
        raise UnknownNameError("collective", kind, ALGORITHMS)
    if (kind, algo) == ("all_reduce", "in_network"):
        cost = _in_network_ns(size, depth, alpha_ns, bytes_per_s, aggregator)
        return np.asarray(np.where(ranks == 1.0, 0.0, cost), np.float64)
    terms = _TERMS.get((kind, algo))
    if terms is None:
        raise UnknownNameError(f"{kind} algorithm", algo, ALGORITHMS[kind])
    if algo == "ps":
        load = np.maximum(1.0, ranks / servers)
        messages, carried, added = 2.0, 2.0 * load, ranks / servers
    else:
        messages, carried, added = terms(ranks, chunks)
    cost = messages * alpha_ns + size * (carried * 1e9 / bytes_per_s + added * reduce_ns_per_byte)
    if algo != "ps":
        cost = np.where(ranks == 1.0, 0.0, cost)
    return np.asarray(cost, np.float64)


def _in_network_ns(
    size: Floats, depth: int, alpha_ns: float, bytes_per_s: float, aggregator: Aggregator | None
) -> Floats:
    """Return the cost of a tree, up and down: slots are pipelined, within a limited window."""
    if aggregator is None:
        raise InvalidArgumentError(
            "aggregator", "is missing; in_network needs aggregating switches"
        )
    hops, slot_ns = 2 * depth, aggregator.slot_bytes * 1e9 / bytes_per_s
    window_rate = aggregator.slots * aggregator.slot_bytes / (hops * (alpha_ns + slot_ns)) * 1e9
    rate = min(bytes_per_s, aggregator.bytes_per_s, window_rate)
    cost: Floats = hops * alpha_ns + (hops - 1) * slot_ns + size * 1e9 / rate
    return cost


def _ring(rounds: float, both_ways: bool, reduces: bool) -> _Terms:
    def terms(n: Floats, chunks: int) -> tuple[Any, Any, Any]:
        part = (n - 1) / n
        added = part if reduces else 0.0
        if not both_ways:
            return rounds * (n - 1), rounds * part, added
        half = np.where(n == 2, 1.0, np.floor(n / 2))
        # Two ranks have a single cable, which one direction around the ring already fills.
        return rounds * half, rounds * np.where(n == 2, part, part / 2), added

    return terms


def _doubling(rounds: float, reduces: bool) -> _Terms:
    def terms(n: Floats, chunks: int) -> tuple[Any, Any, Any]:
        core = np.exp2(np.floor(np.log2(n)))
        part = (core - 1) / core
        extra = n != core
        if rounds == 1.0 and np.any(extra):
            raise InvalidArgumentError("n", "is not a power of two")
        steps = rounds * np.log2(core) + 2.0 * extra
        added = (part + extra) if reduces else 0.0
        return steps, rounds * part + 2.0 * extra, added

    return terms


def _tree(n: Floats, chunks: int) -> tuple[Any, Any, Any]:
    # From 4 ranks, the busiest is inside one tree, with two children, and a leaf of the other.
    load = np.where(n >= 4, 2.0, np.where(n == 3, 1.5, 1.0))
    depth = np.ceil(np.log2(n))
    return 2 * depth, load + depth / chunks, 1.0


def _binomial(n: Floats, chunks: int) -> tuple[Any, Any, Any]:
    depth = np.ceil(np.log2(n))
    return depth, depth, 0.0


_TERMS: dict[tuple[str, str], _Terms] = {
    ("all_reduce", "ring"): _ring(2.0, False, True),
    ("all_reduce", "ring2"): _ring(2.0, True, True),
    ("all_reduce", "line"): _ring(2.0, False, True),
    ("all_reduce", "halving_doubling"): _doubling(2.0, True),
    ("all_reduce", "tree"): _tree,
    ("all_reduce", "ps"): lambda n, chunks: (2.0, 2.0, 1.0),
    ("reduce_scatter", "ring"): _ring(1.0, False, True),
    ("reduce_scatter", "ring2"): _ring(1.0, True, True),
    ("reduce_scatter", "line"): _ring(1.0, False, True),
    ("reduce_scatter", "halving_doubling"): _doubling(1.0, True),
    ("all_gather", "ring"): _ring(1.0, False, False),
    ("all_gather", "ring2"): _ring(1.0, True, False),
    ("all_gather", "line"): _ring(1.0, False, False),
    ("all_gather", "halving_doubling"): _doubling(1.0, False),
    ("all_gather", "gloo"): lambda n, chunks: (n - 1, (n - 0.5) / n, 0.0),
    ("broadcast", "tree"): _binomial,
    ("broadcast", "chain"): lambda n, chunks: (n - 1, 1 + (n - 2) / chunks, 0.0),
    ("all_to_all", "pairwise"): lambda n, chunks: (n - 1, (n - 1) / n, 0.0),
    ("p2p", "direct"): lambda n, chunks: (1.0, 1.0, 0.0),
    ("halo", "neighbours"): lambda n, chunks: (1.0, np.where(n == 2, 1.0, 2.0), 0.0),
}
