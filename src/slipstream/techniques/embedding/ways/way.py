"""What a planner must know of a way to make a table smaller: what it costs, what it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

Setting = int | tuple[int, ...]
"""A whole number, or ids."""

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
    """A way with its settings, for one table.

    Attributes:
        way: its name.
        settings: what it is made with.
        nbytes: of the table then.
        error: of the weighted squares of the table's numbers the share that is lost. Measured
            where the table is trained; else what would be lost of rows with a usual spectrum that
            have nothing else in common: an assumption.
    """

    way: str
    settings: Mapping[str, Setting]
    nbytes: int
    error: float

    @property
    def loss(self) -> float:
        """Minus the logarithm of the share that is kept; about `error` where that is small.

        What is shared out by it is shared fairly: no table is given up for the sake of others.
        """
        return -math.log(max(1 - self.error, _LEAST_KEPT))


class Way(Protocol):
    """One way to keep a table.

    Attributes:
        name: in plans and settings.
        trains: whether what it makes can be trained; else it is for trained tables alone.
    """

    name: ClassVar[str]
    trains: ClassVar[bool]

    def choices(self, table: TableFacts) -> Iterable[Choice]:
        """What it could be for `table`, from large to small; none where it makes no sense."""

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """What comes in the place of `old`, an ``nn.Embedding`` or ``nn.EmbeddingBag``.

        Args:
            made: the `slipstream.techniques.embedding.making.Making` of this model.
        """


def sizes(most: int, least: int = 1) -> list[int]:
    """Whole numbers below `most` down to `least`, four to a halving."""
    found = {
        round(most * 2 ** (-step / STEPS_PER_HALVING))
        for step in range(1, _MOST_HALVINGS * STEPS_PER_HALVING + 1)
    }
    return sorted((size for size in found if least <= size < most), reverse=True)


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
