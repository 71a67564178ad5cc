"""A duration from neighbours: the same operator, measured at other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.work import Work, work
from slipstream.graph import Call, Price
from slipstream.provenance import Provenance

_LEAST_NEIGHBOURS = 4
_FARTHEST = 4.0
"""How many times more or less work than any neighbour a curve is still followed to."""
_WIDEST = 0.5
# A call's time grows with its work, and hardly faster: caches end, nothing else does.
_STEEPEST = 1.3


def fitted(call: Call, known: Sequence[tuple[Call, float]]) -> Price | None:
    """How long `call` takes, from measured calls of the same operator on the same dtypes.

    A power law in the arithmetic (or, where there is none, the bytes) is fitted to the logarithms;
    each neighbour left out in turn says how far such a curve is off.

    Args:
        known: calls and their durations in ns; those of other operators or dtypes are ignored.

    Returns:
        A price whose spread says how well neighbours tell each other; None with fewer than four of
        different size, outside four times their range, or where they do not tell each other to
        within 50 %.
    """
    here = work(call)
    if here is None:
        return None
    sizes: dict[tuple[int, int], list[float]] = {}
    for other, nanoseconds in known:
        there = work(other) if _alike(call, other) else None
        if there is not None and nanoseconds > 0:
            sizes.setdefault((there.flops, there.nbytes), []).append(nanoseconds)
    if not (here.flops or here.nbytes):
        # Views cost a call, whatever their size.
        return _constant([time for times in sizes.values() for time in times])
    if len(sizes) < _LEAST_NEIGHBOURS:
        return None
    x = np.array([_logarithm(Work(*size, here.dtype)) for size in sizes])
    y = np.array([math.log(float(np.median(times))) for times in sizes.values()])
    at = _logarithm(here)
    outside = max(float(x.min()) - at, at - float(x.max()), 0.0)
    if outside > math.log(_FARTHEST) or float(np.ptp(x)) == 0.0:
        return None
    left_out = [y[i] - _line(np.delete(x, i), np.delete(y, i), float(x[i])) for i in range(len(x))]
    error = math.sqrt(np.average(np.square(left_out), weights=_nearness(x, at)))
    # What lies outside the range is as uncertain again for each factor of two.
    spread = error * (1 + outside / math.log(2))
    if spread > _WIDEST:
        return None
    return Price(math.exp(_line(x, y, at)), spread, Provenance.FITTED)


def _constant(times: Sequence[float]) -> Price | None:
    if len(times) < _LEAST_NEIGHBOURS:
        return None
    logarithms = np.log(times)
    spread = float(np.std(logarithms, ddof=1))
    if spread > _WIDEST:
        return None
    return Price(math.exp(float(np.median(logarithms))), spread, Provenance.FITTED)


def _alike(call: Call, other: Call) -> bool:
    return call.op == other.op and [spec.dtype for spec in call.inputs] == [
        spec.dtype for spec in other.inputs
    ]


def _logarithm(one: Work) -> float:
    return math.log(max(one.flops or one.nbytes, 1))


def _nearness(x: NDArray[np.float64], at: float) -> NDArray[np.float64]:
    return 1 / (0.25 + np.abs(x - at))


def _line(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> float:
    """The straight line through the points nearest to `at`, its slope kept between 0 and 1.3."""
    weights = _nearness(x, at)
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    variance = np.average((x - mean_x) ** 2, weights=weights)
    covariance = np.average((x - mean_x) * (y - mean_y), weights=weights)
    slope = min(max(covariance / variance, 0.0), _STEEPEST) if variance else 1.0
    return float(mean_y + slope * (at - mean_x))
