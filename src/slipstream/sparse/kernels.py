"""ctypes over ``native/include/slipstream/sparse.h``; nothing here decides anything."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.native import InstructionSet, cpu_features
from slipstream.native.family import (
    DOUBLE,
    INT32,
    INT64,
    POINTER,
    UINT64,
    Family,
    array_pointer,
)
from slipstream.sparse.index import Index
from slipstream.sparse.matrix import Float64s, Floats, Int32s, Int64s, Rows
from slipstream.sparse.metrics import Plan, Side

# Queries of a range, for which a block of dense columns is read once.
AT_ONCE = 256
_OK = 0
_i32, _i64, _u64, _f64, _ptr = INT32, INT64, UINT64, DOUBLE, POINTER
_FAMILY = Family("sparse", {
    "sparse_level": [_i32],
    "sparse_scratch_bytes": [_ptr, _i64],
    "sparse_distances": [_ptr, _ptr, _ptr, _i64],
    "sparse_nearest": [_ptr, _ptr, _i64, _ptr, _ptr],
    "sparse_chebyshev": [_ptr, _ptr, _ptr, _i64],
}, {"sparse_scratch_bytes": _i64}, abi=1)  # fmt: skip
# Of the numbers of slipstream_sparse_level, the one a named level allows.
_LEVELS = {InstructionSet.AVX2: 1, InstructionSet.AVX512BW: 2, InstructionSet.AVX512: 2}


class _Rows(ctypes.Structure):
    _fields_ = (("rows", _i64), ("indptr", _ptr), ("column", _ptr), ("value", _ptr))


class _Job(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("is_double", _i32),
        ("channels", _i32),
        ("op", _i32 * 2),
        ("finish", _i32),
        ("root", _i32),
        ("exact", _i32),
        ("reserved", _i32),
        ("c0", _f64),
        ("c1", _f64),
        ("c2", _f64),
        ("c3", _f64),
        ("power", _f64),
        ("columns", _f64),
        ("near_zero", _f64),
        ("rows", _i64),
        ("tile_rows", _i64),
        ("head_columns", _i64),
        ("tail_columns", _i64),
        ("head", _ptr * 2),
        ("head_aux", _ptr * 2),
        ("tile_start", _ptr),
        ("list_start", _ptr),
        ("list_row", _ptr),
        ("list_value", _ptr * 2),
        ("list_aux", _ptr * 2),
        ("v", _ptr),
        ("queries", _i64),
        ("head_start", _ptr),
        ("tail_start", _ptr),
        ("head_column", _ptr),
        ("tail_column", _ptr),
        ("head_value", _ptr * 2),
        ("tail_value", _ptr * 2),
        ("head_value_aux", _ptr * 2),
        ("tail_value_aux", _ptr * 2),
        ("u", _ptr),
        ("u1", _ptr),
        ("u2", _ptr),
        ("exact_a", _Rows),
        ("exact_b", _Rows),
    )


class _Calls(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("level", _i32),
        ("threads", _i32),
        ("base", _i64),
        ("count", _i64),
        ("ranges", _ptr),
        ("scratch_bytes", _i64),
        ("scratch", _ptr),
    )


class _ChebyshevJob(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("non_negative", _i32),
        ("reserved", _i32),
        ("a", _Rows),
        ("b", _Rows),
        ("order_a", _ptr),
        ("order_b", _ptr),
    )


def native() -> ctypes.CDLL | None:
    """The compiled library, if it is there and has these kernels."""
    compiled: ctypes.CDLL | None = _FAMILY.library
    return compiled


def level() -> int:
    """The instruction set the kernels use: 0 baseline, 1 AVX2, 2 AVX-512 (F, BW, DQ, VL)."""
    loaded = native()
    allowed = _LEVELS.get(cpu_features().best, 0)
    return 0 if loaded is None else int(loaded.slipstream_sparse_level(allowed))


@dataclass(frozen=True, eq=False)
class Queries:
    """The other side: each row's entries in columns of an index, dense and listed ones apart."""

    rows: Rows
    side: Side
    head_start: Int64s
    tail_start: Int64s
    head_column: Int32s
    tail_column: Int32s
    head_value: tuple[Floats, ...]
    tail_value: tuple[Floats, ...]
    head_aux: tuple[Floats | None, ...]
    tail_aux: tuple[Floats | None, ...]

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


