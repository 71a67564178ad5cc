"""`TableFormat`: storage of a table's rows, with its cost and error."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

Setting = int | tuple[int, ...]
"""An integer, or ids."""

Settings = Mapping[str, Setting]
DenseModule = nn.Embedding | nn.EmbeddingBag

STEPS_PER_HALVING = 4
_MAX_HALVINGS = 20
_SPECTRUM_EXPONENT = 1.0
_MIN_RETAINED = 1e-9


@dataclass(frozen=True, eq=False)
class TableFacts:
    """A table to compress.

    Attributes:
        name: name of its module.
        rows, dim: size of the table.
        item_bytes: bytes per number.
        shares: share of look-ups per row, float64 [rows], summing to 1; uniform if None.
        weight: trained weights, [rows, dim], to measure errors on and to convert; None for a table
            that is trained in its new format.
        lookups: ids looked up per step, relative to other tables.
    """

    name: str
    rows: int
    dim: int
    item_bytes: int = 4
    shares: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    lookups: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed table."""
        return self.rows * self.dim * self.item_bytes


@dataclass(frozen=True)
class Choice:
    """A table format with its settings, for one table.

    Attributes:
        format: name of the format.
        settings: settings of the format.
        nbytes: bytes of the table in this format.
        error: lost share of the weighted squares of the table's numbers. Measured for a trained
            table; otherwise assumed, for uncorrelated rows of a typical spectrum.
    """

    format: str
    settings: Settings
    nbytes: int
    error: float

    @property
    def loss(self) -> float:
        """Negative logarithm of the retained share; about `error` if that is small.

        It grows without bound, so that an allocation does not sacrifice one table for others.
        """
        return -math.log(max(1 - self.error, _MIN_RETAINED))


class Start(NamedTuple):
    """Initialization of new tables.

    Attributes:
        std: root mean square of their numbers.
        device, dtype: device and dtype of their parameters.
    """

    std: float
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def like(cls, weights: Sequence[torch.Tensor]) -> Start:
        """Return the root mean square, device and dtype of these tables."""
        total = sum(weight.numel() for weight in weights)
        square = sum(float(w.detach().double().square().sum()) for w in weights)
        std = math.sqrt(square / total) if total else 1.0
        return cls(std, weights[0].device, weights[0].dtype)

    @property
    def where(self) -> dict[str, Any]:
        """Device and dtype as keyword arguments."""
        return {"device": self.device, "dtype": self.dtype}


class Exchange(NamedTuple):
    """The exchange of one table.

    Attributes:
        old: module of the table.
        table: facts about the table, with its weights if rows are converted.
        settings: settings of the new format.
    """

    old: DenseModule
    table: TableFacts
    settings: Settings

    def number(self, key: str) -> int:
        """Return an integer setting."""
        value = self.settings[key]
        assert isinstance(value, int)
        return value

    @property
    def hot(self) -> tuple[int, ...]:
        """Ids with separate rows."""
        ids = self.settings.get("hot", ())
        assert isinstance(ids, tuple)
        return ids


class TableFormat(ABC):
    """One format of a table: its module, bytes, expected error, and conversion of trained tables.

    Micro-benchmarks time the look-ups of its modules (`groups.Group.timed_pass`). Modules define
    their ONNX export (`modules.Exportable`).

    Attributes:
        name: name in plans and settings.
        trains: whether its modules can be trained; otherwise it requires trained tables.
        shared: whether all tables in this format share one set of parameters.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    shared: ClassVar[bool] = False

    @abstractmethod
    def choices(self, table: TableFacts) -> Iterable[Choice]:
        """Yield the choices for `table` in descending size; none if the format is unsuitable."""

    @abstractmethod
    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return the module that replaces a table's module, with the same interface."""

    def modules(self, exchanges: Sequence[Exchange], start: Start) -> list[Any]:
        """Return the modules of all tables of a model that get this format."""
        return [self.module(exchange, start) for exchange in exchanges]

    def trained(self, table: TableFacts, settings: Settings, nbytes: int) -> tuple[int, ...]:
        """Return the sizes of the trainable tensors that replace a table.

        Args:
            nbytes: bytes of the table in this format.
        """
        return (nbytes // table.item_bytes,) if self.trains else ()


class Dense(TableFormat):
    """The uncompressed table of ``nn.Embedding``."""

    name: ClassVar[str] = "dense"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield the only choice."""
        yield Choice(self.name, {}, table.nbytes, 0.0)

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return the old module."""
        return exchange.old


def sizes(most: int, least: int = 1) -> list[int]:
    """Return integers below `most` down to `least`, four per halving."""
    rounded = {
        round(most * 2 ** (-step / STEPS_PER_HALVING))
        for step in range(1, _MAX_HALVINGS * STEPS_PER_HALVING + 1)
    }
    return sorted((size for size in rounded if least <= size < most), reverse=True)


def with_errors(
    measure: Callable[[int], float], candidates: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Yield descending sizes with errors: every fourth is measured, others are interpolated.

    Linear interpolation over the size is an upper bound if the error is convex.
    """
    errors: dict[int, float] = {}
    for place, size in enumerate(candidates):
        at = place // STEPS_PER_HALVING * STEPS_PER_HALVING
        after = min(at + STEPS_PER_HALVING, len(candidates) - 1)
        for end in (candidates[at], candidates[after]):
            if end not in errors:
                errors[end] = measure(end)
        high, low = candidates[at], candidates[after]
        if high == low:
            yield size, errors[size]
            continue
        part = (high - size) / (high - low)
        yield size, errors[high] + (errors[low] - errors[high]) * part


def usual_energies(dim: int) -> torch.Tensor:
    """Return assumed shares of a table's squares along its principal axes: 1 / index.

    For tables that are not trained yet.
    """
    energy = torch.arange(1, dim + 1, dtype=torch.float64) ** -_SPECTRUM_EXPONENT
    return energy / energy.sum()
