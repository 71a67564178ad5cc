"""Distances on a CUDA device: selection of the device, and the kernels of `_triton` as an engine.

Row terms are computed on the CPU as for every engine; they take time linear in the entries.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.native import triton_module
from slipstream.sparse.matrix import Floats, Int64s, Rows
from slipstream.sparse.metrics import Exact, MetricPlan, Side

if TYPE_CHECKING:
    import torch

# Queries of a dense tile, one cache line of float32; entries of a row at a time.
_TILE, _CHUNK = 32, 32


def device_of(**matrices: Any) -> Any:
    """Return the CUDA device of the tensors among `matrices`, or None.

    Raises:
        InvalidArgumentError: only some are on it; the error names one that is not.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    present = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    places = {
        name: matrix.device if isinstance(matrix, torch.Tensor) else torch.device("cpu")
        for name, matrix in present.items()
    }
    device = next((place for place in places.values() if place.type == "cuda"), None)
    for name, place in places.items():
        if device is not None and place != device:
            raise InvalidArgumentError(
                name,
                f"is on {place}, the other matrix on {device}",
                remedy="move one of them to the other device",
            )
    return device


def as_tensor(values: Any, device: Any) -> Any:
    """Move `values` to `device`; None leaves them unchanged."""
    if device is None or not isinstance(values, np.ndarray):
        return values
    return importlib.import_module("torch").from_numpy(values).to(device)


def _kernels() -> Any:
    module = triton_module("slipstream.sparse._triton")
    if module is None:
        raise MissingExtraError("a distance on a CUDA device", "triton", "triton")
    return module


@dataclass(frozen=True, eq=False)
class OnDevice:
    """One side of a plan as tensors: rows with the values to multiply, and their terms."""

    starts: torch.Tensor
    columns: torch.Tensor
    channels: tuple[torch.Tensor, ...]
    exact: torch.Tensor
    term: torch.Tensor
    term1: torch.Tensor
    term2: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, side: Side, device: Any) -> OnDevice:
        dtype = side.exact.dtype

        def term(values: npt.NDArray[Any] | None) -> Any:
            return as_tensor((side.term if values is None else values).astype(dtype), device)

        return cls(
            as_tensor(rows.indptr, device), as_tensor(rows.indices, device),
            tuple(as_tensor(values, device) for values in side.channels),
            as_tensor(side.exact, device), term(None), term(side.term1), term(side.term2),
        )  # fmt: skip


class DeviceSearch:
    """Queries against rows by Triton's kernels; distances are written to a tensor of the device."""

    at_once = 2**20

    def __init__(
        self, plan: MetricPlan, left: tuple[Rows, Side], right: tuple[Rows, OnDevice],
        near_zero: float, device: Any, block_bytes: int,
    ) -> None:  # fmt: skip
        self.plan, self.device, self.block_bytes = plan, device, block_bytes
        self.left, side = left
        self.right, self._b = right
        self.rows, self.dtype = len(self.right), side.exact.dtype
        self._a = OnDevice.of(self.left, side, device)
        c = (plan.c0, plan.c1, plan.c2, plan.c3, plan.power, max(plan.columns, 1), near_zero)
        self._constants = as_tensor(np.array(c, self.dtype), device)
        self._constants64 = as_tensor(np.array(c, np.float64), device)
        longest = max(int(rows.lengths.max(initial=0)) for rows in (self.left, self.right))
        self._steps = longest.bit_length()
        self._row = as_tensor(self.left.repeat(np.arange(len(self.left))), device)

    def scratch_bytes(self, queries: int) -> int:
        return 0

    def distances(self, ranges: Int64s, threads: int, out: Any) -> None:
        """Write ``out[i - base, j]``, a tensor, for the queries of `ranges`, [calls, 2]."""
        base, end = int(ranges.min()), int(ranges.max())
        for first in range(base, end, self._piece):
            last = min(first + self._piece, end)
            self._distances(first, last, out[first - base : last - base])

    def nearest(self, ranges: Int64s, threads: int, k: int) -> tuple[Floats, Int64s]:
        """Return distances and rows of the `k` nearest, [queries, k]; ties by the lower row."""
        torch = importlib.import_module("torch")
        base, end = int(ranges.min()), int(ranges.max())
        distance, row = np.empty((end - base, k), self.dtype), np.empty((end - base, k), np.int64)
        for first in range(base, end, self._piece):
            last = min(first + self._piece, end)
            block = torch.empty((last - first, self.rows), dtype=self._dtype, device=self.device)
            self._distances(first, last, block)
            block[block.isnan()] = torch.inf
            # Stable: among equals the lower row comes first, which topk() does not guarantee.
            sorted_block = torch.sort(block, dim=1, stable=True)
            distance[first - base : last - base] = sorted_block.values[:, :k].cpu().numpy()
            row[first - base : last - base] = sorted_block.indices[:, :k].cpu().numpy()
        return distance, row

    @property
    def _dtype(self) -> Any:
        return self._constants.dtype

    @property
    def _piece(self) -> int:
        """Number of queries whose dense tiles and distances fit the budget; at least one tile."""
        dense = self.right.width * len(self.plan.ops) * self.dtype.itemsize
        query_bytes = dense + self.rows * (3 * self.dtype.itemsize + 8)
        return max(1, self.block_bytes // (query_bytes * _TILE)) * _TILE

    def _distances(self, first: int, last: int, out: Any) -> None:
        torch = importlib.import_module("torch")
        with torch.cuda.device_of(out):
            self._launch(first, last, out)

    def _launch(self, first: int, last: int, out: Any) -> None:
        torch = importlib.import_module("torch")
        plan, a, b = self.plan, self._a, self._b
        queries, width = last - first, self.right.width
        tiles = -(-queries // _TILE)
        entries = slice(int(self.left.indptr[first]), int(self.left.indptr[last]))
        row, column = self._row[entries] - first, a.columns[entries].to(torch.int64)
        place = (row // _TILE * width + column) * _TILE + row % _TILE
        dense = []
        for values in a.channels:
            tile = torch.zeros(tiles * width * _TILE, dtype=self._dtype, device=self.device)
            tile[place] = values[entries]
            dense.append(tile)
        cancelled = torch.zeros((queries, self.rows), dtype=torch.int8, device=self.device)
        _kernels().distances[self.rows, tiles](
            out, cancelled, b.starts, b.columns, b.channels[0], b.channels[-1], dense[0], dense[-1],
            a.term[first:], a.term1[first:], a.term2[first:], b.term, self._constants, queries,
            self.rows, width, out.stride(0), channels=len(plan.ops), op=int(plan.ops[0]),
            op2=int(plan.ops[-1]), finish=int(plan.finish), root=int(plan.root), tile=_TILE,
            chunk=_CHUNK,
        )  # fmt: skip
        if plan.exact is Exact.NEVER:
            return
        pairs = cancelled.nonzero().contiguous()
        if len(pairs):
            _kernels().again[(len(pairs),)](
                out, pairs, out.stride(0), a.starts[first:], a.columns, a.exact, b.starts,
                b.columns, b.exact, a.term1[first:], b.term, self._constants64, self._steps,
                exact=int(plan.exact), finish=int(plan.finish), root=int(plan.root), chunk=_CHUNK,
            )  # fmt: skip
