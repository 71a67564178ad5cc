"""Transposed Jacobians of layers as sparse matrices, and gradients of a chain of them by a scan.

A row is an element of a layer's input, a column one of its output, in memory order of one sample.
Where numbers may stand follows from shapes alone. Away from an image's edges the rows of a
convolution are all alike but for a shift: places and numbers are written in a few blocks, each one
row broadcast over a grid, as fast as memory takes them.

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
# Share of weights other than zero from which on a convolution's whole pattern is worth having.
_PRUNED = 0.5


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of a grid of places in a channel that reach outputs by the same taps.

    Attributes:
        start: entries of the channel before those of the first place.
        grid: places along both axes.
        steps: entries from a place to the next, along both axes.
        taps: along both axes, as they index a kernel.
        columns: of the first row, in the first group.
        moved: [*grid], by how much those of a place are higher.
    """

    start: int
    grid: tuple[int, int]
    steps: tuple[int, int]
    taps: tuple[_Integers, ...]
    columns: _Integers
    moved: _Integers

    def of(self, entries: NDArray[Any]) -> NDArray[Any]:
        """A view [channels, *grid, row] of the block's own of all `entries` [channels, entries]."""
        size = entries.itemsize
        strides = entries.strides[0], *(step * size for step in self.steps), size
        shape = len(entries), *self.grid, len(self.columns)
        return np.ndarray(shape, entries.dtype, entries, self.start * size, strides)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Where a convolution's numbers stand.

    Attributes:
        blocks: of a channel of the input.
        counts: entries of each of its places.
        channels, groups: of the input.
        shape: inputs, outputs.
    """

    blocks: list[_Block]
    counts: _Integers
    channels: int
    groups: int
    shape: tuple[int, int]

    def places(self) -> tuple[_Integers, _Integers]:
        """The CSR matrix's indices and indptr."""
        indptr = np.concatenate([[0], np.cumsum(np.tile(self.counts, self.channels))])
        dtype = _index_type(max(int(indptr[-1]), *self.shape))
        indices = np.empty((self.channels, int(self.counts.sum())), dtype)
        group = np.repeat(np.arange(self.groups), self.channels // self.groups)
        further = group * (self.shape[1] // self.groups)
        for block in self.blocks:
            first = np.add.outer(further, block.columns).astype(dtype)[:, None, None]
            moved = block.moved.astype(dtype)[..., None]
            # NumPy's sum of a row and a number takes four times as long.
            out = torch.from_numpy(block.of(indices))
            torch.add(torch.from_numpy(first), torch.from_numpy(moved), out=out)
        return indices.reshape(-1), indptr

    def fill(self, numbers: NDArray[Any], weight: NDArray[Any]) -> None:
        """Write the data of the convolution's weight [O, I, kernel]."""
        by_channel = numbers.reshape(self.channels, -1)
        # [groups, their inputs, their outputs, kernel]
        seen = weight.reshape(self.groups, -1, *weight.shape[1:]).swapaxes(1, 2)
        for block in self.blocks:
            row = seen[..., block.taps[0], block.taps[1]]
            block.of(by_channel)[:] = row.reshape(self.channels, 1, 1, -1)

    @property
    def entries(self) -> int:
        """Of all channels."""
        return self.channels * int(self.counts.sum())


def jacobian_transposed(
    layer: nn.Module, x: torch.Tensor, into: sparse.csr_matrix | None = None
) -> sparse.csr_matrix:
    """The transposed Jacobian of `layer` at one sample, [inputs, outputs], with sorted indices.

    Args:
        layer: Conv2d, Linear, ReLU, MaxPool2d, AvgPool2d, Flatten or Identity.
        x: what it is given, without a batch dimension.
        into: of a ReLU or of a convolution most of whose weights are not zero, what an earlier call
            for the same sizes returned: its numbers are overwritten, and it is returned.

    Raises:
        InvalidArgumentError: another layer, padding other than with zeros, or an `into` that does
            not fit.
    """
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise InvalidArgumentError("layer", "only a convolution padded with zeros, in numbers")
        if int(layer.weight.count_nonzero()) < _PRUNED * layer.weight.numel():
            if into is not None:
                raise InvalidArgumentError("into", "places of pruned weights are made anew")
            return _pruned_convolution(layer, x)
        pattern = convolution_pattern(
            tuple(x.shape), layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
            layer.dilation, layer.groups,
        )  # fmt: skip
        weight: NDArray[Any] = layer.weight.detach().numpy()
        numbers = _numbers(into, pattern.entries, pattern.shape, weight.dtype)
        pattern.fill(numbers, weight)
        return _csr(numbers, *pattern.places(), pattern.shape) if into is None else into
    if isinstance(layer, nn.ReLU):
        flat: NDArray[Any] = x.detach().reshape(-1).numpy()
        numbers = _numbers(into, len(flat), (len(flat), len(flat)), flat.dtype)
        # Into the right type at once: a mask on the way takes as long again.
        np.greater(flat, 0, out=numbers, casting="unsafe")
        return _diagonal(numbers) if into is None else into
    if into is not None:
        raise InvalidArgumentError("into", f"the places of {type(layer).__name__} are not kept")
    if isinstance(layer, nn.Linear):
        return sparse.csr_matrix(layer.weight.detach().numpy().T)
    if isinstance(layer, nn.Flatten | nn.Identity):
        return _diagonal(np.ones(x.numel(), _numpy(x.dtype)))
    if isinstance(layer, nn.MaxPool2d):
        return _max_pool(layer, x)
    if isinstance(layer, nn.AvgPool2d):
        return _average_pool(layer, x)
    raise InvalidArgumentError("layer", f"no sparse Jacobian of {type(layer).__name__}")


def _numbers(
    into: sparse.csr_matrix | None, count: int, shape: tuple[int, int], dtype: Any
) -> NDArray[Any]:
    """Where the numbers of a matrix go: those of `into`, or room for new ones."""
    if into is None:
        return np.empty(count, dtype)
    if into.shape != shape or into.data.shape != (count,) or into.dtype != dtype:
        raise InvalidArgumentError(
            "into", f"{into.nnz} numbers in {into.shape} of {into.dtype} do not fit",
            remedy=f"{count} in {shape} of {dtype}, as an earlier call returned them",
        )  # fmt: skip
    numbers: NDArray[Any] = into.data
    return numbers


@functools.lru_cache(maxsize=64)
def convolution_pattern(
    image: tuple[int, ...], outputs: int, kernel: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], groups: int,
) -> _Pattern:  # fmt: skip
    """Where the numbers stand of a convolution's transposed Jacobian, for one [C, H, W].

    In a row, columns rise with the output's channel, then with its place; and the place rises as
    the tap falls.
    """
    channels, height, width = image
    runs_y, counts_y, out_y = _axis(height, kernel[0], stride[0], padding[0], dilation[0])
    runs_x, counts_x, out_x = _axis(width, kernel[1], stride[1], padding[1], dilation[1])
    of_group, line = outputs // groups, int(counts_x.sum())
    channel = np.arange(of_group)[:, None, None] * (out_y * out_x)
    blocks = [
        _Block(
            of_group * (y.start * line + len(y.taps) * x.start), (y.places, x.places),
            (of_group * y.step * line, of_group * len(y.taps) * x.step), np.ix_(y.taps, x.taps),
            (channel + np.add.outer(np.multiply(y.first, out_x), x.first)).reshape(-1),
            np.add.outer(np.arange(y.places) * out_x, np.arange(x.places)),
        )
        for y, x in itertools.product(runs_y, runs_x)
    ]  # fmt: skip
    counts = of_group * np.outer(counts_y, counts_x).reshape(-1)
    shape = channels * height * width, outputs * out_y * out_x
    return _Pattern(blocks, counts, channels, groups, shape)


def _pruned_convolution(layer: nn.Conv2d, x: torch.Tensor) -> sparse.csr_matrix:
    """Of the weights that are not zero alone: a pattern of all would be mostly zeros."""
    weight: NDArray[Any] = layer.weight.detach().numpy()
    output, into, tap_y, tap_x = np.nonzero(weight)
    height, width = x.shape[1:]
    stride, padding, dilation = layer.stride, tuple(map(int, layer.padding)), layer.dilation
    out = [
        (size + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i, size in enumerate((height, width))
    ]
    # [weights, outputs along the axis]: the input that each is multiplied with.
    y = tap_y[:, None] * dilation[0] - padding[0] + np.arange(out[0]) * stride[0]
    x_ = tap_x[:, None] * dilation[1] - padding[1] + np.arange(out[1]) * stride[1]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x_ >= 0) & (x_ < width))[:, None]
    group = output // (layer.out_channels // layer.groups)
    channel = (group * weight.shape[1] + into)[:, None, None]
    rows = (channel * height + y[:, :, None]) * width + x_[:, None]
    places = np.arange(out[0] * out[1]).reshape(out)
    columns = output[:, None, None] * places.size + places
    data = np.broadcast_to(weight[output, into, tap_y, tap_x][:, None, None], inside.shape)
    shape = x.numel(), layer.out_channels * places.size
    return sparse.coo_matrix((data[inside], (rows[inside], columns[inside])), shape).tocsr()


