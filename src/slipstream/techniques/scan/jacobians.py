"""Transposed Jacobians of layers as sparse matrices, and gradients of a chain of them by a scan.

A row is an element of a layer's input, a column one of its output, in memory order of one sample.
Where numbers may stand follows from shapes alone: a convolution's pattern is made once, by
arithmetic on indices, and its data are gathered from the weights again whenever they change.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

import functools
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

# SciPy keeps places in 32 bits where they fit, and would convert others at every call.
_Integers = NDArray[np.int64 | np.int32]
# Share of weights other than zero from which on a convolution's whole pattern is worth having.
_PRUNED = 0.5


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Where a convolution's numbers stand.

    Attributes:
        indptr, indices: of the CSR matrix.
        source: of each number, its place in the flat weight.
        shape: inputs, outputs.
    """

    indptr: _Integers
    indices: _Integers
    source: _Integers
    shape: tuple[int, int]

    def places(self) -> tuple[_Integers, _Integers]:
        """Copies of `indices` and `indptr`: SciPy drops zeros in place."""
        return self.indices.copy(), self.indptr.copy()


def jacobian_transposed(layer: nn.Module, x: torch.Tensor) -> sparse.csr_matrix:
    """The transposed Jacobian of `layer` at one sample, [inputs, outputs], with sorted indices.

    Args:
        layer: Conv2d, Linear, ReLU, MaxPool2d, AvgPool2d, Flatten or Identity.
        x: what it is given, without a batch dimension.

    Raises:
        InvalidArgumentError: another layer, or padding other than with zeros.
    """
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise InvalidArgumentError("layer", "only a convolution padded with zeros, in numbers")
        if int(layer.weight.count_nonzero()) < _PRUNED * layer.weight.numel():
            return _pruned_convolution(layer, x)
        pattern = convolution_pattern(
            tuple(x.shape), layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
            layer.dilation, layer.groups,
        )  # fmt: skip
        weight: Any = layer.weight.detach().numpy().reshape(-1)
        return _csr(weight[pattern.source], *pattern.places(), pattern.shape)
    if isinstance(layer, nn.Linear):
        return sparse.csr_matrix(layer.weight.detach().numpy().T)
    if isinstance(layer, nn.ReLU):
        return _diagonal((x > 0).reshape(-1).numpy().astype(_numpy(x.dtype)))
    if isinstance(layer, nn.Flatten | nn.Identity):
        return _diagonal(np.ones(x.numel(), _numpy(x.dtype)))
    if isinstance(layer, nn.MaxPool2d):
        return _max_pool(layer, x)
    if isinstance(layer, nn.AvgPool2d):
        return _average_pool(layer, x)
    raise InvalidArgumentError("layer", f"no sparse Jacobian of {type(layer).__name__}")


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
    taps_y, out_y = _axis(height, kernel[0], stride[0], padding[0], dilation[0])
    taps_x, out_x = _axis(width, kernel[1], stride[1], padding[1], dilation[1])
    # Of each place of the input: the outputs it reaches, and by which tap.
    counts = np.outer([len(p) for p, _ in taps_y], [len(p) for p, _ in taps_x]).reshape(-1)
    places = np.concatenate(
        [np.add.outer(y * out_x, x).reshape(-1) for y, _ in taps_y for x, _ in taps_x]
    )
    taps = np.concatenate(
        [np.add.outer(v * kernel[1], u).reshape(-1) for _, v in taps_y for _, u in taps_x]
    )
    places, taps = _narrow(places), _narrow(taps)
    into, out_of = channels // groups, outputs // groups
    starts = np.concatenate([[0], np.cumsum(counts)])
    # A row repeats its places once for each output channel of its group.
    row = np.repeat(np.arange(len(counts)), counts * out_of)
    within = np.arange(len(row)) - np.repeat(starts[:-1] * out_of, counts * out_of)
    channel = within // counts[row]
    at = starts[row] + within - channel * counts[row]
    columns = channel * (out_y * out_x) + places[at]
    size = kernel[0] * kernel[1]
    source = channel * (into * size) + taps[at]
    groups_of = np.repeat(np.arange(groups), into)
    inside = np.tile(np.arange(into), groups)
    indices = columns[None] + (groups_of * out_of * out_y * out_x)[:, None]
    from_ = source[None] + (groups_of * out_of * into * size + inside * size)[:, None]
    indptr = np.concatenate([[0], np.cumsum(np.tile(counts * out_of, channels))])
    shape = channels * height * width, outputs * out_y * out_x
    return _Pattern(_narrow(indptr), _narrow(indices.reshape(-1)), from_.reshape(-1), shape)


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


def _axis(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[tuple[_Integers, _Integers]], int]:
    """Along one axis, of each input place the outputs it reaches, rising, and their taps."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    pairs = []
    for place in range(size):
        taps = np.arange(kernel)[::-1]
        offset = place + padding - taps * dilation
        reached = (offset % stride == 0) & (offset >= 0) & (offset // stride < out)
        pairs.append((offset[reached] // stride, taps[reached]))
    return pairs, out


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
    share = np.full(len(pattern.indices), 1.0 / (kernel[0] * kernel[1]), _numpy(x.dtype))
    return _csr(share, *pattern.places(), pattern.shape)


def _diagonal(values: NDArray[Any]) -> sparse.csr_matrix:
    """All of it, zeros among them: the pattern of any ReLU of so many elements is one."""
    size = len(values)
    rows = _counted(size + 1)
    # Copies, since SciPy drops zeros in place.
    return _csr(values, rows[:size].copy(), rows.copy(), (size, size))


@functools.lru_cache(maxsize=64)
def _counted(size: int) -> _Integers:
    return _narrow(np.arange(size))


def _narrow(places: NDArray[Any]) -> _Integers:
    wide = len(places) and int(places.max()) > np.iinfo(np.int32).max
    return places.astype(np.int64 if wide else np.int32)


def _csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> sparse.csr_matrix:
    matrix = sparse.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    matrix.has_sorted_indices = True
    return matrix


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
