"""Blocks of distances of two matrices under a metric: plan, index, threads, memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.sparse import kernels, metrics
from slipstream.sparse.chebyshev import ChebyshevSearch
from slipstream.sparse.device import DeviceSearch, OnDevice
from slipstream.sparse.index import MAX_TILE_ROWS, TILE_ROWS_OF_LISTS, Index, build_index
from slipstream.sparse.matrix import Floats, Int64s, Rows, same_columns
from slipstream.sparse.metrics import NON_NEGATIVE, MetricPlan, Options, Root, Side
from slipstream.sparse.reference import ByColumn, ReferenceSearch
from slipstream.sparse.semiring import Semiring, SemiringSearch

BLOCK_BYTES = 64 * 2**20
# Distances below this share of the terms whose difference they are, are recomputed exactly.
NEAR_ZERO = 1e-3
# Outside these, float32 squares and sums would overflow or vanish, so float64 is used.
_FLOAT32_LOW, _FLOAT32_HIGH = 1e-30, 1e30
_FLOAT64_HIGH = 1e290
# Smallest share of the largest value at which a difference matters: the guaranteed precision.
_SMALL_SHARE = 1e-10
# Maximum count that is exact in float32.
_FLOAT32_COUNT = 2**24
# Approximate working memory per entry of the queries.
_ENTRY_BYTES = 80
# Maximum multiply-adds per native call, so that Ctrl-C is handled between calls.
_CALL_WORK = 1.5e9
_RANGES_PER_THREAD = 8


class Engine(Protocol):
    """A search of queries against rows; `NativeSearch`, `ReferenceSearch` and others."""

    rows: int
    dtype: np.dtype[Any]
    at_once: int

    def scratch_bytes(self, queries: int) -> int: ...
    def distances(self, ranges: Int64s, threads: int, out: Floats) -> None: ...
    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]: ...


@dataclass(frozen=True)
class Limits:
    """Memory and threads of a search.

    Attributes:
        block_bytes: working memory in addition to inputs, index and result.
        threads: at least 1.
        tile_rows: rows whose sums are computed at a time; None to choose. Results do not depend on
            it.
    """

    block_bytes: int = BLOCK_BYTES
    threads: int = 1
    tile_rows: int | None = None

    @classmethod
    def of(
        cls, n_jobs: int | None, block_bytes: int | None, tile_rows: int | None = None
    ) -> Limits:
        """Return the limits for the arguments of public functions.

        Args:
            n_jobs: threads; None is one, -1 all CPUs, -2 all but one.

        Raises:
            InvalidArgumentError: an argument is out of range.
        """
        if n_jobs is not None and (not isinstance(n_jobs, int | np.integer) or n_jobs == 0):
            raise InvalidArgumentError(
                "n_jobs", f"{n_jobs!r}", remedy="pass a number of threads, or -1 for all"
            )
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = 1 if n_jobs is None else int(n_jobs)
        if threads < 0:
            threads = max((cpus or 1) + 1 + threads, 1)
        if block_bytes is None:
            block_bytes = BLOCK_BYTES
        block_bytes = as_integer("block_bytes", block_bytes, None)
        if block_bytes < 2**16:
            raise InvalidArgumentError(
                "block_bytes", f"{block_bytes} is too small", remedy="pass at least 64 KiB"
            )
        if tile_rows is not None and not (
            128 <= tile_rows <= MAX_TILE_ROWS and tile_rows % 128 == 0
        ):
            raise InvalidArgumentError(
                "tile_rows", f"{tile_rows}", remedy="pass a multiple of 128, at most 65536"
            )
        return cls(block_bytes, threads, tile_rows)


@dataclass(eq=False)
class Searcher:
    """Rows to search under one metric; prepared data is reused by later calls.

    Attributes:
        right: the rows.
        metric: a metric's name, or a `Semiring`.
        metric_options: keyword arguments of the metric.
        device: a CUDA device to compute on, or None; chebyshev and semirings stay on the CPU.
    """

    right: Rows
    metric: str | Semiring
    metric_options: dict[str, Any]
    limits: Limits
    argument: str = "B"
    device: Any = None
    _prepared: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = Options()
        if isinstance(self.metric, Semiring):
            if self.metric_options:
                raise InvalidArgumentError(
                    next(iter(self.metric_options)), "not an argument of a Semiring"
                )
            return
        self.metric = metrics.metric_name(self.metric)
        self.options = metrics.check_options(self.metric, self.metric_options)
        metrics.check_domain(self.metric, self.right, self.argument)

    def against(self, left: Rows, argument: str = "A") -> SearchRun:
        """Return the search with the rows of `left` as queries.

        Raises:
            InvalidArgumentError: other columns, or values that the metric is not defined for.
        """
        names = argument, self.argument if self.argument != argument else "the fitted matrix"
        left, right = same_columns(left, self.right, names)
        # With many columns, column numbers and so the index are only valid for this pair.
        cached = self._prepared if right.width == right.columns else {}
        if isinstance(self.metric, Semiring):
            if "columns" not in cached:
                cached["columns"] = ByColumn(right.as_type(np.float64))
            semiring, columns = self.metric, cached["columns"]
            return SearchRun(
                left, right, self.limits, np.dtype(np.float64),
                lambda slab: SemiringSearch(semiring, slab, columns),
            )  # fmt: skip
        metrics.check_domain(self.metric, left, argument)
        if self.metric == "chebyshev":
            dtype = np.result_type(left.data, right.data)
            return SearchRun(
                left, right, self.limits, dtype, lambda slab: ChebyshevSearch(slab, right, dtype)
            )
        non_negative = all(not rows.nnz or rows.data.min() >= 0 for rows in (left, right))
        plan = metrics.plan_of(self.metric, self.options, right.columns, non_negative)
        dtype = _working_type(plan, left, right)
        library = None if self.device is not None else kernels.native()
        key = (plan.ops, dtype, library is not None)
        if key not in cached:
            cached[key] = self._prepare(right, plan, dtype, library)
        prepared, side = cached[key]

        def engine(slab: Rows) -> Engine:
            query_side = plan.left(slab).as_type(dtype)
            if self.device is not None:
                sides = (slab, query_side), (right, prepared)
                return DeviceSearch(
                    plan, *sides, NEAR_ZERO, self.device, self.limits.block_bytes
                )  # fmt: skip
            if library is None:
                return ReferenceSearch(plan, (slab, query_side), (prepared, side), NEAR_ZERO)
            queries = kernels.Queries.of(slab, query_side, prepared)
            return kernels.NativeSearch(library, plan, prepared, queries, NEAR_ZERO)

        index = prepared if library is not None else None
        return SearchRun(left, right, self.limits, dtype, engine, index, self.device)

    def _prepare(
        self, right: Rows, plan: MetricPlan, dtype: np.dtype[Any], library: Any
    ) -> tuple[Any, Side]:
        """Return the searched rows in an engine's format, and their side of the plan."""
        side = plan.right(right).as_type(dtype)
        if self.device is not None:
            return OnDevice.of(right, side, self.device), side
        if library is None:
            return ByColumn(right), side
        return build_index(right, plan, side, _tile(self.limits, plan, dtype)), side


