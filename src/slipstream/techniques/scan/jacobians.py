"""Transposed Jacobians of layers as sparse matrices, and gradients of a chain of layers by a scan.

A row is an element of a layer's input, a column one of its output, in memory order of one sample.
The sparsity pattern follows from shapes alone. Away from an image's edges the rows of a convolution
are equal up to a shift, so indices and values are written in a few blocks, each a row broadcast
over a grid, at memory bandwidth.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import nn
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.tables import Field, Table
from slipstream.techniques.scan.affine import exclusive_scan

_Integers = NDArray[np.int64 | np.int32]
# Minimum share of non-zero weights for which the pattern of a dense convolution is used.
_MIN_DENSITY = 0.5


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of a grid of positions in a channel that reach outputs by the same taps.

    Attributes:
        start: number of the channel's entries before those of the first position.
        grid: number of positions along both axes.
        steps: number of entries from a position to the next, along both axes.
        taps: indices into a kernel, along both axes.
        columns: columns of the first row, in the first group.
        shifts: offset of each position's columns from those of the first, [*grid].
    """

    start: int
    grid: tuple[int, int]
    steps: tuple[int, int]
    taps: tuple[_Integers, ...]
    columns: _Integers
    shifts: _Integers

    def of(self, entries: NDArray[Any]) -> NDArray[Any]:
        """Return the block's view [channels, *grid, row] of `entries` [channels, entries]."""
        size = entries.itemsize
        strides = entries.strides[0], *(step * size for step in self.steps), size
        shape = len(entries), *self.grid, len(self.columns)
        return np.ndarray(shape, entries.dtype, entries, self.start * size, strides)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Sparsity pattern of a convolution's transposed Jacobian.

    Attributes:
        blocks: blocks of one input channel.
        counts: number of entries of each of the channel's positions.
        channels, groups: numbers of input channels and groups.
        shape: numbers of inputs and outputs.
    """

    blocks: list[_Block]
    counts: _Integers
    channels: int
    groups: int
    shape: tuple[int, int]

    def indices(self) -> tuple[_Integers, _Integers]:
        """Return the CSR matrix's indices and indptr."""
        indptr = np.concatenate([[0], np.cumsum(np.tile(self.counts, self.channels))])
        dtype = _index_type(max(int(indptr[-1]), *self.shape))
        indices = np.empty((self.channels, int(self.counts.sum())), dtype)
        group = np.repeat(np.arange(self.groups), self.channels // self.groups)
        group_offset = group * (self.shape[1] // self.groups)
        for block in self.blocks:
            first = np.add.outer(group_offset, block.columns).astype(dtype)[:, None, None]
            shifts = block.shifts.astype(dtype)[..., None]
            # Four times as fast as NumPy's broadcast sum.
            out = torch.from_numpy(block.of(indices))
            torch.add(torch.from_numpy(first), torch.from_numpy(shifts), out=out)
        return indices.reshape(-1), indptr

    def fill(self, values: NDArray[Any], weight: NDArray[Any]) -> None:
        """Write the matrix's data from the convolution's weight [O, I, kernel]."""
        by_channel = values.reshape(self.channels, -1)
        # [groups, inputs per group, outputs per group, kernel]
        transposed = weight.reshape(self.groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        for block in self.blocks:
            row = transposed[..., block.taps[0], block.taps[1]]
            block.of(by_channel)[:] = row.reshape(self.channels, 1, 1, -1)

    @property
    def entries(self) -> int:
        """Number of entries of all channels."""
        return self.channels * int(self.counts.sum())


def jacobian_transposed(
    layer: nn.Module, x: torch.Tensor, into: sparse.csr_matrix | None = None
) -> sparse.csr_matrix:
    """Return the transposed Jacobian of `layer` at a sample, [inputs, outputs], indices sorted.

    Args:
        layer: Conv2d, Linear, ReLU, MaxPool2d, AvgPool2d, Flatten or Identity.
        x: input of the layer, without a batch dimension.
        into: for a ReLU or a convolution of which most weights are not zero, the result of an
            earlier call with the same sizes; its values are overwritten, and it is returned.

    Raises:
        InvalidArgumentError: the layer or its padding is not supported, or `into` does not match.
    """
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise InvalidArgumentError("layer", "has a padding other than zeros of a given width")
        if int(layer.weight.count_nonzero()) < _MIN_DENSITY * layer.weight.numel():
            if into is not None:
                raise InvalidArgumentError(
                    "into", "cannot be reused for a pruned convolution, whose pattern changes"
                )
            return _pruned_convolution(layer, x)
        pattern = convolution_pattern(
            tuple(x.shape), layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
            layer.dilation, layer.groups,
        )  # fmt: skip
        weight: NDArray[Any] = layer.weight.detach().numpy()
        values = _values(into, pattern.entries, pattern.shape, weight.dtype)
        pattern.fill(values, weight)
        return _csr(values, *pattern.indices(), pattern.shape) if into is None else into
    if isinstance(layer, nn.ReLU):
        flat: NDArray[Any] = x.detach().reshape(-1).numpy()
        values = _values(into, len(flat), (len(flat), len(flat)), flat.dtype)
        # Writing to the final dtype avoids a mask, which would double the time.
        np.greater(flat, 0, out=values, casting="unsafe")
        return _diagonal(values) if into is None else into
    if into is not None:
        raise InvalidArgumentError("into", f"cannot be reused for {type(layer).__name__}")
    if isinstance(layer, nn.Linear):
        return sparse.csr_matrix(layer.weight.detach().numpy().T)
    if isinstance(layer, nn.Flatten | nn.Identity):
        return _diagonal(np.ones(x.numel(), _numpy(x.dtype)))
    if isinstance(layer, nn.MaxPool2d):
        return _max_pool(layer, x)
    if isinstance(layer, nn.AvgPool2d):
        return _average_pool(layer, x)
    raise InvalidArgumentError("layer", f"{type(layer).__name__} has no sparse Jacobian")


def _values(
    into: sparse.csr_matrix | None, count: int, shape: tuple[int, int], dtype: Any
) -> NDArray[Any]:
    """Return the array for a matrix's values: that of `into`, or a new one."""
    if into is None:
        return np.empty(count, dtype)
    if into.shape != shape or into.data.shape != (count,) or into.dtype != dtype:
        raise InvalidArgumentError(
            "into", f"has {into.nnz} entries, shape {into.shape} and {into.dtype}",
            remedy=f"pass {count} entries, shape {shape} and {dtype}, as an earlier call returned",
        )  # fmt: skip
    values: NDArray[Any] = into.data
    return values


@functools.lru_cache(maxsize=64)
def convolution_pattern(
    image: tuple[int, ...], outputs: int, kernel: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], groups: int,
) -> _Pattern:  # fmt: skip
    """Return the pattern of a convolution's transposed Jacobian for an image [C, H, W].

    In a row, columns increase with the output's channel, then with its position, which increases as
    the tap decreases.
    """
    channels, height, width = image
    runs_y, counts_y, out_y = _axis(height, kernel[0], stride[0], padding[0], dilation[0])
    runs_x, counts_x, out_x = _axis(width, kernel[1], stride[1], padding[1], dilation[1])
    of_group, line = outputs // groups, int(counts_x.sum())
    channel = np.arange(of_group)[:, None, None] * (out_y * out_x)
    blocks = [
        _Block(
            of_group * (y.start * line + len(y.taps) * x.start), (y.positions, x.positions),
            (of_group * y.step * line, of_group * len(y.taps) * x.step), np.ix_(y.taps, x.taps),
            (channel + np.add.outer(np.multiply(y.first, out_x), x.first)).reshape(-1),
            np.add.outer(np.arange(y.positions) * out_x, np.arange(x.positions)),
        )
        for y, x in itertools.product(runs_y, runs_x)
    ]  # fmt: skip
    counts = of_group * np.outer(counts_y, counts_x).reshape(-1)
    shape = channels * height * width, outputs * out_y * out_x
    return _Pattern(blocks, counts, channels, groups, shape)


def _pruned_convolution(layer: nn.Conv2d, x: torch.Tensor) -> sparse.csr_matrix:
    """Build the matrix from non-zero weights only."""
    weight: NDArray[Any] = layer.weight.detach().numpy()
    output, into, tap_y, tap_x = np.nonzero(weight)
    height, width = x.shape[1:]
    stride, padding, dilation = layer.stride, tuple(map(int, layer.padding)), layer.dilation
    out = [
        (size + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i, size in enumerate((height, width))
    ]
    # [weights, outputs along the axis]: the input position that each weight multiplies.
    y = tap_y[:, None] * dilation[0] - padding[0] + np.arange(out[0]) * stride[0]
    x_ = tap_x[:, None] * dilation[1] - padding[1] + np.arange(out[1]) * stride[1]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x_ >= 0) & (x_ < width))[:, None]
    group = output // (layer.out_channels // layer.groups)
    channel = (group * weight.shape[1] + into)[:, None, None]
    rows = (channel * height + y[:, :, None]) * width + x_[:, None]
    positions = np.arange(out[0] * out[1]).reshape(out)
    columns = output[:, None, None] * positions.size + positions
    data = np.broadcast_to(weight[output, into, tap_y, tap_x][:, None, None], inside.shape)
    shape = x.numel(), layer.out_channels * positions.size
    return sparse.coo_matrix((data[inside], (rows[inside], columns[inside])), shape).tocsr()


@dataclass(frozen=True)
class _Run:
    """Positions along an axis, a stride apart, that reach outputs by the same taps.

    Attributes:
        positions: number of positions.
        start: number of entries of all positions before the first.
        step: number of entries from each position to the next.
        taps: taps in the order of increasing outputs.
        first: outputs that the first position reaches; they increase by 1 per position.
    """

    positions: int
    start: int
    step: int
    taps: tuple[int, ...]
    first: tuple[int, ...]


def _axis(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[_Run], _Integers, int]:
    """Return, along one axis, runs of positions, their entry counts, and the number of outputs."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    reached = [
        [
            (offset // stride, tap)
            for tap in reversed(range(kernel))
            if (offset := place + padding - tap * dilation) % stride == 0
            and 0 <= offset < out * stride
        ]
        for place in range(size)
    ]
    starts = list(itertools.accumulate(map(len, reached), initial=0))

    def taps_and_step(place: int) -> tuple[tuple[int, ...], int]:
        taps = tuple(tap for _, tap in reached[place])
        return taps, starts[min(place + stride, size)] - starts[place]

    runs = []
    for phase in range(min(stride, size)):
        for (taps, step), group in itertools.groupby(range(phase, size, stride), taps_and_step):
            positions = list(group)
            first = tuple(output for output, _ in reached[positions[0]])
            if taps:
                runs.append(_Run(len(positions), starts[positions[0]], step, taps, first))
    return runs, np.diff(starts), out


def _max_pool(layer: nn.MaxPool2d, x: torch.Tensor) -> sparse.csr_matrix:
    y, indices = functional.max_pool2d(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode,
        return_indices=True,
    )  # fmt: skip
    channels, size, out = x.shape[0], x[0].numel(), y[0].numel()
    rows = (indices.reshape(channels, -1).numpy() + np.arange(channels)[:, None] * size).reshape(-1)
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=channels * size))])
    ones = np.ones(len(rows), _numpy(x.dtype))
    return _csr(ones, order, indptr, (channels * size, channels * out))


def _average_pool(layer: nn.AvgPool2d, x: torch.Tensor) -> sparse.csr_matrix:
    kernel, stride, padding = (
        (size, size) if isinstance(size, int) else tuple(size)
        for size in (layer.kernel_size, layer.stride, layer.padding)
    )
    if layer.ceil_mode or layer.divisor_override or (any(padding) and not layer.count_include_pad):
        raise InvalidArgumentError(
            "layer", "has average pooling with incomplete windows or another divisor"
        )
    pattern = convolution_pattern(
        tuple(x.shape), x.shape[0], kernel, stride, padding, (1, 1), x.shape[0]
    )
    indices, indptr = pattern.indices()
    share = np.full(len(indices), 1.0 / (kernel[0] * kernel[1]), _numpy(x.dtype))
    return _csr(share, indices, indptr, pattern.shape)


def _diagonal(values: NDArray[Any]) -> sparse.csr_matrix:
    """Return a diagonal matrix with explicit zeros, so that its pattern depends on size alone."""
    size = len(values)
    dtype = _index_type(size)
    return _csr(
        values, np.arange(size, dtype=dtype), np.arange(size + 1, dtype=dtype), (size, size)
    )


def _csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> sparse.csr_matrix:
    dtype = _index_type(max(len(data), *shape))
    matrix = copy.copy(_empty(shape))
    matrix.data = data
    matrix.indices, matrix.indptr = (
        values.astype(dtype, copy=False) for values in (indices, indptr)
    )
    matrix.has_sorted_indices = True
    return matrix


@functools.lru_cache(maxsize=64)
def _empty(shape: tuple[int, int]) -> sparse.csr_matrix:
    """Return a matrix without arrays: they are set later, to skip SciPy's validation."""
    matrix = sparse.csr_matrix(shape)
    matrix.indptr = matrix.indices
    return matrix


def _index_type(max_index: int) -> Any:
    """Return SciPy's index dtype: int32 if `max_index` fits, else int64."""
    return np.int64 if max_index > np.iinfo(np.int32).max else np.int32


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True)
class ChainGradient:
    """Gradients of a chain of layers, and the cost of the scan.

    Attributes:
        gradients: gradient of every activation, from output to input, each [elements].
        operations: multiplications of each matrix product, by level of the tree.
        critical: multiplications on the critical path of the scan.
        sequential: multiplications of back-propagation by vector-matrix products; as in the scan,
            zeros of the vector (after a ReLU or a pooling) are skipped.
    """

    gradients: list[NDArray[Any]]
    operations: list[list[int]]
    critical: int
    sequential: int

    @property
    def pays(self) -> bool:
        """Whether the critical path is shorter than back-propagation."""
        return self.critical < self.sequential

    def table(self) -> Table:
        """Return the cost of each level of the tree, and which method is shorter."""
        levels = list(enumerate(self.operations))
        number = Field[tuple[int, list[int]]].number
        verdict = "is shorter" if self.pays else "is not shorter"
        return Table.of(levels, [
            number("level", lambda level: level[0]),
            number("products", lambda level: len(level[1])),
            number("multiplications", lambda level: f"{sum(level[1]):,}"),
            number("largest product", lambda level: f"{max(level[1], default=0):,}"),
        ], notes=[
            f"critical path {self.critical:,} multiplications, back-propagation "
            f"{self.sequential:,}: a scan {verdict}, with a processor per product"
        ])  # fmt: skip


