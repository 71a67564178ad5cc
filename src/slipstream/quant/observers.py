"""Observers, which determine the range that codes of a tensor should cover.

Sources: Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", 2018
(extremes); percentiles and least error over a histogram: Wu et al., "Integer
Quantization for Deep Learning Inference: Principles and Empirical Evaluation", 2020.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant.format import Format, Granularity
from slipstream.quant.grid import checked_floats, grid_of_range

_BINS = 4096
_CANDIDATES = 100


class Observer(Protocol):
    """Protocol of observers for calibration."""

    def observe(self, values: Any) -> None:
        """Add the values of a float tensor.

        Raises:
            InvalidArgumentError: it is empty or not finite.
        """

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to cover: two float32 tensors of the scales' shape, ``low <= high``.

        Raises:
            InvalidArgumentError: nothing was observed.
        """


class MinMax:
    """Minimum and maximum of all values, per tensor, channel or block."""

    def __init__(self, granularity: Granularity | None = None) -> None:
        self._granularity = granularity or Granularity()
        self._low: Any = None
        self._high: Any = None

    def observe(self, values: Any) -> None:
        low, high = self._granularity.extremes(checked_floats("values", values))
        if self._low is not None:
            low, high = torch.minimum(low, self._low), torch.maximum(high, self._high)
        self._low, self._high = low, high

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _seen(self._low), self._high


class _Histogram:
    """Counts of values in 4096 bins of [-reach, reach), which doubles when values require it.

    Doubling joins bins in pairs, so that no count is lost or split. Extremes are exact.
    """

    def __init__(self) -> None:
        self._reach = 0.0
        self._counts: Any = None
        self._low = math.inf
        self._high = -math.inf

    def observe(self, values: Any) -> None:
        values = checked_floats("values", values).flatten()
        low, high = (float(value) for value in torch.aminmax(values))
        self._low, self._high = min(self._low, low), max(self._high, high)
        furthest = max(-low, high, 1e-30)
        if self._counts is None:
            # The next power of two, so that later reaches are multiples of it.
            self._reach = 2.0 ** math.ceil(math.log2(furthest))
            self._counts = torch.zeros(_BINS, dtype=torch.float64)
        while furthest > self._reach:
            joined = self._counts.reshape(-1, 2).sum(1)
            self._counts = torch.zeros_like(self._counts)
            self._counts[_BINS // 4 : _BINS // 4 + _BINS // 2] = joined
            self._reach *= 2
        self._counts += torch.histc(values.cpu(), _BINS, -self._reach, self._reach)

    def _centres(self) -> Any:
        width = 2 * self._reach / _BINS
        return torch.arange(_BINS, dtype=torch.float64) * width + (width / 2 - self._reach)


class Percentile(_Histogram):
    """Range without equal shares of the values at both ends, up to a bin's width.

    Args:
        percent: percentage of the values to cover, above 50 and at most 100.
    """

    def __init__(self, percent: float = 99.99) -> None:
        if not 50 < percent <= 100:
            raise InvalidArgumentError("percent", f"{percent} is not above 50 and at most 100")
        super().__init__()
        self._percent = percent

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        counts = _seen(self._counts)
        outside = float(counts.sum()) * (1 - self._percent / 100) / 2
        below = torch.cumsum(counts, 0)
        above = torch.cumsum(counts.flip(0), 0)
        width = 2 * self._reach / _BINS
        first, last = int((below <= outside).sum()), _BINS - int((above <= outside).sum())
        # Without excluded values, the exact extreme replaces the bin's edge.
        exact_low = first == 0 or not below[first - 1]
        exact_high = last == _BINS or not above[_BINS - 1 - last]
        low = self._low if exact_low else max(self._low, first * width - self._reach)
        high = self._high if exact_high else min(self._high, last * width - self._reach)
        return torch.tensor(low), torch.tensor(max(low, high))


class LeastError(_Histogram):
    """Range whose grid has the least squared error over all observed values.

    Args:
        format: format of the codes; with few bits, clipping outliers reduces the error.
        symmetric: as for `grid_of_range`.
    """

    def __init__(self, format: Format, *, symmetric: bool = False) -> None:
        super().__init__()
        self._format = format
        self._symmetric = symmetric

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        counts = _seen(self._counts)
        centres = self._centres()
        best, extremes = math.inf, (self._low, self._high)
        for step in range(_CANDIDATES):
            part = 1 - step / _CANDIDATES
            low, high = self._low * part, self._high * part
            grid = grid_of_range(low, high, self._format, symmetric=self._symmetric)
            least, greatest = self._format.low - grid.zero, self._format.high - grid.zero
            restored = (centres / grid.scale).round().clamp(least, greatest) * grid.scale
            error = float((counts * (centres - restored).square()).sum())
            if error < best:
                best, extremes = error, (low, high)
        return torch.tensor(extremes[0]), torch.tensor(extremes[1])


def _seen(state: Any) -> Any:
    if state is None:
        raise InvalidArgumentError(
            "observer", "has observed nothing", remedy="observe at least one batch first"
        )
    return state
