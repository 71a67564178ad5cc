"""`Statistics`: optional records of the tensor values in a step.

Some techniques depend on values: which rows of a table are looked up, how fast singular values
decay, how noisy gradients are, which values are zero. Shares are between 0 and 1. Edits of the
graph do not change statistics.

Histograms have bins of powers of two: entry k counts values in [2^k, 2^(k+1)).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_HOT_IDS = 4096
"""Maximum number of most frequent ids stored per table."""

_LARGEST = sys.float_info.max
_T = TypeVar("_T", bound="DataclassInstance")


@dataclass(frozen=True)
class TableIds:
    """Lookups of an embedding table in the recorded steps.

    Attributes:
        table: the qualified name of its module, as in tasks, or of its parameter.
        rows, dimension, item_bytes: the table has ``rows * dimension`` values of `item_bytes`.
        lookups: number of ids looked up, including padding, over all recorded steps.
        distinct: number of distinct ids.
        hot_ids, hot_counts: the most frequent ids and their counts, at most `MAX_HOT_IDS`; of
            equally frequent ones the smaller first.
        top_share: entry k is the share of lookups of the 2^k most frequent ids; the last is 1.
        frequency: histogram of the distinct ids by number of lookups.
        blocks: entry k is the mean number of distinct blocks of 2^k consecutive rows that a step
            reads, as cache lines of 2^k rows would; entry 0 is the number of distinct ids.
        bags: number of sums or means over ids (``EmbeddingBag``), over all recorded steps.
        bag_ids: number of ids in them.
        empty_bags: number of bags without an id.
        bag_sizes: histogram of the other bags by number of ids.
        longest_bag: number of ids in the longest bag.
    """

    table: str
    rows: int
    dimension: int
    item_bytes: int
    lookups: int
    distinct: int
    hot_ids: tuple[int, ...]
    hot_counts: tuple[int, ...]
    top_share: tuple[float, ...]
    frequency: tuple[int, ...]
    blocks: tuple[float, ...]
    bags: int = 0
    bag_ids: int = 0
    empty_bags: int = 0
    bag_sizes: tuple[int, ...] = ()
    longest_bag: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the table, in bytes."""
        return self.rows * self.dimension * self.item_bytes

    def share(self, count: int) -> float:
        """Return the share of lookups of the `count` most frequent ids: a cache's hit rate.

        Beyond `MAX_HOT_IDS` it is interpolated between powers of two, which is a lower bound.
        """
        if count <= 0 or not self.lookups:
            return 0.0
        if count <= len(self.hot_counts):
            return sum(self.hot_counts[:count]) / self.lookups
        if count >= self.distinct:
            return 1.0
        k = count.bit_length() - 1
        low, high = 1 << k, min(2 << k, self.distinct)
        lower, upper = self.top_share[k : k + 2]
        return lower + (upper - lower) * (count - low) / (high - low)

    def check(self) -> None:
        """Raise a `GraphError` if the fields are inconsistent."""
        _equal(len(self.hot_ids), len(self.hot_counts), f"'{self.table}': ids and their counts")
        if self.distinct:
            shares = (self.distinct - 1).bit_length() + 1
            _equal(len(self.top_share), shares, f"'{self.table}': shares and powers of two")
        if any(row >= self.rows for row in self.hot_ids):
            raise GraphError(f"'{self.table}': an id exceeds its {self.rows} rows")
        _shares(self.table, *self.top_share)


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a parameter or its gradient, as a matrix of first dimension x others.

    Attributes:
        parameter: its qualified name.
        of: the parameter after the recorded steps, or its gradient in the last step.
        rows, columns: shape of the matrix; output channels x others for a convolution.
        norm: Frobenius norm.
        values: singular values, descending; all ``min(rows, columns)`` of them if `exact`.
        exact: whether the values are from the Gram matrix, to 1e-7 of the largest; else they are
            lower bounds of the largest ones, by randomised projection.
    """

    parameter: str
    of: Literal["weight", "gradient"]
    rows: int
    columns: int
    norm: float
    values: tuple[float, ...]
    exact: bool

    def energy(self, rank: int) -> float:
        """Return the share of the squared norm in the best approximation of `rank`."""
        if not self.norm:
            return 1.0
        retained = math.fsum(value * value for value in self.values[:rank])
        return min(retained / self.norm**2, 1.0)

    def rank(self, energy: float) -> int | None:
        """Return the minimum rank with a share `energy`; None if too few values are known."""
        retained, target = 0.0, energy * self.norm**2
        for number, value in enumerate(self.values, start=1):
            retained += value * value
            if retained >= target:
                return number
        # Rounding errors may leave the sum below the target.
        return len(self.values) if self.exact else None

    def check(self) -> None:
        """Raise a `GraphError` if the fields are inconsistent."""
        if len(self.values) > min(self.rows, self.columns):
            raise GraphError(f"'{self.parameter}' has more singular values than its shape allows")


@dataclass(frozen=True)
class GradientNoise:
    """A parameter's gradient at the optimizer's updates, over the recorded steps.

    Attributes:
        parameter: its qualified name.
        elements: number of elements.
        steps: number of steps in which it had a gradient.
        norm: mean L2 norm of a step's gradient.
        mean_square: mean square of an element, over elements and steps.
        variance: variance of an element between steps, averaged over elements; None after one
            step.
        zeros: share of elements that are exactly zero.
        top_energy: share of the squared norm in the largest 1 % of the elements (at least one).
    """

    parameter: str
    elements: int
    steps: int
    norm: float
    mean_square: float
    variance: float | None
    zeros: float
    top_energy: float

    @property
    def noise_scale(self) -> float | None:
        """Variance over the squared mean: the number of steps whose mean gradient is half noise.

        Multiplied by the samples of a step it is the simple noise scale of McCandlish et al., "An
        Empirical Model of Large-Batch Training", 2018, in samples. Infinite if the mean is
        indistinguishable from zero; None after one step.
        """
        if self.variance is None:
            return None
        signal = self.mean_square - self.variance
        if signal <= 0:
            return math.inf if self.variance else 0.0
        return self.variance / signal

    def check(self) -> None:
        """Raise a `GraphError` if the fields are inconsistent."""
        _shares(self.parameter, self.zeros, self.top_energy)


@dataclass(frozen=True)
class ModuleZeros:
    """Shares of exact zeros in the tensors of a module, over the recorded steps.

    Attributes:
        module: its qualified name, as in tasks.
        kind: its class.
        elements: number of elements of its output in one step.
        inputs: zeros in its first input; None if that is not a floating-point tensor.
        outputs: zeros in its first output; None if that is not a floating-point tensor.
        gradients: zeros in the gradient of that output; None without a backward pass through it.
        weights: zeros in its parameters of two or more dimensions after the steps, without those
            of child modules; None if it has none.
    """

    module: str
    kind: str
    elements: int
    inputs: float | None
    outputs: float | None
    gradients: float | None
    weights: float | None

    def check(self) -> None:
        """Raise a `GraphError` if the fields are inconsistent."""
        shares = (self.inputs, self.outputs, self.gradients, self.weights)
        _shares(self.module, *(share for share in shares if share is not None))


@dataclass(frozen=True)
class OperandMask:
    """Which values of an operand of a layer are not zero, in the last recorded step.

    Attributes:
        module: the qualified name of the layer in the model.
        call: number of the layer's call in the step, from 0.
        operand: its input, its weight, or the gradient of its output.
        shape, dtype: of the operand, in the dtype that the layer computes in.
        nans: number of NaNs, which count as nonzero.
        bits: one bit per value in row-major order, the first in the highest bit of a byte.
    """

    module: str
    call: int
    operand: Literal["activation", "weight", "gradient"]
    shape: tuple[int, ...]
    dtype: str
    nans: int
    bits: bytes = b""

    def unpacked(self) -> NDArray[np.bool_]:
        """Return bool of `shape`: whether each value is not zero."""
        count = math.prod(self.shape)
        flags = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=count)
        return flags.view(bool).reshape(self.shape)


@dataclass(frozen=True)
class Statistics:
    """Statistics that techniques request by name, see `Technique.needs`.

    Compiled regions, the statistic "regions", are in ``Graph.meta["regions"]``.

    Attributes:
        recorded: names of the requested statistics: "ids", "spectra", "grads", "sparsity".
        steps: number of observed steps.
        same_batch: whether all steps ran on one batch, as those built from (model, batch, loss,
            optimizer) do, so that differences between them are not due to the data.
        reasons: why a requested statistic is empty, by name.
        masks: masks of the last step, recorded with "sparsity"; only in ``.slipgraph`` files.
    """

    recorded: tuple[str, ...] = ()
    steps: int = 0
    same_batch: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    ids: tuple[TableIds, ...] = ()
    spectra: tuple[Spectrum, ...] = ()
    grads: tuple[GradientNoise, ...] = ()
    sparsity: tuple[ModuleZeros, ...] = ()
    masks: tuple[OperandMask, ...] = ()

    def check(self) -> None:
        """Raise a `GraphError` for the first inconsistent entry."""
        for records in (self.ids, self.spectra, self.grads, self.sparsity):
            for record in records:
                record.check()

    def to_json(self) -> dict[str, Any]:
        """Return JSON for `from_json`, without masks; empty if nothing was requested."""
        found = dataclasses.asdict(dataclasses.replace(self, masks=()))
        del found["masks"]
        return found if self.recorded else {}

    def masks_to_json(self) -> list[dict[str, Any]]:
        """Return JSON of the masks without their bits, for `with_masks`."""
        return [{**vars(mask), "bits": len(mask.bits)} for mask in self.masks]

    def with_masks(self, found: Any, bits: bytes) -> Statistics:
        """Return the statistics with the masks that `masks_to_json` encoded.

        Args:
            bits: the bits of all masks, in sequence.

        Raises:
            ValueError, TypeError, KeyError: `found` is not masks, or does not match `bits`.
        """
        masks, end = [], 0
        for row in found:
            start, end = end, end + _plain(int, row["bits"])
            mask = _record(OperandMask, {**row, "bits": bits[start:end]})
            if len(mask.bits) != -(-math.prod(mask.shape) // 8):
                raise ValueError(f"the mask of '{mask.module}' does not match its shape")
            masks.append(mask)
        return dataclasses.replace(self, masks=tuple(masks))

    @classmethod
    def from_json(cls, found: Any) -> Statistics:
        """Return what `to_json` encoded.

        Raises:
            ValueError, TypeError, KeyError: `found` is not statistics.
        """
        if not found:
            return cls()
        parts = {
            name: tuple(_record(kind, record) for record in found[name])
            for name, kind in _PARTS.items()
        }
        reasons = {_text(name): _text(why) for name, why in dict(found["reasons"]).items()}
        return cls(
            recorded=tuple(_text(name) for name in found["recorded"]),
            steps=_plain(int, found["steps"]),
            same_batch=_plain(bool, found["same_batch"]),
            reasons=reasons,
            **parts,
        )


_PARTS: dict[str, Any] = {
    "ids": TableIds, "spectra": Spectrum, "grads": GradientNoise, "sparsity": ModuleZeros,
}  # fmt: skip


def _record(kind: type[_T], found: Any) -> _T:
    hints = typing.get_type_hints(kind)
    names = [column.name for column in dataclasses.fields(kind)]
    return kind(**{name: _plain(hints[name], found[name]) for name in names})


def _plain(hint: Any, value: Any) -> Any:
    """Return `value` if it matches the annotation; numbers must be finite and not negative."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(_plain(options[0], item) for item in value)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{value!r} is not one of {options}")
        return value
    if options:  # a number, or None
        return None if value is None else _plain(options[0], value)
    if hint is str:
        return _text(value)
    if hint is bytes:
        return bytes(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is not a boolean")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float) if hint is float else int):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is out of range")
    return hint(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _shares(where: str, *shares: float) -> None:
    for share in shares:
        if not 0 <= share <= 1:
            raise GraphError(f"'{where}' has a share of {share}, which is not between 0 and 1")


def _equal(first: int, second: int, what: str) -> None:
    if first != second:
        raise GraphError(f"{what} differ in number: {first} and {second}")