@dataclass(frozen=True)
class _Run:
    """Places along an axis, a stride apart, that reach outputs by the same taps.

    Attributes:
        places: how many.
        start: entries of all places before the first.
        step: entries from each to the next.
        taps: by which outputs are reached that rise.
        first: these outputs, of the first place; of each other one they are one further on.
    """

    places: int
    start: int
    step: int
    taps: tuple[int, ...]
    first: tuple[int, ...]


def _axis(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[_Run], _Integers, int]:
    """Along one axis: runs of input places, outputs that each place reaches, and all outputs."""
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

    def alike(place: int) -> tuple[tuple[int, ...], int]:
        taps = tuple(tap for _, tap in reached[place])
        return taps, starts[min(place + stride, size)] - starts[place]

    runs = []
    for phase in range(min(stride, size)):
        for (taps, step), group in itertools.groupby(range(phase, size, stride), alike):
            places = list(group)
            first = tuple(output for output, _ in reached[places[0]])
            if taps:
                runs.append(_Run(len(places), starts[places[0]], step, taps, first))
    return runs, np.diff(starts), out


def _max_pool(layer: nn.MaxPool2d, x: torch.Tensor) -> sparse.csr_matrix:
    y, where = functional.max_pool2d(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode,
        return_indices=True,
    )  # fmt: skip
    channels, size, out = x.shape[0], x[0].numel(), y[0].numel()
    rows = (where.reshape(channels, -1).numpy() + np.arange(channels)[:, None] * size).reshape(-1)
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=channels * size))])
    ones = np.ones(len(rows), _numpy(x.dtype))
    return _csr(ones, order, indptr, (channels * size, channels * out))


