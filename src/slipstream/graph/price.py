"""`Price`: what a call takes in a prediction, where that is from, and how sure it is.

    edit.put(task, call, price(context.durations, call, otherwise_ns=recorded_ns, pace=in_step))

is the price of a micro-benchmark at the step's pace, or the recorded duration as an assumption.
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
"""Relative half-width of the middle half of what a duration may be that nobody measured."""


@dataclass(frozen=True)
class Price:
    """How long something takes.

    Attributes:
        spread: relative half-width of the middle half of the durations.
    """

    nanoseconds: float
    spread: float
    provenance: Provenance

    def at(self, pace: float) -> Self:
        """The same where everything takes `pace` times as long."""
        return replace(self, nanoseconds=self.nanoseconds * pace)


class Prices(Protocol):
    """Whoever knows prices: `slipstream.durations.Durations`, or a table."""

    def lookup(self, call: Any) -> Price | None:
        """The price of a call, or of a question about one; None where it is not known."""


def price(
    known: Prices,
    calls: Any,
    otherwise_ns: float,
    *,
    pace: float = 1.0,
    spread: float = UNKNOWN_SPREAD,
) -> Price:
    """What a call takes, or several in turn, also where that is not known.

    Args:
        calls: a call, a question about one, or a sequence of these.
        otherwise_ns: what is assumed where one of them is not known, or there are none.
        pace: what stretches known durations to those of the step, see `slipstream.durations.pace`.
        spread: of what is assumed.
    """
    several = calls if isinstance(calls, Sequence) else (calls,)
    prices = [one for one in map(known.lookup, several) if one is not None]
    if not prices or len(prices) < len(several):
        return Price(otherwise_ns, spread, Provenance.ASSUMED)
    first = prices[0]
    return Price(sum(one.nanoseconds for one in prices) * pace, first.spread, first.provenance)


def price_columns(
    prices: Sequence[Price],
) -> tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.float64]]:
    """Durations in ns, provenances as indices in `PROVENANCES`, and spreads, as columns."""
    return (
        np.array([one.nanoseconds for one in prices], np.float64),
        np.array([PROVENANCES.index(one.provenance) for one in prices], np.uint8),
        np.array([one.spread for one in prices], np.float64),
    )
