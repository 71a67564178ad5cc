"""Bounds of loop iterators: affine constraints, eliminated variable by variable.

Source: Schrijver, "Theory of Linear and Integer Programming", 1986, section 12.2 (Fourier-Motzkin).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.codegen.program import Index

Ranges = Mapping[str, tuple[float, float]]
"""Least and greatest value by variable."""


@dataclass(frozen=True)
class Bound:
    """``ceil(value / divisor)`` of a lower, ``floor(value / divisor)`` of an upper bound."""

    value: Index
    divisor: int = 1


@dataclass(frozen=True)
class Bounds:
    """Bounds of one iterator: at least all of `lower` and at most all of `upper`."""

    lower: tuple[Bound, ...]
    upper: tuple[Bound, ...]

    @property
    def extent(self) -> int | None:
        """The maximum number of iterations, if it is constant."""
        differences = [
            high.value.offset - low.value.offset + 1
            for low in self.lower
            for high in self.upper
            if low.divisor == high.divisor == 1 and low.value.terms == high.value.terms
        ]
        return min(differences, default=None)

    @property
    def constant(self) -> bool:
        """Whether every execution has `extent` iterations."""
        return len(self.lower) == len(self.upper) == 1 and self.extent is not None


def value_range(index: Index, ranges: Ranges) -> tuple[float, float]:
    """Return the least and greatest value of an affine expression."""
    low = high = float(index.offset)
    for name, factor in index.terms:
        ends = [factor * end for end in ranges.get(name, (-math.inf, math.inf))]
        low += min(ends)
        high += max(ends)
    return low, high


def _normal(index: Index) -> Index:
    """Divide a constraint by the common divisor of its factors, and round its constant."""
    divisor = math.gcd(*(k for _, k in index.terms)) if index.terms else 1
    if divisor < 2:
        return index
    return Index(tuple((n, k // divisor) for n, k in index.terms), index.offset // divisor)


def _tightest(constraints: Iterable[Index], ranges: Ranges) -> list[Index]:
    """Drop constraints implied by others with the same factors, or by the ranges of variables."""
    best: dict[tuple[tuple[str, int], ...], int] = {}
    for constraint in map(_normal, constraints):
        if not constraint.terms and constraint.offset >= 0:
            continue
        if len(constraint.terms) > 1 and value_range(constraint, ranges)[0] >= 0:
            continue
        offset = best.get(constraint.terms)
        best[constraint.terms] = constraint.offset if offset is None else min(
            offset, constraint.offset
        )  # fmt: skip
    return [Index(terms, offset) for terms, offset in best.items()]


def scan(
    constraints: Sequence[Index], order: Sequence[str], outer: Ranges | None = None
) -> tuple[dict[str, Bounds], dict[str, tuple[float, float]], bool]:
    """Return the bounds of each iterator in terms of those before it, and all ranges.

    The last result is False if the constraints have no rational solution.

    Args:
        order: iterators, outermost first.
        outer: ranges of other variables, such as symbols.
    """
    system = _tightest(constraints, {})
    layers: list[list[Index]] = []
    for name in reversed(order):
        layers.append([c for c in system if c.factor(name)])
        lower = [c for c in layers[-1] if c.factor(name) > 0]
        upper = [c for c in layers[-1] if c.factor(name) < 0]
        combined = [
            Index(
                (*((n, k * -high.factor(name)) for n, k in low.terms),
                 *((n, k * low.factor(name)) for n, k in high.terms)),
                low.offset * -high.factor(name) + high.offset * low.factor(name),
            )
            for low in lower
            for high in upper
        ]  # fmt: skip
        system = _tightest([c for c in system if not c.factor(name)] + combined, {})
    ranges: dict[str, tuple[float, float]] = dict(outer or {})
    bounds: dict[str, Bounds] = {}
    for name, layer in zip(order, reversed(layers), strict=True):
        lows = [_bound(c, name) for c in layer if c.factor(name) > 0]
        highs = [_bound(c, name) for c in layer if c.factor(name) < 0]
        lows = _prune(lows, ranges, least=True)
        highs = _prune(highs, ranges, least=False)
        bounds[name] = Bounds(tuple(lows), tuple(highs))
        ranges[name] = (
            max((math.ceil(_ratio(value_range(b.value, ranges)[0], b)) for b in lows
                 if math.isfinite(value_range(b.value, ranges)[0])), default=-math.inf),
            min((math.floor(_ratio(value_range(b.value, ranges)[1], b)) for b in highs
                 if math.isfinite(value_range(b.value, ranges)[1])), default=math.inf),
        )  # fmt: skip
    possible = all(c.terms or c.offset >= 0 for c in system)
    return bounds, ranges, possible


def _ratio(value: float, bound: Bound) -> float:
    return value / bound.divisor


def _bound(constraint: Index, name: str) -> Bound:
    factor = constraint.factor(name)
    sign = -1 if factor > 0 else 1
    terms = tuple((n, sign * k) for n, k in constraint.terms if n != name)
    return Bound(Index(terms, sign * constraint.offset), abs(factor))


def _prune(bounds: list[Bound], ranges: Ranges, *, least: bool) -> list[Bound]:
    """Drop bounds that another one implies wherever the outer iterators are in their ranges."""
    retained = list(dict.fromkeys(bounds))
    for bound in list(retained):
        for other in retained:
            if other is bound or other.divisor != 1 or bound.divisor != 1:
                continue
            difference = Index(
                (*other.value.terms, *((n, -k) for n, k in bound.value.terms)),
                other.value.offset - bound.value.offset,
            )
            low, high = value_range(difference, ranges)
            if (least and low >= 0) or (not least and high <= 0):
                retained.remove(bound)
                break
    return retained
