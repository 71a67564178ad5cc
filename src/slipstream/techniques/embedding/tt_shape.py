"""The shape of a tensor train: how rows and columns are factored, and what it costs.

A table of E x D numbers stands for a product of d cores; core t is [p_t, R_(t-1), q_t, R_t]. Row
numbers are read as digits to the bases p_t, the most significant first, columns likewise to the
bases q_t; p_1 ... p_d may be more than E, never less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError

LEAST_CORES, MOST_CORES = 2, 4
_LIMIT = 2**63


@dataclass(frozen=True)
class TTShape:
    """How a table is factored.

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
        """The shape for a table, as balanced as its factors can be.

        Args:
            tt_ranks: R_1 to R_(d-1); one number stands for (R, R).
            tt_shapes: (p_1 to p_d) and (q_1 to q_d), or None to have them chosen.

        Raises:
            InvalidArgumentError: sizes or ranks below 1, a dimension that has too few factors, or
                shapes that do not fit the table.
        """
        num_embeddings = as_integer("num_embeddings", num_embeddings)
        embedding_dim = as_integer("embedding_dim", embedding_dim)
        given = tt_ranks if isinstance(tt_ranks, list | tuple) else (tt_ranks, tt_ranks)
        ranks = tuple(as_integer("tt_ranks", rank) for rank in given)
        if not LEAST_CORES <= len(ranks) + 1 <= MOST_CORES:
            raise InvalidArgumentError("tt_ranks", f"{len(ranks)} ranks are not 1, 2 or 3")
        if tt_shapes is None:
            if num_embeddings * embedding_dim >= _LIMIT:
                raise InvalidArgumentError(
                    "num_embeddings", f"{num_embeddings} x {embedding_dim} is beyond 2^63"
                )
            columns = _columns(embedding_dim, len(ranks) + 1)
            return cls(_rows(num_embeddings, len(ranks) + 1), columns, (1, *ranks, 1))
        shape = cls(*_given(tt_shapes, len(ranks) + 1), (1, *ranks, 1))
        if math.prod(shape.rows) < num_embeddings:
            raise InvalidArgumentError(
                "tt_shapes", f"{math.prod(shape.rows)} rows are less than {num_embeddings}"
            )
        if math.prod(shape.rows) * embedding_dim >= _LIMIT:
            raise InvalidArgumentError("tt_shapes", f"rows {list(shape.rows)} are beyond 2^63")
        if math.prod(shape.columns) != embedding_dim:
            raise InvalidArgumentError(
                "tt_shapes", f"columns {list(shape.columns)} do not make {embedding_dim}"
            )
        return shape

    @property
    def cores(self) -> list[tuple[int, int, int, int]]:
        """The shapes of the cores."""
        return list(zip(self.rows, self.ranks, self.columns, self.ranks[1:], strict=False))

    @property
    def numbers(self) -> int:
        """Parameters of all cores together."""
        return sum(math.prod(core) for core in self.cores)

    @property
    def digits(self) -> list[int]:
        """What one step of each digit is worth in row numbers: p_(t+1) ... p_d."""
        return [math.prod(self.rows[t + 1 :]) for t in range(len(self.rows))]

    @property
    def flops(self) -> int:
        """Multiplications and additions that make one row, from the left."""
        total, width = 0, self.columns[0]
        for _, left, column, right in self.cores[1:]:
            total += 2 * width * left * column * right
            width *= column
        return total


def nearest_dimension(embedding_dim: int, cores: int) -> int:
    """The dimension next to this one, below it where two are as near, with that many factors."""
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
            f"{embedding_dim} has no {cores} factors above 1",
            remedy=f"{nearest_dimension(embedding_dim, cores)} has; or give tt_shapes",
        )
    return factors


def _balanced(number: int, parts: int) -> tuple[int, ...] | None:
    """Factors above 1 whose sum is least, rising."""
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
            for rest in _factorings(number // factor, parts - 1, factor):
                yield (factor, *rest)


def _rows(num_embeddings: int, parts: int) -> tuple[int, ...]:
    """As equal as they can be, with a product of at least `num_embeddings`, rising."""
    factors: list[int] = []
    left = num_embeddings
    for count in range(parts, 0, -1):
        root = _root(left, count)
        factors.append(root)
        left = -(-left // root)
    return tuple(sorted(factors))


def _root(number: int, degree: int) -> int:
    """The least integer whose power is at least `number`."""
    root = max(1, round(math.exp(math.log(number) / degree)) - 1)
    while root**degree < number:
        root += 1
    return root


def _given(shapes: Sequence[Sequence[int]], cores: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lists = all(isinstance(part, list | tuple) for part in (shapes, *shapes))
    if not lists or len(shapes) != 2 or any(len(factors) != cores for factors in shapes):
        raise InvalidArgumentError(
            "tt_shapes",
            f"must be {cores} factors of the rows and {cores} of the dimension",
            remedy="as ((200, 220, 250), (4, 4, 4)) with two ranks",
        )
    rows, columns = (tuple(as_integer("tt_shapes", one) for one in part) for part in shapes)
    return rows, columns
