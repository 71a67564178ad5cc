"""`Price`: the predicted duration of a call, its provenance and its spread.

    edit.put(task, call, price(context.durations, call, otherwise_ns=recorded_ns, pace=in_step))

uses a micro-benchmark at the step's pace, or else assumes the recorded duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.values import PROVENANCES
from slipstream.provenance import Provenance

UNKNOWN_SPREAD = 0.5
"""Spread of an assumed duration: relative half-width of the middle half."""


@dataclass(frozen=True)
class Price:
    """A duration with its provenance.

    Attributes:
        spread: relative half-width of the middle half of the durations.
    """

    nanoseconds: float
    spread: float
    provenance: Provenance

    def at(self, pace: float) -> Self:
        """Return the price with the duration multiplied by `pace`."""
        return replace(self, nanoseconds=self.nanoseconds * pace)


class Prices(Protocol):
    """A source of prices, such as `slipstream.durations.Durations` or a table."""

    def lookup(self, call: Any) -> Price | None:
        """Return the price of a call, or of a query about one; None if unknown."""


def price(
    prices: Prices,
    calls: Any,
    otherwise_ns: float,
    *,
    pace: float = 1.0,
    spread: float = UNKNOWN_SPREAD,
) -> Price:
    """Return the price of a call, or of several run sequentially, with a fallback.

    Args:
        calls: a call, a query about one, or a sequence of these.
        otherwise_ns: the duration to assume if any price is unknown or `calls` is empty.
        pace: the ratio of durations in the step to `prices`, see `slipstream.durations.pace`.
        spread: the spread of the assumed duration.
    """
    several = calls if isinstance(calls, Sequence) else (calls,)
    found = [priced for priced in map(prices.lookup, several) if priced is not None]
    if not found or len(found) < len(several):
        return Price(otherwise_ns, spread, Provenance.ASSUMED)
    first = found[0]
    return Price(sum(priced.nanoseconds for priced in found) * pace, first.spread, first.provenance)


def price_columns(
    prices: Sequence[Price],
) -> tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.float64]]:
    """Return columns of durations in ns, provenances (indices in `PROVENANCES`) and spreads."""
    return (
        np.array([price.nanoseconds for price in prices], np.float64),
        np.array([PROVENANCES.index(price.provenance) for price in prices], np.uint8),
        np.array([price.spread for price in prices], np.float64),
    )
