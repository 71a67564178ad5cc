"""`Statistics`: what a profile learnt, on request, about the values that flow through a step.

A graph says what runs and for how long; some techniques also depend on the numbers: which rows of
a table are looked up, how fast singular values fall, how noisy gradients are, where zeros are.
Shares are between 0 and 1. Edits of the graph leave statistics as they were recorded.

Histograms have bins of powers of two: entry k counts what lies in [2^k, 2^(k+1)).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slipstream.errors import GraphError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_IDS = 4096
"""Ids that are kept by number for each table."""

_LARGEST = sys.float_info.max
_T = TypeVar("_T", bound="DataclassInstance")


@dataclass(frozen=True)
class TableIds:
    """How an embedding table was looked up in the recorded steps.

    Attributes:
        table: the qualified name of its module, as tasks have it, or of its parameter.
        rows, dimension, item_bytes: the table has ``rows * dimension`` numbers of so many bytes.
        lookups: ids looked up, padding included, over all recorded steps.
        distinct: different ones among them.
        hot_ids, hot_counts: the ids looked up most often and how often, at most `MOST_IDS`; of
            equally frequent ones the smaller first.
        top_share: entry k: share of the lookups that go to the 2^k most frequent ids; ends at 1.
        frequency: histogram of the distinct ids over how often each was looked up.
        blocks: entry k: different blocks of 2^k consecutive rows that one step touches, on
            average; entry 0 is distinct ids, and what a look-up by prefix (or a cache line of so
            many rows) would do for all of a step's ids at once.
        bags: sums or means over ids (``EmbeddingBag``), over all recorded steps; 0 for none.
        bag_ids: ids in them.
        empty_bags: bags without an id.
        bag_sizes: histogram of the other bags over the ids in each.
        longest_bag: ids in the longest one.
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
        """Bytes of the table."""
        return self.rows * self.dimension * self.item_bytes

    def share(self, count: int) -> float:
        """Share of the lookups that go to the `count` most frequent ids: what a cache could hit.

        Beyond `MOST_IDS` it is drawn straight between powers of two, which is at most the truth.
        """
        if count <= 0 or not self.lookups:
            return 0.0
        if count <= len(self.hot_counts):
            return sum(self.hot_counts[:count]) / self.lookups
        if count >= self.distinct:
            return 1.0
        k = count.bit_length() - 1
        low, high = 1 << k, min(2 << k, self.distinct)
        one, other = self.top_share[k : k + 2]
        return one + (other - one) * (count - low) / (high - low)

    def check(self) -> None:
        """Raise a `GraphError` where it contradicts itself."""
        _equal(len(self.hot_ids), len(self.hot_counts), f"'{self.table}': ids and their counts")
        if self.distinct:
            shares = (self.distinct - 1).bit_length() + 1
            _equal(len(self.top_share), shares, f"'{self.table}': shares and powers of two")
        if any(one >= self.rows for one in self.hot_ids):
            raise GraphError(f"'{self.table}': an id beyond its {self.rows} rows")
        _shares(self.table, *self.top_share)


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a parameter, or of its gradient, as a matrix: first dimension x rest.

    Attributes:
        parameter: qualified name.
        of: whether it is the parameter after the recorded steps, or its gradient in the last one.
        rows, columns: of the matrix; a convolution's is output channels x the rest.
        norm: of all entries (Frobenius).
        values: the largest first: all ``min(rows, columns)`` of them when `exact`.
        exact: from the Gram matrix, to 1e-7 of the largest; else the largest ones alone, by
            randomised projection, each at most what it truly is.
    """

    parameter: str
    of: Literal["weight", "gradient"]
    rows: int
    columns: int
    norm: float
    values: tuple[float, ...]
    exact: bool

    def energy(self, rank: int) -> float:
        """Share of the squared norm that the best approximation of `rank` keeps."""
        if not self.norm:
            return 1.0
        kept = math.fsum(value * value for value in self.values[:rank])
        return min(kept / self.norm**2, 1.0)

    def rank(self, energy: float) -> int | None:
        """The least rank that keeps a share `energy`; None when too few values are known."""
        kept, wanted = 0.0, energy * self.norm**2
        for number, value in enumerate(self.values, start=1):
            kept += value * value
            if kept >= wanted:
                return number
        # Rounding may leave the last step open.
        return len(self.values) if self.exact else None

    def check(self) -> None:
        """Raise a `GraphError` where it contradicts itself."""
        if len(self.values) > min(self.rows, self.columns):
            raise GraphError(f"'{self.parameter}' has more singular values than it can have")


@dataclass(frozen=True)
class GradientNoise:
    """A parameter's gradient as its optimizer found it, over the recorded steps.

    Attributes:
        parameter: qualified name.
        elements: numbers in it.
        steps: in which it had a gradient.
        norm: of one step's gradient (L2), on average.
        mean_square: of one element, over elements and steps.
        variance: of one element between steps, averaged over elements; None after one step.
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
        """Variance over the squared mean: how many such steps' batches would be half noise.

        Times the samples of a step it is the simple noise scale of McCandlish et al., "An
        Empirical Model of Large-Batch Training", 2018, in samples. Infinite where the mean cannot
        be told from zero; None after one step.
        """
        if self.variance is None:
            return None
        signal = self.mean_square - self.variance
        if signal <= 0:
            return math.inf if self.variance else 0.0
        return self.variance / signal

    def check(self) -> None:
        """Raise a `GraphError` where it contradicts itself."""
        _shares(self.parameter, self.zeros, self.top_energy)