def _average_pool(layer: nn.AvgPool2d, x: torch.Tensor) -> sparse.csr_matrix:
    kernel, stride, padding = (
        (one, one) if isinstance(one, int) else tuple(one)
        for one in (layer.kernel_size, layer.stride, layer.padding)
    )
    if layer.ceil_mode or layer.divisor_override or (any(padding) and not layer.count_include_pad):
        raise InvalidArgumentError("layer", "only average pooling of whole, equal windows")
    pattern = convolution_pattern(
        tuple(x.shape), x.shape[0], kernel, stride, padding, (1, 1), x.shape[0]
    )
    indices, indptr = pattern.places()
    share = np.full(len(indices), 1.0 / (kernel[0] * kernel[1]), _numpy(x.dtype))
    return _csr(share, indices, indptr, pattern.shape)


def _diagonal(values: NDArray[Any]) -> sparse.csr_matrix:
    """All of it, zeros among them: the pattern of any ReLU of so many elements is one."""
    size = len(values)
    dtype = _index_type(size)
    return _csr(
        values, np.arange(size, dtype=dtype), np.arange(size + 1, dtype=dtype), (size, size)
    )


def _csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> sparse.csr_matrix:
    dtype = _index_type(max(len(data), *shape))
    matrix = copy.copy(_bare(shape))
    matrix.data = data
    matrix.indices, matrix.indptr = (one.astype(dtype, copy=False) for one in (indices, indptr))
    matrix.has_sorted_indices = True
    return matrix


