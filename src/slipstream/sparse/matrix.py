"""Sparse rows in one canonical form for every input type; inputs are never changed."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from slipstream.errors import InvalidArgumentError

Floats = npt.NDArray[np.floating[Any]]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

# Types whose values are exact in float32; all others are computed in float64.
_IN_FLOAT32 = (np.float16, np.float32, np.bool_, np.int8, np.uint8, np.int16, np.uint16)
# Tables have an entry for every column; beyond this number, only used columns are numbered.
_FEW_COLUMNS = 2**22


@dataclass(frozen=True, eq=False)
class Rows:
    """Canonical CSR: columns ascend within a row, no duplicates, no explicit zeros.

    Attributes:
        indptr: int64 [rows + 1].
        indices: int32 [nnz]; in ``range(width)``.
        data: float32 or float64 [nnz], finite.
        width: number of numbered columns.
        columns: columns of the input matrix; more than `width` if unused columns have no number.
    """

    indptr: Int64s
    indices: npt.NDArray[np.integer[Any]]
    data: Floats
    width: int
    columns: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        return len(self.data)

    @property
    def lengths(self) -> Int64s:
        """Number of entries of each row, int64 [rows]."""
        return np.diff(self.indptr)

    @functools.cached_property
    def frequency(self) -> Int64s:
        """Number of rows with each column, int64 [width]."""
        return np.bincount(self.indices, minlength=self.width)

    def sums(self, values: npt.NDArray[Any]) -> Float64s:
        """Return float64 sums of `values` [nnz] over each row, added from left to right."""
        rows = self.repeat(np.arange(len(self)))
        return np.bincount(rows, weights=values, minlength=len(self)).astype(np.float64)

    def repeat(self, per_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `per_row` [rows] once for every entry, [nnz]."""
        return np.repeat(per_row, self.lengths)

    def with_data(self, data: Floats) -> Rows:
        """Return the same entries with other values."""
        return replace(self, data=data)

    def as_type(self, dtype: npt.DTypeLike) -> Rows:
        """Return the rows in `dtype`; this object if they have it."""
        return self if self.data.dtype == dtype else self.with_data(self.data.astype(dtype))

    def slice(self, first: int, last: int) -> Rows:
        """Return rows ``first <= i < last``, sharing memory."""
        begin, end = int(self.indptr[first]), int(self.indptr[last])
        return replace(
            self,
            indptr=self.indptr[first : last + 1] - begin,
            indices=self.indices[begin:end],
            data=self.data[begin:end],
        )

    def to_scipy(self) -> sp.csr_matrix:
        """Return a ``scipy.sparse.csr_matrix`` [rows, width], sharing memory."""
        return sp.csr_matrix(
            (self.data, self.indices, self.indptr), shape=(len(self), self.width), copy=False
        )


def as_rows(matrix: Any, argument: str) -> Rows:
    """Return rows of a SciPy sparse matrix or array, a torch sparse tensor, or a dense array.

    Args:
        matrix: [rows, columns]; duplicate entries are added, explicit zeros dropped.
        argument: its name in errors.

    Raises:
        InvalidArgumentError: it is not a matrix of real numbers, or has NaN, infinity or invalid
            indices.
    """
    csr = _to_csr(matrix, argument)
    if csr.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            argument, f"values of type {csr.dtype}", remedy="pass real numbers"
        )
    columns = csr.shape[1]
    _check_structure(csr, argument)
    small = csr.dtype.type in _IN_FLOAT32
    data = csr.data.astype(np.float32 if small else np.float64, copy=False)
    clean = sp.csr_matrix((data, csr.indices, csr.indptr), shape=csr.shape, copy=False)
    _check_finite(clean, argument)
    in_order = _is_canonical(clean)
    if not in_order or (data.size and not data.all()):
        clean = clean.copy()
        clean.sum_duplicates()
        clean.eliminate_zeros()
        _check_finite(clean, argument)  # again: sums of finite entries may overflow
    return Rows(clean.indptr.astype(np.int64), clean.indices, clean.data, columns, columns)


def _check_finite(matrix: sp.csr_matrix, argument: str) -> None:
    finite = np.isfinite(matrix.data)
    if finite.all():
        return
    at = int(finite.argmin())
    row = int(np.searchsorted(matrix.indptr, at, side="right")) - 1
    what = "NaN" if np.isnan(matrix.data[at]) else "infinity"
    raise InvalidArgumentError(
        argument,
        f"contains {what} (row {row}, column {matrix.indices[at]})",
        remedy="leave such entries out or replace them",
    )