@dataclass(frozen=True)
class ModuleZeros:
    """Shares of exact zeros around a module that computes something, over the recorded steps.

    Attributes:
        module: qualified name, as tasks have it.
        kind: its class.
        elements: numbers in its output in one step.
        inputs: in its first input; None where that is no tensor of floating point.
        outputs: in its (first) output; None likewise.
        gradients: in the gradient of that; None without a backward pass through it.
        weights: in its own parameters of two or more dimensions after the steps; None without.
    """

    module: str
    kind: str
    elements: int
    inputs: float | None
    outputs: float | None
    gradients: float | None
    weights: float | None

    def check(self) -> None:
        """Raise a `GraphError` where it contradicts itself."""
        shares = (self.inputs, self.outputs, self.gradients, self.weights)
        _shares(self.module, *(share for share in shares if share is not None))


@dataclass(frozen=True)
class Statistics:
    """What was recorded besides the tasks; which names there are: `Technique.needs`.

    (Compiled regions, the statistic "regions", are in ``Graph.meta["regions"]``.)

    Attributes:
        recorded: names of what was asked for: "ids", "spectra", "grads", "sparsity".
        steps: that were looked at.
        same_batch: whether all of them ran on one batch, as the steps do that we make ourselves
            of (model, batch, loss, optimizer): then what differs between them is not the data.
        reasons: by name: why there is nothing of what was asked for.
    """

    recorded: tuple[str, ...] = ()
    steps: int = 0
    same_batch: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    ids: tuple[TableIds, ...] = ()
    spectra: tuple[Spectrum, ...] = ()
    grads: tuple[GradientNoise, ...] = ()
    sparsity: tuple[ModuleZeros, ...] = ()

    def check(self) -> None:
        """Raise a `GraphError` naming the first thing that contradicts itself."""
        for part in (self.ids, self.spectra, self.grads, self.sparsity):
            for one in part:
                one.check()

    def to_json(self) -> dict[str, Any]:
        """As files keep it; empty when nothing was asked for."""
        return dataclasses.asdict(self) if self.recorded else {}

    @classmethod
    def from_json(cls, found: Any) -> Statistics:
        """What `to_json` gave; raises ValueError, TypeError or KeyError for anything else."""
        if not found:
            return cls()
        parts = {
            name: tuple(_record(kind, one) for one in found[name]) for name, kind in _PARTS.items()
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
    names = [one.name for one in dataclasses.fields(kind)]
    return kind(**{name: _plain(hints[name], found[name]) for name in names})


def _plain(hint: Any, value: Any) -> Any:
    """`value` where it is what the annotation says; numbers are finite and not negative."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(_plain(options[0], one) for one in value)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{value!r} is none of {options}")
        return value
    if options:  # a number, or None
        return None if value is None else _plain(options[0], value)
    if hint is str:
        return _text(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is neither true nor false")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float) if hint is float else int):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is out of range")
    return hint(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _shares(where: str, *shares: float) -> None:
    for share in shares:
        if not 0 <= share <= 1:
            raise GraphError(f"'{where}' has a share of {share}")


def _equal(one: int, other: int, what: str) -> None:
    if one != other:
        raise GraphError(f"{what} differ in number: {one} and {other}")