@dataclass(frozen=True, eq=False)
class SearchRun:
    """Queries and rows, ready for computation in blocks.

    Attributes:
        dtype: dtype of the distances.
        engine: makes the engine for some of the queries.
        index: the searched rows by columns, if the compiled kernels are used.
        device: device of distance blocks, which are torch tensors; None for NumPy arrays.
    """

    left: Rows
    right: Rows
    limits: Limits
    dtype: np.dtype[Any]
    engine: Callable[[Rows], Engine]
    index: Index | None = None
    device: Any = None

    def empty(self, queries: int) -> Any:
        """Return uninitialised memory for the distances of this many queries: [queries, rows]."""
        shape = (queries, len(self.right))
        if self.device is None:
            return np.empty(shape, self.dtype)
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=getattr(torch, self.dtype.name), device=self.device)

    def distances(self, out: Floats, first: int = 0, last: int | None = None) -> None:
        """Write the distances of queries ``first <= i < last`` to ``out[i - first]``."""
        for begin, end, engine, ranges in self._calls(first, last):
            engine.distances(ranges, self.limits.threads, out[begin - first : end - first])

    def nearest(self, k: int) -> tuple[Floats, Int64s]:
        """Return distances and rows of the `k` nearest of every query, [queries, k], sorted."""
        distance = np.empty((len(self.left), k), self.dtype)
        row = np.empty((len(self.left), k), np.int64)
        for begin, end, engine, ranges in self._calls(0, None):
            distance[begin:end], row[begin:end] = engine.nearest(ranges, self.limits.threads, k)
        return distance, row

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, Floats]]:
        """Yield blocks of distances in order, with the index of their first query.

        Args:
            rows: rows per block; by default as many as `Limits.block_bytes` holds.
        """
        dtype = self.dtype
        per_row = max(len(self.right), 1) * dtype.itemsize
        step = rows or max(1, min(len(self.left), self.limits.block_bytes // per_row))
        for first in range(0, len(self.left), step):
            last = min(first + step, len(self.left))
            block = self.empty(last - first)
            self.distances(block, first, last)
            yield first, block

    def work(self) -> npt.NDArray[np.float64]:
        """Return the multiply-adds of each query, [queries]: the entries in its columns."""
        return self._work(self.left)

    def _work(self, queries: Rows) -> npt.NDArray[np.float64]:
        return queries.sums(self.right.frequency[queries.indices])

    def _calls(self, first: int, last: int | None) -> Iterator[tuple[int, int, Engine, Int64s]]:
        """Yield queries in order, grouped into native calls, with their split over threads."""
        last = len(self.left) if last is None else last
        if first >= last or not len(self.right):
            return
        # One half of the budget is for copies of the queries, the other for their sums.
        entries = self.limits.block_bytes / 2 / _ENTRY_BYTES
        for begin, end in cut(self.left.indptr[first : last + 1], entries):
            begin, end = begin + first, end + first
            slab = self.left.slice(begin, end)
            engine = self.engine(slab)
            # A pair without a shared column also takes time.
            cost = self._work(slab) + len(self.right) / 8
            for low, high in cut(running(cost), _CALL_WORK):
                ranges = self._ranges(engine, cost[low:high]) + low
                yield begin + low, begin + high, engine, ranges

    def _ranges(self, engine: Engine, cost: npt.NDArray[np.float64]) -> Int64s:
        """Return ranges of queries computed at a time, int64 [ranges, 2], longest first."""
        threads = self.limits.threads
        share = self.limits.block_bytes // 2 // threads
        fit = share // max(engine.scratch_bytes(1), 1)
        max_queries = int(max(1, min(engine.at_once, fit)))
        done = running(cost)
        budget = np.inf if threads == 1 else done[-1] / (threads * _RANGES_PER_THREAD)
        ranges = np.array(list(cut(done, budget, max_queries)), np.int64).reshape(-1, 2)
        longest = np.argsort(-(done[ranges[:, 1]] - done[ranges[:, 0]]), kind="stable")
        return ranges[longest]


def running(cost: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the total cost of the first 0, 1, 2, ... queries."""
    return np.concatenate([[0.0], np.cumsum(cost, dtype=np.float64)])


def cut(
    done: npt.NDArray[Any], budget: float, most: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield parts of ``0 <= i < len(done) - 1`` in which ``done`` grows by at most `budget`.

    A part has at least one and at most `most` members.
    """
    count, begin = len(done) - 1, 0
    while begin < count:
        end = int(np.searchsorted(done, done[begin] + budget, side="right")) - 1
        end = min(max(end, begin + 1), count)
        if most is not None:
            end = min(end, begin + most)
        yield begin, end
        begin = end


def _tile(limits: Limits, plan: MetricPlan, dtype: np.dtype[Any]) -> int | None:
    """Return the requested tile, or None if each thread can hold the sums of a default one."""
    fits = (
        limits.block_bytes // 2 // limits.threads // (len(plan.ops) * dtype.itemsize) // 128 * 128
    )
    if limits.tile_rows is not None:
        return min(limits.tile_rows, max(fits, 128))
    return max(fits, 128) if fits < TILE_ROWS_OF_LISTS else None


def _working_type(plan: MetricPlan, left: Rows, right: Rows) -> np.dtype[Any]:
    """Return float32 if both matrices and the powers of their values fit into it, else float64.

    Raises:
        InvalidArgumentError: values are too large or too small even for float64.
    """
    sizes = [np.abs(rows.data) for rows in (left, right) if rows.nnz]
    low = min((float(size.min()) for size in sizes), default=1.0)
    high = max((float(size.max()) for size in sizes), default=1.0)
    if plan.name in NON_NEGATIVE:
        # Shares of a row's sum may be much smaller than the values.
        low /= max(1.0, *(float(rows.sums(rows.data).max(initial=0.0)) for rows in (left, right)))
    with np.errstate(over="ignore", under="ignore"):
        smallest, largest = np.power(low, plan.degree), np.power(high, plan.degree)
    if largest > _FLOAT64_HIGH:
        raise InvalidArgumentError(
            "A",
            f"{plan.name} of values as large as {high:g} overflows",
            remedy="divide A and B by their largest value",
        )
    _check_vanishing(plan, high)
    longest = max(int(rows.lengths.max(initial=0)) for rows in (left, right))
    narrow = (
        left.data.dtype == right.data.dtype == np.float32
        and smallest >= _FLOAT32_LOW
        and largest <= _FLOAT32_HIGH
        and longest < _FLOAT32_COUNT
    )
    return np.dtype(np.float32 if narrow else np.float64)


def _check_vanishing(plan: MetricPlan, high: float) -> None:
    """Raise InvalidArgumentError if powers of relevant differences, compared with `high`, are 0.

    Distances would then be 0 too, in float64; `high` is the largest value.
    """
    if plan.root is Root.PLAIN or plan.name in NON_NEGATIVE:
        return
    lost = float(np.finfo(np.float64).tiny) ** (1 / plan.degree)
    if lost <= _SMALL_SHARE * high:
        return
    raise InvalidArgumentError(
        "p" if plan.name == "minkowski" else "A",
        f"{plan.name} of values no larger than {high:g} treats differences below {lost:.2g} as 0",
        remedy="for p = inf use metric='chebyshev'" if plan.power > 2
        else "divide A and B by their largest value",
    )  # fmt: skip
