"""The shape of a tensor train: factors of rows and columns, ranks, and cost.

A train represents a table of E x D numbers as a product of d cores; core t is
[p_t, R_(t-1), q_t, R_t]. A row index has digits in the bases p_t, the most significant first, and a
column index in the bases q_t; the product p_1 ... p_d is at least E.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError

MIN_CORES, MAX_CORES = 2, 4
_LIMIT = 2**63


@dataclass(frozen=True)
class TTShape:
    """Factors and ranks of a tensor train.

    Attributes:
        rows: p_1 to p_d.
        columns: q_1 to q_d.
        ranks: R_0 = 1, R_1 to R_(d-1), R_d = 1.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int] = (32, 32),
        tt_shapes: Sequence[Sequence[int]] | None = None,
    ) -> TTShape:
        """Return the shape for a table, with factors as balanced as possible.

        Args:
            tt_ranks: R_1 to R_(d-1); one integer R means (R, R).
            tt_shapes: (p_1 to p_d) and (q_1 to q_d); chosen if None.

        Raises:
            InvalidArgumentError: a size or rank is below 1, the dimension has too few factors, or
                the shapes do not fit the table.
        """
        num_embeddings = as_integer("num_embeddings", num_embeddings)
        embedding_dim = as_integer("embedding_dim", embedding_dim)
        values = tt_ranks if isinstance(tt_ranks, list | tuple) else (tt_ranks, tt_ranks)
        ranks = tuple(as_integer("tt_ranks", rank) for rank in values)
        if not MIN_CORES <= len(ranks) + 1 <= MAX_CORES:
            raise InvalidArgumentError("tt_ranks", f"has {len(ranks)} ranks, not 1, 2 or 3")
        if tt_shapes is None:
            if num_embeddings * embedding_dim >= _LIMIT:
                raise InvalidArgumentError(
                    "num_embeddings", f"{num_embeddings} x {embedding_dim} exceeds 2^63"
                )
            columns = _columns(embedding_dim, len(ranks) + 1)
            return cls(_rows(num_embeddings, len(ranks) + 1), columns, (1, *ranks, 1))
        shape = cls(*_checked(tt_shapes, len(ranks) + 1), (1, *ranks, 1))
        if math.prod(shape.rows) < num_embeddings:
            raise InvalidArgumentError(
                "tt_shapes", f"{math.prod(shape.rows)} rows are fewer than {num_embeddings}"
            )
        if math.prod(shape.rows) * embedding_dim >= _LIMIT:
            raise InvalidArgumentError("tt_shapes", f"rows {list(shape.rows)} exceed 2^63 numbers")
        if math.prod(shape.columns) != embedding_dim:
            raise InvalidArgumentError(
                "tt_shapes", f"columns {list(shape.columns)} do not multiply to {embedding_dim}"
            )
        return shape

    @property
    def cores(self) -> list[tuple[int, int, int, int]]:
        """Shapes of the cores."""
        return list(zip(self.rows, self.ranks, self.columns, self.ranks[1:], strict=False))

    @property
    def numbers(self) -> int:
        """Number of parameters of all cores."""
        return sum(math.prod(core) for core in self.cores)

    @property
    def digits(self) -> list[int]:
        """Place value of each digit of a row index: p_(t+1) ... p_d."""
        return [math.prod(self.rows[t + 1 :]) for t in range(len(self.rows))]

    @property
    def flops(self) -> int:
        """Multiplications and additions per row, multiplied from the left."""
        total, width = 0, self.columns[0]
        for _, left, column, right in self.cores[1:]:
            total += 2 * width * left * column * right
            width *= column
        return total


def nearest_dimension(embedding_dim: int, cores: int) -> int:
    """Return the nearest dimension with enough factors; ties go to the lower one."""
    for distance in range(embedding_dim + 2**cores):
        for near in (embedding_dim - distance, embedding_dim + distance):
            if near >= 2**cores and _balanced(near, cores) is not None:
                return near
    raise AssertionError("every power of two has factors")


def _columns(embedding_dim: int, cores: int) -> tuple[int, ...]:
    factors = _balanced(embedding_dim, cores)
    if factors is None:
        raise InvalidArgumentError(
            "embedding_dim",
            f"{embedding_dim} cannot be split into {cores} factors above 1",
            remedy=f"use {nearest_dimension(embedding_dim, cores)}, or pass tt_shapes",
        )
    return factors


def _balanced(number: int, parts: int) -> tuple[int, ...] | None:
    """Return the factors above 1 of minimum sum, ascending; None if there are none."""
    return min(
        _factorings(number, parts, 2), key=lambda factors: (sum(factors), factors), default=None
    )


def _factorings(number: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    for factor in range(least, math.isqrt(number) + 1):
        if number % factor == 0:
            for larger in _factorings(number // factor, parts - 1, factor):
                yield (factor, *larger)


def _rows(num_embeddings: int, parts: int) -> tuple[int, ...]:
    """Return near-equal factors, ascending, of a product of at least `num_embeddings`."""
    factors: list[int] = []
    remaining = num_embeddings
    for count in range(parts, 0, -1):
        root = _root(remaining, count)
        factors.append(root)
        remaining = -(-remaining // root)
    return tuple(sorted(factors))


def _root(number: int, degree: int) -> int:
    """Return the minimum integer whose power is at least `number`."""
    root = max(1, round(math.exp(math.log(number) / degree)) - 1)
    while root**degree < number:
        root += 1
    return root


def _checked(
    shapes: Sequence[Sequence[int]], cores: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lists = all(isinstance(part, list | tuple) for part in (shapes, *shapes))
    if not lists or len(shapes) != 2 or any(len(factors) != cores for factors in shapes):
        raise InvalidArgumentError(
            "tt_shapes",
            f"must be {cores} factors of the rows and {cores} of the dimension",
            remedy="for example ((200, 220, 250), (4, 4, 4)) with two ranks",
        )
    rows, columns = (tuple(as_integer("tt_shapes", factor) for factor in part) for part in shapes)
    return rows, columns