def backprop(
    layers: Sequence[nn.Module], x: torch.Tensor, gradient: torch.Tensor, levels: int | None = None
) -> ChainGradient:
    """Compute the gradient of every activation of a chain of layers by an exclusive scan.

    Args:
        x: input of the first layer, without a batch dimension.
        gradient: gradient of the chain's output.
        levels: maximum levels of the tree; None: all.

    Raises:
        InvalidArgumentError: a layer has no sparse Jacobian.
    """
    jacobians = []
    with torch.no_grad():
        for layer in layers:
            jacobian = jacobian_transposed(layer, x)
            jacobian.eliminate_zeros()
            jacobians.append(jacobian)
            x = layer(x.unsqueeze(0)).squeeze(0)
    output_gradient = sparse.csr_matrix(gradient.detach().reshape(-1, 1).numpy())
    elements = [
        _Element(output_gradient, ()),
        *(_Element(jacobian, ()) for jacobian in reversed(jacobians)),
    ]
    # Another element at the end, so that the exclusive scan includes the input's gradient.
    size = elements[-1].matrix.shape[0]
    elements.append(_Element(sparse.identity(size, format="csr"), ()))
    log: list[tuple[int, int]] = []

    def operate(left: _Element, right: _Element) -> _Element:
        count = products_of(right.matrix, left.matrix)
        path = max(left.path, right.path, key=sum) if left.path or right.path else ()
        log.append((len(path), count))
        return _Element(right.matrix @ left.matrix, (*path, count))

    scanned = exclusive_scan(elements, operate, _Element(output_gradient, ()), levels)[1:]
    depth = max((level for level, _ in log), default=-1) + 1
    operations = [[count for level, count in log if level == at] for at in range(depth)]
    critical = max(sum(element.path) for element in scanned)
    return ChainGradient(
        [element.matrix.toarray().reshape(-1) for element in scanned], operations, critical,
        sum(
            products_of(jacobian, vector.matrix)
            for jacobian, vector in zip(reversed(jacobians), scanned, strict=False)
        ),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Element:
    """A product of Jacobians, and the sequential multiplications on its critical path."""

    matrix: sparse.csr_matrix
    path: tuple[int, ...]


def products_of(left: sparse.csr_matrix, right: sparse.csr_matrix) -> int:
    """Return the number of multiplications of a sparse product, from the patterns alone."""
    of_columns = np.bincount(left.indices, minlength=left.shape[1])
    of_rows = np.diff(right.indptr)
    return int(of_columns @ of_rows)
