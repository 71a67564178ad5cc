"""Durations from a curve through the same operator at other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.work import Work, work
from slipstream.graph import Call, Price
from slipstream.provenance import Provenance

_MIN_NEIGHBOURS = 4
_FARTHEST = 4.0
"""Maximum extrapolation beyond the neighbours, as a factor of their work."""
_MAX_SPREAD = 0.5
# A duration grows hardly faster than the work, except where caches end.
_MAX_SLOPE = 1.3


def fitted(call: Call, measured: Sequence[tuple[Call, float]]) -> Price | None:
    """Estimate the duration of `call` from calls of the same operator on the same dtypes.

    Fits a power law in the arithmetic, or in the bytes if there is none, to the logarithms.

    Args:
        measured: calls and durations in ns; those of other operators or dtypes are ignored.

    Returns:
        The price, whose spread is the leave-one-out error. None with fewer than four different
        sizes, beyond four times their range, or with a spread above 50 %.
    """
    here = work(call)
    if here is None:
        return None
    sizes: dict[tuple[int, int], list[float]] = {}
    for other, nanoseconds in measured:
        neighbour = work(other) if _same_kind(call, other) else None
        if neighbour is not None and nanoseconds > 0:
            sizes.setdefault((neighbour.flops, neighbour.nbytes), []).append(nanoseconds)
    if not (here.flops or here.nbytes):
        # Views cost a call of any size.
        return _constant([time for times in sizes.values() for time in times])
    if len(sizes) < _MIN_NEIGHBOURS:
        return None
    x = np.array([_logarithm(Work(*size, here.dtype)) for size in sizes])
    y = np.array([math.log(float(np.median(times))) for times in sizes.values()])
    at = _logarithm(here)
    outside = max(float(x.min()) - at, at - float(x.max()), 0.0)
    if outside > math.log(_FARTHEST) or float(np.ptp(x)) == 0.0:
        return None
    left_out = [y[i] - _line(np.delete(x, i), np.delete(y, i), float(x[i])) for i in range(len(x))]
    error = math.sqrt(np.average(np.square(left_out), weights=_nearness(x, at)))
    # Outside the range, the uncertainty grows by the error for each factor of two.
    spread = error * (1 + outside / math.log(2))
    if spread > _MAX_SPREAD:
        return None
    return Price(math.exp(_line(x, y, at)), spread, Provenance.FITTED)


def _constant(times: Sequence[float]) -> Price | None:
    if len(times) < _MIN_NEIGHBOURS:
        return None
    logarithms = np.log(times)
    spread = float(np.std(logarithms, ddof=1))
    if spread > _MAX_SPREAD:
        return None
    return Price(math.exp(float(np.median(logarithms))), spread, Provenance.FITTED)


def _same_kind(call: Call, other: Call) -> bool:
    return call.op == other.op and [spec.dtype for spec in call.inputs] == [
        spec.dtype for spec in other.inputs
    ]


def _logarithm(amount: Work) -> float:
    return math.log(max(amount.flops or amount.nbytes, 1))


def _nearness(x: NDArray[np.float64], at: float) -> NDArray[np.float64]:
    return 1 / (0.25 + np.abs(x - at))


def _line(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> float:
    """Return the value at `at` of a line through the nearest points, with a slope in [0, 1.3]."""
    weights = _nearness(x, at)
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    variance = np.average((x - mean_x) ** 2, weights=weights)
    covariance = np.average((x - mean_x) * (y - mean_y), weights=weights)
    slope = min(max(covariance / variance, 0.0), _MAX_SLOPE) if variance else 1.0
    return float(mean_y + slope * (at - mean_x))
