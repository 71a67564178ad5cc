"""ctypes bindings of ``native/include/slipstream/sparse.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.native import InstructionSet, cpu_features
from slipstream.native.family import INT32, INT64, POINTER, Family, array_pointer, structure
from slipstream.sparse.index import Index
from slipstream.sparse.matrix import Float64s, Floats, Int32s, Int64s, Rows
from slipstream.sparse.metrics import MetricPlan, Side

# Maximum queries per range, for which a block of dense columns is read once.
AT_ONCE = 256
_FAMILY = Family("sparse", {
    "sparse_level": [INT32],
    "sparse_scratch_bytes": [POINTER, INT64],
    "sparse_distances": [POINTER, POINTER, POINTER, INT64],
    "sparse_nearest": [POINTER, POINTER, INT64, POINTER, POINTER],
    "sparse_chebyshev": [POINTER, POINTER, POINTER, INT64],
}, {"sparse_scratch_bytes": INT64}, abi=1)  # fmt: skip
# Maximum value of slipstream_sparse_level for each instruction set.
_LEVELS = {
    InstructionSet.AVX2: 1, InstructionSet.AVXVNNI: 1, InstructionSet.AVX512BW: 2,
    InstructionSet.AVX512VNNI: 2, InstructionSet.AVX512: 2, InstructionSet.AMX: 2,
}  # fmt: skip

_Rows = structure("int64_t rows; void* indptr, column, value")
_Job = structure(
    """
    uint64_t struct_bytes; int32_t is_double, channels, op[2], finish, root, exact, reserved;
    double c0, c1, c2, c3, power, columns, near_zero;
    int64_t rows, tile_rows, head_columns, tail_columns;
    void* head[2], head_aux[2], tile_start, list_start, list_row, list_value[2], list_aux[2], v;
    int64_t queries;
    void* head_start, tail_start, head_column, tail_column;
    void* head_value[2], tail_value[2], head_value_aux[2], tail_value_aux[2], u, u1, u2;
    csr exact_a, exact_b
    """,
    csr=_Rows,
)
_Calls = structure(
    "uint64_t struct_bytes; int32_t level, threads; int64_t base, count; void* ranges;"
    "int64_t scratch_bytes; void* scratch"
)
_ChebyshevJob = structure(
    "uint64_t struct_bytes; int32_t non_negative, reserved; csr a, b; void* order_a, order_b",
    csr=_Rows,
)
# Members of a job with the name of their source.
_OF_PLAN = ("finish", "root", "exact", "c0", "c1", "c2", "c3", "power")
_OF_INDEX = ("tile_start", "list_start", "list_row")
_OF_INDEX_BY_CHANNEL = ("head", "head_aux", "list_value", "list_aux")
_OF_QUERIES = ("head_start", "tail_start", "head_column", "tail_column")
_OF_QUERIES_BY_CHANNEL = ("head_value", "tail_value", "head_value_aux", "tail_value_aux")


def native() -> ctypes.CDLL | None:
    """Return the compiled library, if it exists and has these kernels."""
    compiled: ctypes.CDLL | None = _FAMILY.library
    return compiled


def level() -> int:
    """Return the instruction set of the kernels: 0 baseline, 1 AVX2, 2 AVX-512 (F, BW, DQ, VL)."""
    loaded = native()
    allowed = _LEVELS.get(cpu_features().best, 0)
    return 0 if loaded is None else int(loaded.slipstream_sparse_level(allowed))


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries with their entries in columns of an index, split into dense and listed columns."""

    rows: Rows
    side: Side
    head_start: Int64s
    tail_start: Int64s
    head_column: Int32s
    tail_column: Int32s
    head_value: tuple[Floats, ...]
    tail_value: tuple[Floats, ...]
    head_value_aux: tuple[Floats | None, ...]
    tail_value_aux: tuple[Floats | None, ...]

    @classmethod
    def of(cls, rows: Rows, side: Side, index: Index) -> Queries:
        head, tail = index.head_of[rows.indices], index.tail_of[rows.indices]
        in_head, in_tail = head >= 0, tail >= 0
        return cls(
            rows, side, _starts(rows, in_head), _starts(rows, in_tail), head[in_head],
            tail[in_tail], tuple(values[in_head] for values in side.channels),
            tuple(values[in_tail] for values in side.channels),
            tuple(None if values is None else values[in_head] for values in side.aux),
            tuple(None if values is None else values[in_tail] for values in side.aux),
        )  # fmt: skip


def _starts(rows: Rows, chosen: npt.NDArray[np.bool_]) -> Int64s:
    before = np.zeros(rows.nnz + 1, np.int64)
    np.cumsum(chosen, out=before[1:])
    return before[rows.indptr]


