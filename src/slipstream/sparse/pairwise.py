"""All distances between the rows of two matrices, whole or in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.sparse.device import as_tensor, device_of
from slipstream.sparse.matrix import as_rows
from slipstream.sparse.search import Limits, Searcher, SearchRun
from slipstream.sparse.semiring import Semiring


def pairwise_distances(
    A: Any,
    B: Any = None,
    metric: str | Semiring = "euclidean",
    *,
    out: Any = None,
    n_jobs: int | None = None,
    block_bytes: int | None = None,
    **options: Any,
) -> Any:
    """Return distances between every row of `A` and every row of `B`.

    Args:
        A: [m, columns]: SciPy sparse (any format, array or matrix, 32- or 64-bit indices), torch
            sparse CSR or COO, or dense. Never changed. Duplicate entries are added, explicit zeros
            dropped.
        B: [n, columns], on the same device as `A`; by default `A`.
        metric: one of `METRICS`, an alias (``l1``, ``cityblock``, ...) or a `Semiring`.
        out: array for the result: [m, n] of the type that would be returned, rows contiguous.
        n_jobs: threads: None is one, -1 all.
        block_bytes: working memory in addition to inputs, index of `B` and result; by default
            64 MiB.
        options: ``p`` of minkowski; ``normalise`` of hellinger, jensenshannon, kl,
            kl_intersection; ``smoothing`` of kl.

    Returns:
        [m, n]: float32 if both are float32 (or float16, bfloat16, bool, small integers), else
        float64. float64 distances are within 1e-10 of the formula, float32 ones within 1e-5 of the
        scale of the rows' norms; those of identical rows are 0. Bitwise equal for any number of
        threads and any `block_bytes`. A NumPy array; for tensors on a CUDA device a tensor there,
        computed by Triton kernels (``chebyshev`` and semirings on the CPU).

    Raises:
        InvalidArgumentError: NaN, infinity, different numbers of columns, negative values for a
            metric that is not defined for them, or an unknown metric; a ValueError.
        MissingExtraError: tensors are on a CUDA device, and Triton is not installed.
    """
    device = device_of(A=A, B=B)
    run = _run(A, B, metric, Limits.of(n_jobs, block_bytes), options, device)
    shape = (len(run.left), len(run.right))
    if device is not None and out is not None:
        raise InvalidArgumentError("out", "is for matrices on the CPU")
    if out is None:
        try:
            out = run.empty(shape[0])
        except MemoryError as error:
            raise InvalidArgumentError(
                "A",
                f"{shape[0]:,} x {shape[1]:,} distances do not fit into memory",
                remedy="use distance_tiles for blocks, or NearestNeighbors for only the nearest",
            ) from error
    elif not isinstance(out, np.ndarray):
        raise InvalidArgumentError("out", f"is a {type(out).__name__}, not a NumPy array")
    elif out.shape != shape or out.dtype != run.dtype or out.strides[1] != out.itemsize:
        raise InvalidArgumentError(
            "out",
            f"{out.dtype} {list(out.shape)}, not {run.dtype} {list(shape)} with contiguous rows",
        )
    elif not out.flags.writeable:
        raise InvalidArgumentError("out", "is read-only")
    run.distances(out)
    return as_tensor(out, device)


@dataclass(frozen=True, eq=False)
class Tile:
    """A block of rows of the distance matrix.

    Attributes:
        first: index of its first row in A.
        distances: [rows, n], see `pairwise_distances`.
    """

    first: int
    distances: Any


def distance_tiles(
    A: Any,
    B: Any = None,
    metric: str | Semiring = "euclidean",
    *,
    rows: int | None = None,
    n_jobs: int | None = None,
    block_bytes: int | None = None,
    **options: Any,
) -> Iterator[Tile]:
    """Yield `pairwise_distances` in blocks of rows, in order.

    Args:
        rows: rows of A per tile; by default as many as `block_bytes` holds.

    Raises:
        InvalidArgumentError: `pairwise_distances` raises it, or `rows` is not positive.
    """
    if rows is not None:
        rows = as_integer("rows", rows)
    device = device_of(A=A, B=B)
    run = _run(A, B, metric, Limits.of(n_jobs, block_bytes), options, device)
    return (Tile(first, as_tensor(block, device)) for first, block in run.blocks(rows))


def _run(
    A: Any,
    B: Any,
    metric: str | Semiring,
    limits: Limits,
    options: dict[str, Any],
    device: Any,
) -> SearchRun:
    left = as_rows(A, "A")
    right = left if B is None else as_rows(B, "B")
    argument = "A" if B is None else "B"
    return Searcher(right, metric, options, limits, argument, device).against(left, "A")