@functools.lru_cache(maxsize=64)
def _bare(shape: tuple[int, int]) -> sparse.csr_matrix:
    """A matrix whose arrays are yet to come: SciPy looks through those it is made of."""
    matrix = sparse.csr_matrix(shape)
    matrix.indptr = matrix.indices
    return matrix


def _index_type(most: int) -> Any:
    """Of places up to `most`, as SciPy keeps them: in 32 bits where they fit."""
    return np.int64 if most > np.iinfo(np.int32).max else np.int32


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True)
class ChainGradient:
    """Gradients of a chain of layers, and what they took.

    Attributes:
        gradients: of every activation: the output's first, the input's last; each [elements].
        operations: of each level of the tree, multiplications of its products; the largest of a
            level lies on the critical path.
        critical: multiplications on the critical path of the scan.
        sequential: multiplications of back-propagation, vector by matrix, one after the other;
            as in the scan, zeros of the vector (behind a ReLU, a pooling) are not multiplied.
        pays: whether a scan with a processor for every product would be shorter.
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
        """Products of each level of the tree, and which way is shorter."""
        levels = list(enumerate(self.operations))
        number = Field[tuple[int, list[int]]].number
        verdict = "pays" if self.pays else "does not pay"
        return Table.of(levels, [
            number("level", lambda one: one[0]),
            number("products", lambda one: len(one[1])),
            number("multiplications", lambda one: f"{sum(one[1]):,}"),
            number("largest product", lambda one: f"{max(one[1], default=0):,}"),
        ], notes=[
            f"critical path {self.critical:,} multiplications, back-propagation "
            f"{self.sequential:,}: a scan {verdict}, with a processor for every product"
        ])  # fmt: skip


def backprop(
    layers: Sequence[nn.Module], x: torch.Tensor, gradient: torch.Tensor, levels: int | None = None
) -> ChainGradient:
    """Gradients of every activation of a chain of layers, for one sample, by an exclusive scan.

    Args:
        x: without a batch dimension.
        gradient: of the chain's output.
        levels: of the tree; None: all.

    Raises:
        InvalidArgumentError: a layer without a sparse Jacobian.
    """
    jacobians = []
    with torch.no_grad():
        for layer in layers:
            jacobian = jacobian_transposed(layer, x)
            jacobian.eliminate_zeros()
            jacobians.append(jacobian)
            x = layer(x.unsqueeze(0)).squeeze(0)
    end = sparse.csr_matrix(gradient.detach().reshape(-1, 1).numpy())
    elements = [_Element(end, ()), *(_Element(one, ()) for one in reversed(jacobians))]
    # One behind the last, so that what comes before it, the input's gradient, is given too.
    size = elements[-1].matrix.shape[0]
    elements.append(_Element(sparse.identity(size, format="csr"), ()))
    log: list[tuple[int, int]] = []

    def operate(one: _Element, other: _Element) -> _Element:
        count = products_of(other.matrix, one.matrix)
        path = max(one.path, other.path, key=sum) if one.path or other.path else ()
        log.append((len(path), count))
        return _Element(other.matrix @ one.matrix, (*path, count))

    scanned = exclusive_scan(elements, operate, _Element(end, ()), levels)[1:]
    depth = max((level for level, _ in log), default=-1) + 1
    operations = [[count for level, count in log if level == at] for at in range(depth)]
    critical = max(sum(one.path) for one in scanned)
    return ChainGradient(
        [one.matrix.toarray().reshape(-1) for one in scanned], operations, critical,
        sum(
            products_of(jacobian, vector.matrix)
            for jacobian, vector in zip(reversed(jacobians), scanned, strict=False)
        ),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Element:
    """A product of Jacobians, and the multiplications one after another that it took."""

    matrix: sparse.csr_matrix
    path: tuple[int, ...]


def products_of(left: sparse.csr_matrix, right: sparse.csr_matrix) -> int:
    """Multiplications of a sparse product, from the patterns alone."""
    of_columns = np.bincount(left.indices, minlength=left.shape[1])
    of_rows = np.diff(right.indptr)
    return int(of_columns @ of_rows)
