"""`TableFormat`: how a table's rows are stored, what that costs and what it loses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

Setting = int | tuple[int, ...]
"""A integer, or ids."""

Settings = Mapping[str, Setting]
DenseModule = nn.Embedding | nn.EmbeddingBag

STEPS_PER_HALVING = 4
_MOST_HALVINGS = 20
_SPECTRUM_EXPONENT = 1.0
_LEAST_KEPT = 1e-9


@dataclass(frozen=True, eq=False)
class TableFacts:
    """A table that may become smaller.

    Attributes:
        name: of its module.
        rows, dim, item_bytes: it has ``rows * dim`` numbers of so many bytes.
        shares: of its look-ups that go to each row: float64 [rows], sums to 1; None where it is
            not known: all alike.
        weight: its trained numbers, [rows, dim], to measure errors on and to convert; None for a
            table that is to be trained in its new form.
        lookups: ids a step looks up in it, relative to other tables.
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
        """Bytes as it is."""
        return self.rows * self.dim * self.item_bytes


@dataclass(frozen=True)
class Choice:
    """A table format with its settings, for one table.

    Attributes:
        format: its name.
        settings: what it is made with.
        nbytes: of the table then.
        error: of the weighted squares of the table's numbers the share that is lost. Measured
            where the table is trained; else what would be lost of rows with a usual spectrum that
            have nothing else in common: an assumption.
    """

    format: str
    settings: Settings
    nbytes: int
    error: float

    @property
    def loss(self) -> float:
        """Minus the logarithm of the share that is kept; about `error` where that is small.

        What is shared out by it is shared fairly: no table is given up for the sake of others.
        """
        return -math.log(max(1 - self.error, _LEAST_KEPT))


class Start(NamedTuple):
    """How the numbers of new tables begin.

    Attributes:
        std: their root of mean square.
        device, dtype: theirs.
    """

    std: float
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def like(cls, weights: Sequence[torch.Tensor]) -> Start:
        """As far from zero as the numbers of these tables are, together."""
        total = sum(weight.numel() for weight in weights)
        square = sum(float(w.detach().double().square().sum()) for w in weights)
        std = math.sqrt(square / total) if total else 1.0
        return cls(std, weights[0].device, weights[0].dtype)

    @property
    def where(self) -> dict[str, Any]:
        """Device and dtype, as modules take them."""
        return {"device": self.device, "dtype": self.dtype}


class Exchange(NamedTuple):
    """A table that is exchanged.

    Attributes:
        old: its module.
        table: what is known of it: with its trained numbers where they are to be kept.
        settings: of the format it gets.
    """

    old: DenseModule
    table: TableFacts
    settings: Settings

    def number(self, key: str) -> int:
        """The setting of that name."""
        value = self.settings[key]
        assert isinstance(value, int)
        return value

    @property
    def hot(self) -> tuple[int, ...]:
        """Ids with rows of their own."""
        ids = self.settings.get("hot", ())
        assert isinstance(ids, tuple)
        return ids


class TableFormat(ABC):
    """One format of a table: its module, bytes, expected error, and conversion of trained tables.

    The time that its look-ups take is measured of its modules; see `groups.timed_pass`. How they
    are written as ONNX, they know themselves; see `modules.Exportable`.

    Attributes:
        name: in plans and settings.
        trains: whether its modules can be trained; else it is for trained tables alone.
        shared: whether all tables of a model in this format have one set of parameters.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    shared: ClassVar[bool] = False

    @abstractmethod
    def choices(self, table: TableFacts) -> Iterable[Choice]:
        """What it could be for `table`, from large to small; none where it makes no sense."""

    @abstractmethod
    def module(self, one: Exchange, start: Start) -> Any:
        """What comes in the place of a table's module, called as that one is."""

    def modules(self, every: Sequence[Exchange], start: Start) -> list[Any]:
        """`module` of each of the tables of a model that get this format together."""
        return [self.module(one, start) for one in every]

    def trained(self, table: TableFacts, settings: Settings, nbytes: int) -> tuple[int, ...]:
        """Numbers in each tensor that an optimizer steps in a table's place.

        Args:
            nbytes: of the table in this format.
        """
        return (nbytes // table.item_bytes,) if self.trains else ()


class Dense(TableFormat):
    """The table as ``nn.Embedding`` has it: nothing is changed."""

    name: ClassVar[str] = "dense"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """One."""
        yield Choice(self.name, {}, table.nbytes, 0.0)

    def module(self, one: Exchange, start: Start) -> Any:
        """The module itself."""
        return one.old


def sizes(most: int, least: int = 1) -> list[int]:
    """Whole numbers below `most` down to `least`, four to a halving."""
    rounded = {
        round(most * 2 ** (-step / STEPS_PER_HALVING))
        for step in range(1, _MOST_HALVINGS * STEPS_PER_HALVING + 1)
    }
    return sorted((size for size in rounded if least <= size < most), reverse=True)


def with_errors(
    measured: Callable[[int], float], every: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Each of falling `sizes` with its error: every fourth is measured, others lie in between.

    Errors are drawn straight over the size, which is at least the truth where they fall ever
    slower.
    """
    known: dict[int, float] = {}
    for place, size in enumerate(every):
        at = place // STEPS_PER_HALVING * STEPS_PER_HALVING
        after = min(at + STEPS_PER_HALVING, len(every) - 1)
        for end in (every[at], every[after]):
            if end not in known:
                known[end] = measured(end)
        high, low = every[at], every[after]
        if high == low:
            yield size, known[size]
            continue
        part = (high - size) / (high - low)
        yield size, known[high] + (known[low] - known[high]) * part


def usual_energies(dim: int) -> torch.Tensor:
    """Shares of a trained table's squares along its principal axes: falling as 1 / number.

    An assumption, for tables that are not trained yet.
    """
    energy = torch.arange(1, dim + 1, dtype=torch.float64) ** -_SPECTRUM_EXPONENT
    return energy / energy.sum()
