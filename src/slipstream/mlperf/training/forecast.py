"""Predictions of an arm's time to quality before its first run, and the measured ratios.

Time to quality is the time per sample times the samples to the target. Each factor is predicted as
a ratio to the baseline, with a 90 % interval if its error is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.mlperf.training.compare import Factor, Verdict
from slipstream.tables import Field, Table
from slipstream.units import format_speedup, inverse_interval

_Z90 = 1.645


@dataclass(frozen=True)
class PredictedRatio:
    """A predicted ratio, candidate over baseline; below 1 is better.

    Attributes:
        ratio: predicted ratio; NaN without a prediction.
        low, high: 90 % interval of the measurement; NaN if the error is unknown.
        basis: source of the prediction, or the reason for its absence.
        applies: whether the technique can be applied at all.
    """

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    basis: str = ""
    applies: bool = True

    @classmethod
    def of(cls, ratio: float, deviation: float, basis: str) -> PredictedRatio:
        """Build the interval from the standard deviation of the logarithm, which may be NaN."""
        width = math.exp(_Z90 * deviation)
        return cls(ratio, ratio / width, ratio * width, basis)

    @property
    def is_predicted(self) -> bool:
        """Whether there is a prediction."""
        return not math.isnan(self.ratio)

    def over(self, other: PredictedRatio) -> PredictedRatio:
        """Return this ratio over `other`; errors are independent, so log-variances add up."""
        return self._joined(1 / other.ratio, 1 / other.high, 1 / other.low, other.basis)

    def times(self, other: PredictedRatio) -> PredictedRatio:
        """Return the product with `other`, with independent errors."""
        return self._joined(other.ratio, other.low, other.high, other.basis)

    def _joined(self, ratio: float, low: float, high: float, basis: str) -> PredictedRatio:
        below = math.hypot(math.log(self.ratio / self.low), math.log(ratio / low))
        above = math.hypot(math.log(self.high / self.ratio), math.log(high / ratio))
        middle = self.ratio * ratio
        basis = "; ".join(filter(None, dict.fromkeys((self.basis, basis))))
        return PredictedRatio(middle, middle * math.exp(-below), middle * math.exp(above), basis)

    def __str__(self) -> str:
        if not self.is_predicted:
            return "-"
        if math.isnan(self.low):
            return f"{1 / self.ratio:.3f}x"
        return format_speedup(inverse_interval(self.ratio, self.low, self.high), 3)


@dataclass(frozen=True)
class ArmForecast:
    """The predicted factors of one arm.

    Attributes:
        sample: ratio of the time per sample.
        samples: ratio of the samples to the target.
    """

    name: str
    sample: PredictedRatio
    samples: PredictedRatio

    @property
    def time(self) -> PredictedRatio:
        """Ratio of the time of all steps to the target, without evaluations."""
        return self.sample.times(self.samples)

    @property
    def applies(self) -> bool:
        """Whether the technique can be applied."""
        return self.sample.applies

    @property
    def sentence(self) -> str:
        """The prediction in one sentence."""
        if not self.applies:
            return f"{self.sample.basis}: not trained"
        parts = [
            f"{word} {factor}" if factor.is_predicted else f"{word} not predicted ({factor.basis})"
            for word, factor in (("time per sample", self.sample), ("samples", self.samples))
        ]
        whole = f"; time of all steps {self.time}" * self.time.is_predicted
        return f"{self.name}, predicted speed-up: {', '.join(parts)}{whole}"

    def to_json(self) -> dict[str, Any]:
        """Return the factors as JSON."""
        return {name: vars(getattr(self, name)) for name in ("sample", "samples", "time")}


@dataclass(frozen=True)
class _Row:
    name: str
    factor: str
    expected: PredictedRatio
    measured: Factor

    @property
    def inside(self) -> str:
        """Whether the measured ratio is in the predicted interval."""
        if not self.expected.low <= math.inf or math.isnan(self.measured.ratio):
            return "-"
        # Equal to the digits shown counts as inside.
        off = abs(self.measured.ratio - self.expected.ratio) < 5e-4
        return "yes" if off or self.expected.low <= self.measured.ratio <= self.expected.high \
            else "no"  # fmt: skip


_FIELDS = (
    Field[_Row].of("Training", lambda row: row.name),
    Field[_Row].of("Factor", lambda row: row.factor),
    Field[_Row].of("Predicted", lambda row: str(row.expected)),
    Field[_Row].of("Measured", lambda row: str(row.measured)),
    Field[_Row].of("Inside", lambda row: row.inside),
    Field[_Row].of("Basis", lambda row: row.expected.basis, optional=True),
)


def forecast_table(predictions: Mapping[str, ArmForecast], verdicts: Sequence[Verdict]) -> Table:
    """Return predicted and measured speed-ups, a row per factor."""
    rows = []
    for verdict in verdicts:
        if (prediction := predictions.get(verdict.name)) is None:
            continue
        rows += [
            _Row(verdict.name, "time per sample", prediction.sample, verdict.sample),
            _Row(verdict.name, "samples", prediction.samples, verdict.samples),
            _Row(verdict.name, "time of all steps", prediction.time, verdict.steps),
        ]
    return Table.of(rows, _FIELDS, "Speed-ups predicted before the first run, with 90 % intervals")