class _NativeCalls:
    """Calls of the compiled kernels for one job, on one or more threads.

    Args:
        job: the input of the kernels.
        owners: objects that own the memory which the job points to.
    """

    def __init__(self, loaded: ctypes.CDLL, level: int, job: Any, owners: Sequence[object]) -> None:
        self._library, self._level, self._job, self._owners = loaded, level, job, owners
        job.struct_bytes = ctypes.sizeof(job)

    def scratch_bytes(self, queries: int) -> int:
        """Return the working memory of a call with this many queries."""
        return int(self._library.slipstream_sparse_scratch_bytes(ctypes.byref(self._job), queries))

    def _call(self, function: str, ranges: Int64s, threads: int, *arguments: object) -> None:
        """
        Args:
            ranges: int64 [calls, 2]; first and last + 1 of the queries computed at a time. They
                partition ``base <= i < base + queries``, in any order.
        """
        ranges = np.ascontiguousarray(ranges, np.int64)
        threads = max(1, min(threads, len(ranges)))
        scratch_bytes = self.scratch_bytes(int((ranges[:, 1] - ranges[:, 0]).max()))
        scratch = np.zeros(threads * scratch_bytes, np.uint8)
        calls = _Calls(
            ctypes.sizeof(_Calls), self._level, threads, int(ranges.min()), len(ranges),
            array_pointer(ranges), scratch_bytes, array_pointer(scratch),
        )  # fmt: skip
        compiled = getattr(self._library, f"slipstream_sparse_{function}")
        if compiled(ctypes.byref(self._job), ctypes.byref(calls), *arguments):
            # The arrays are not the user's, so this is a defect here.
            raise SlipstreamError(
                "the distance kernels refused their input",
                remedy="report this as a defect of slipstream",
            )


class NativeSearch(_NativeCalls):
    """Queries against an index, by the compiled kernels."""

    def __init__(
        self,
        loaded: ctypes.CDLL,
        plan: MetricPlan,
        index: Index,
        queries: Queries,
        near_zero: float,
    ) -> None:
        self.rows, self.dtype = len(index.rows), index.dtype
        self.at_once = AT_ONCE
        side = queries.side
        job = _Job(
            is_double=index.dtype == np.float64, channels=len(plan.ops), op=(INT32 * 2)(*plan.ops),
            **{name: getattr(plan, name) for name in _OF_PLAN},
            columns=float(max(plan.columns, 1)), near_zero=near_zero, rows=len(index.rows),
            tile_rows=index.tile_rows, head_columns=index.head_columns,
            tail_columns=index.tail_columns,
            **{name: array_pointer(getattr(index, name)) for name in _OF_INDEX},
            **{name: _pointers(getattr(index, name)) for name in _OF_INDEX_BY_CHANNEL},
            v=array_pointer(index.term), queries=len(queries.rows),
            **{name: array_pointer(getattr(queries, name)) for name in _OF_QUERIES},
            **{name: _pointers(getattr(queries, name)) for name in _OF_QUERIES_BY_CHANNEL},
            u=array_pointer(side.term), u1=array_pointer(side.term1), u2=array_pointer(side.term2),
            exact_a=_csr(queries.rows, side.exact), exact_b=_csr(index.rows, index.side.exact),
        )  # fmt: skip
        super().__init__(loaded, level(), job, [plan, index, queries])

    def distances(self, ranges: Int64s, threads: int, out: Floats) -> None:
        """Write ``out[i - base, j]`` for the queries of `ranges`; its rows are contiguous."""
        stride = out.strides[0] // out.itemsize
        self._call("distances", ranges, threads, array_pointer(out), stride)

    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]:
        """Return distances and rows of the `k` nearest, [queries, k], the nearest first."""
        queries = int(ranges.max() - ranges.min())
        distance, row = np.empty((queries, k), self.dtype), np.empty((queries, k), np.int64)
        self._call("nearest", ranges, threads, k, array_pointer(distance), array_pointer(row))
        return distance, row


class NativeChebyshev(_NativeCalls):
    """The largest difference over all columns, from queries to rows; both float64."""

    def __init__(
        self, loaded: ctypes.CDLL, left: Rows, right: Rows, orders: tuple[Int32s, Int32s]
    ) -> None:
        self._width = max(left.width, 1)
        job = _ChebyshevJob(
            non_negative=all(not r.nnz or float(r.data.min()) >= 0 for r in (left, right)),
            a=_csr(left, left.data), b=_csr(right, right.data),
            order_a=array_pointer(orders[0]), order_b=array_pointer(orders[1]),
        )  # fmt: skip
        super().__init__(loaded, 0, job, [left, right, orders])

    def scratch_bytes(self, queries: int) -> int:
        return self._width * 8

    def distances(self, ranges: Int64s, threads: int, out: Float64s) -> None:
        """Write ``out[i - base, j]``; see `NativeSearch.distances`."""
        self._call("chebyshev", ranges, threads, array_pointer(out), out.shape[1])


def _csr(rows: Rows, values: Floats) -> Any:
    return _Rows(
        len(rows), array_pointer(rows.indptr), array_pointer(rows.indices), array_pointer(values)
    )


def _pointers(arrays: tuple[npt.NDArray[Any] | None, ...]) -> Any:
    return (POINTER * 2)(*[array_pointer(array) for array in arrays[:2]])