class NativeSearch:
    """Queries against an index, by the compiled kernels. Calls may run on several threads."""

    def __init__(
        self, loaded: ctypes.CDLL, plan: Plan, index: Index, queries: Queries, near_zero: float
    ) -> None:
        self._library, self._level = loaded, level()
        self.rows, self.dtype = len(index.rows), index.dtype
        self.at_once = AT_ONCE
        side = queries.side
        # Everything a pointer leads to must outlive the calls.
        self._kept = [plan, index, queries]
        job = _Job(
            struct_bytes=ctypes.sizeof(_Job),
            is_double=index.dtype == np.float64,
            channels=len(plan.ops),
            op=(_i32 * 2)(*plan.ops),
            finish=plan.finish,
            root=plan.root,
            exact=plan.exact,
            c0=plan.c0,
            c1=plan.c1,
            c2=plan.c2,
            c3=plan.c3,
            power=plan.power,
            columns=float(max(plan.columns, 1)),
            near_zero=near_zero,
            rows=len(index.rows),
            tile_rows=index.tile_rows,
            head_columns=index.head_columns,
            tail_columns=index.tail_columns,
            head=_pointers(index.head),
            head_aux=_pointers(index.head_aux),
            tile_start=array_pointer(index.tile_start),
            list_start=array_pointer(index.list_start),
            list_row=array_pointer(index.list_row),
            list_value=_pointers(index.list_value),
            list_aux=_pointers(index.list_aux),
            v=array_pointer(index.term),
            queries=len(queries.rows),
            head_start=array_pointer(queries.head_start),
            tail_start=array_pointer(queries.tail_start),
            head_column=array_pointer(queries.head_column),
            tail_column=array_pointer(queries.tail_column),
            head_value=_pointers(queries.head_value),
            tail_value=_pointers(queries.tail_value),
            head_value_aux=_pointers(queries.head_aux),
            tail_value_aux=_pointers(queries.tail_aux),
            u=array_pointer(side.term),
            u1=array_pointer(side.term1),
            u2=array_pointer(side.term2),
            exact_a=_csr(queries.rows, side.exact),
            exact_b=_csr(index.rows, index.side.exact),
        )
        self._job = job

    def scratch_bytes(self, queries: int) -> int:
        """Working memory of a call with so many queries."""
        return int(self._library.slipstream_sparse_scratch_bytes(ctypes.byref(self._job), queries))

    def distances(self, ranges: Int64s, threads: int, out: Floats) -> None:
        """Writes ``out[i - base, j]`` for the queries of `ranges`; rows of `out` are contiguous.

        Args:
            ranges: int64 [calls, 2]; first and last + 1 of the queries computed at a time. They
                tile ``base <= i < base + len(out)``, in any order.
        """
        calls, alive = self._calls(ranges, threads)
        _check(
            self._library.slipstream_sparse_distances(
                ctypes.byref(self._job), ctypes.byref(calls), array_pointer(out),
                out.strides[0] // out.itemsize,
            )
        )  # fmt: skip
        del alive

    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]:
        """Distances and rows of the `k` nearest, [queries, k], the nearest first."""
        calls, alive = self._calls(ranges, threads)
        queries = int(ranges.max() - ranges.min())
        distance = np.empty((queries, k), self.dtype)
        row = np.empty((queries, k), np.int64)
        _check(
            self._library.slipstream_sparse_nearest(
                ctypes.byref(self._job),
                ctypes.byref(calls),
                k,
                array_pointer(distance),
                array_pointer(row),
            )
        )
        del alive
        return distance, row

    def _calls(self, ranges: Int64s, threads: int) -> tuple[_Calls, list[npt.NDArray[Any]]]:
        longest = int((ranges[:, 1] - ranges[:, 0]).max())
        return _calls(ranges, threads, self._level, self.scratch_bytes(longest))


class NativeChebyshev:
    """The largest difference over all columns, of queries to rows; both float64."""

    def __init__(
        self, loaded: ctypes.CDLL, left: Rows, right: Rows, orders: tuple[Int32s, Int32s]
    ) -> None:
        self._library, self._width = loaded, max(left.width, 1)
        self._kept = [left, right, orders]
        self._job = _ChebyshevJob(
            struct_bytes=ctypes.sizeof(_ChebyshevJob),
            non_negative=all(not r.nnz or float(r.data.min()) >= 0 for r in (left, right)),
            a=_csr(left, left.data),
            b=_csr(right, right.data),
            order_a=array_pointer(orders[0]),
            order_b=array_pointer(orders[1]),
        )

    def distances(self, ranges: Int64s, threads: int, out: Float64s) -> None:
        """Writes ``out[i - base, j]``; see `NativeSearch.distances`."""
        calls, alive = _calls(ranges, threads, 0, self._width * 8)
        _check(
            self._library.slipstream_sparse_chebyshev(
                ctypes.byref(self._job), ctypes.byref(calls), array_pointer(out), out.shape[1]
            )
        )
        del alive


def _calls(
    ranges: Int64s, threads: int, level: int, scratch_bytes: int
) -> tuple[_Calls, list[npt.NDArray[Any]]]:
    """How `ranges` are shared by threads, and what must outlive the call."""
    ranges = np.ascontiguousarray(ranges, np.int64)
    threads = max(1, min(threads, len(ranges)))
    scratch = np.zeros(threads * scratch_bytes, np.uint8)
    calls = _Calls(
        struct_bytes=ctypes.sizeof(_Calls),
        level=level,
        threads=threads,
        base=int(ranges.min()),
        count=len(ranges),
        ranges=array_pointer(ranges),
        scratch_bytes=scratch_bytes,
        scratch=array_pointer(scratch),
    )
    return calls, [ranges, scratch]


def _csr(rows: Rows, values: Floats) -> _Rows:
    return _Rows(
        len(rows), array_pointer(rows.indptr), array_pointer(rows.indices), array_pointer(values)
    )


def _pointers(arrays: tuple[npt.NDArray[Any] | None, ...]) -> Any:
    return (_ptr * 2)(*[array_pointer(array) for array in arrays[:2]])


def _check(status: int) -> None:
    if status != _OK:
        # The arrays were made by us, so this is a defect of ours.
        raise SlipstreamError(
            "the distance kernels refused their input",
            remedy="report this as a defect of slipstream",
        )
