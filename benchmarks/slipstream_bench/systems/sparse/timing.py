"""How ``slipstream bench sparse`` times two ways of computing the same."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from slipstream.sparse.matrix import as_rows
from slipstream.sparse.search import Limits, Run, Searcher
from slipstream.sparse.semiring import Semiring


@dataclass(frozen=True)
class Paired:
    """Times of two ways, taken in turns."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios: how many times as fast we are."""
        return statistics.median(b / a for a, b in zip(self.ours, self.theirs, strict=True))

    def words(self) -> str:
        ratios = [b / a for a, b in zip(self.ours, self.theirs, strict=True)]
        return (
            f"ours {min(self.ours) * 1e3:.1f} ms, theirs {min(self.theirs) * 1e3:.1f} ms, "
            f"ratios {min(ratios):.2f} to {max(ratios):.2f}"
        )


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    before = clock()
    run()
    return max(clock() - before, 1e-9)


def paired(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> Paired:
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        ours()
        times = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
    return Paired([a for a, _ in times], [b for _, b in times])


def sample(rows: sp.csr_matrix, count: int) -> sp.csr_matrix:
    chosen = np.random.default_rng(0).choice(rows.shape[0], min(count, rows.shape[0]), False)
    return rows[np.sort(chosen)]


def prepared(
    queries: sp.csr_matrix, rows: sp.csr_matrix, metric: str | Semiring, threads: int = 1
) -> Run:
    given = {"p": 3} if metric == "minkowski" else {}
    searcher = Searcher(as_rows(rows, "B"), metric, given, Limits(threads=threads))
    return searcher.against(as_rows(queries, "A"))


def block_of(run: Run) -> Callable[[], object]:
    out = np.empty((len(run.left), len(run.right)), run.dtype)
    return functools.partial(run.distances, out)