def of_tensor(matrix: Any, argument: str) -> Any:
    """Return a torch tensor as SciPy's or NumPy's; any other object unchanged.

    Raises:
        InvalidArgumentError: a tensor of another layout, or not of two dimensions.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(matrix, torch.Tensor):
        return matrix
    if matrix.dim() != 2 or (matrix.layout is torch.sparse_coo and matrix.dense_dim()):
        dense = matrix.dense_dim() if matrix.layout is torch.sparse_coo else 0
        what = "has dense dimensions" if dense else f"has {matrix.dim()} dimensions, not two"
        raise InvalidArgumentError(argument, what, remedy="pass a tensor [rows, columns]")
    return _from_torch(torch, matrix.detach().cpu(), argument)


def _to_csr(matrix: Any, argument: str) -> Any:
    matrix = of_tensor(matrix, argument)
    if sp.issparse(matrix):
        if matrix.ndim != 2:
            raise InvalidArgumentError(
                argument, f"has {matrix.ndim} dimensions, not two", remedy="pass [rows, columns]"
            )
        return matrix.tocsr()
    try:
        dense = np.asarray(matrix)
    except ValueError as error:
        raise InvalidArgumentError(argument, "its rows differ in length") from error
    if dense.ndim != 2:
        raise InvalidArgumentError(
            argument,
            f"has {dense.ndim} dimensions, not two",
            remedy="pass a sparse matrix of rows to compare; one row is matrix[i:i+1]",
        )
    if dense.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            argument, f"values of type {dense.dtype}", remedy="pass real numbers"
        )
    # SciPy has no float16.
    return sp.csr_matrix(dense.astype(np.float32) if dense.dtype == np.float16 else dense)


def _from_torch(torch: Any, tensor: Any, argument: str) -> Any:
    if tensor.layout is torch.strided:
        return _values(torch, tensor)
    if tensor.layout is torch.sparse_csr:
        parts = (tensor.col_indices().numpy(), tensor.crow_indices().numpy())
        return sp.csr_array((_values(torch, tensor.values()), *parts), shape=tuple(tensor.shape))
    # Not coalesce(): duplicates are added later for every kind of input.
    if tensor.layout is torch.sparse_coo:
        where = tuple(tensor._indices().numpy())
        return sp.coo_array((_values(torch, tensor._values()), where), shape=tuple(tensor.shape))
    raise InvalidArgumentError(
        argument, f"layout {tensor.layout}", remedy="use sparse_csr, sparse_coo or strided"
    )


def _values(torch: Any, tensor: Any) -> Any:
    # NumPy has no bfloat16 and SciPy no float16; float32 represents both exactly.
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if half else tensor).numpy()


def _check_structure(csr: Any, argument: str) -> None:
    rows, columns = csr.shape
    indptr, indices = csr.indptr, csr.indices
    pointers = (
        len(indptr) == rows + 1
        and indptr[0] == 0
        and indptr[-1] <= len(indices)
        and len(indices) == len(csr.data)
        and bool((indptr[1:] >= indptr[:-1]).all())
    )
    if not pointers:
        raise InvalidArgumentError(
            argument, "its row pointers do not ascend from 0 to the number of entries"
        )
    if len(indices) and (indices.min() < 0 or indices.max() >= columns):
        worst = int(indices.min() if indices.min() < 0 else indices.max())
        raise InvalidArgumentError(
            argument,
            f"column {worst} in a matrix of {columns} columns",
            remedy="use int64 indices if 32 bits overflowed",
        )


def _is_canonical(matrix: Any) -> bool:
    if len(matrix.indices) < 2:
        return True
    ascending = matrix.indices[1:] > matrix.indices[:-1]
    # The first column of a row may be smaller than the one before.
    begins = matrix.indptr[1:-1]
    ascending[begins[(begins > 0) & (begins < len(matrix.indices))] - 1] = True
    return bool(ascending.all())


def same_columns(left: Rows, right: Rows, names: tuple[str, str]) -> tuple[Rows, Rows]:
    """Return both with int32 column numbers of the same meaning.

    Args:
        names: their names in errors.

    Raises:
        InvalidArgumentError: they have different numbers of columns.
    """
    if left.columns != right.columns:
        raise InvalidArgumentError(
            names[0],
            f"{left.columns} columns, but {names[1]} has {right.columns}",
            remedy="build both with one vocabulary",
        )
    used = left.nnz + right.nnz
    if left.columns > max(_FEW_COLUMNS, 2 * used):
        used_columns = np.union1d(left.indices, right.indices)
        left, right = (
            replace(
                rows,
                indices=np.searchsorted(used_columns, rows.indices),
                width=max(len(used_columns), 1),
            )
            for rows in (left, right)
        )
    return _int32(left), _int32(right)


def _int32(rows: Rows) -> Rows:
    indices = np.ascontiguousarray(rows.indices, np.int32)
    return replace(rows, indices=indices, data=np.ascontiguousarray(rows.data))
