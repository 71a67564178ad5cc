"""What is expected of an arm before its first run, and how it turned out.

Time to quality is the time of a sample times the samples to the target; each is expected as a ratio
to the baseline, with a 90 % interval where something says how sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.mlperf.training.compare import Factor, Verdict
from slipstream.tables import Field, Table

_Z90 = 1.645


@dataclass(frozen=True)
class Expected:
    """A ratio, candidate over baseline; below 1 is better.

    Attributes:
        ratio: NaN where it is not predicted.
        low, high: 90 % interval of what will be measured; NaN where nothing says.
        basis: what it rests on, or why it is not predicted.
        applies: whether the technique can be applied at all.
    """

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    basis: str = ""
    applies: bool = True

    @classmethod
    def of(cls, ratio: float, deviation: float, basis: str) -> Expected:
        """From the standard deviation of its logarithm, which may be NaN."""
        reach = math.exp(_Z90 * deviation)
        return cls(ratio, ratio / reach, ratio * reach, basis)

    @property
    def known(self) -> bool:
        """Whether it is predicted."""
        return not math.isnan(self.ratio)

    def over(self, other: Expected) -> Expected:
        """This ratio over `other`, of independent errors: squares of logarithms add up."""
        return self._joined(1 / other.ratio, 1 / other.high, 1 / other.low, other.basis)

    def times(self, other: Expected) -> Expected:
        """The product, likewise."""
        return self._joined(other.ratio, other.low, other.high, other.basis)

    def _joined(self, ratio: float, low: float, high: float, basis: str) -> Expected:
        below = math.hypot(math.log(self.ratio / self.low), math.log(ratio / low))
        above = math.hypot(math.log(self.high / self.ratio), math.log(high / ratio))
        middle = self.ratio * ratio
        basis = "; ".join(filter(None, dict.fromkeys((self.basis, basis))))
        return Expected(middle, middle * math.exp(-below), middle * math.exp(above), basis)

    def __str__(self) -> str:
        if not self.known:
            return "-"
        if math.isnan(self.low):
            return f"{self.ratio:.3f}"
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Foresight:
    """The factors of one arm.

    Attributes:
        sample, samples: of the time of a sample, and of the samples to the target.
    """

    name: str
    sample: Expected
    samples: Expected

    @property
    def time(self) -> Expected:
        """Time of all steps to the target; evaluations are not predicted."""
        return self.sample.times(self.samples)

    @property
    def applies(self) -> bool:
        """Whether there is anything to train."""
        return self.sample.applies

    @property
    def sentence(self) -> str:
        """In words."""
        if not self.applies:
            return f"{self.sample.basis}: not trained"
        told = [
            f"{word} {one}" if one.known else f"{word} is not predicted ({one.basis})"
            for word, one in (("time of a sample", self.sample), ("samples", self.samples))
        ]
        whole = f"; time of all steps {self.time}" * self.time.known
        return f"{self.name}, predicted: {', '.join(told)}{whole}"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: vars(getattr(self, name)) for name in ("sample", "samples", "time")}


@dataclass(frozen=True)
class _Row:
    name: str
    factor: str
    expected: Expected
    measured: Factor

    @property
    def inside(self) -> str:
        """Whether the measured ratio lies in the predicted interval."""
        if not self.expected.low <= math.inf or math.isnan(self.measured.ratio):
            return "-"
        # The last digit that is shown decides nothing.
        off = abs(self.measured.ratio - self.expected.ratio) < 5e-4
        return "yes" if off or self.expected.low <= self.measured.ratio <= self.expected.high \
            else "no"  # fmt: skip


_FIELDS = (
    Field[_Row].of("Training", lambda row: row.name),
    Field[_Row].of("Factor", lambda row: row.factor),
    Field[_Row].of("Predicted", lambda row: str(row.expected)),
    Field[_Row].of("Measured", lambda row: f"{row.measured.ratio:.3f}"),
    Field[_Row].of("Inside", lambda row: row.inside),
    Field[_Row].of("Rests on", lambda row: row.expected.basis, optional=True),
)


def foresight_table(predictions: Mapping[str, Foresight], verdicts: Sequence[Verdict]) -> Table:
    """Predicted beside measured, a row a factor."""
    rows = []
    for verdict in verdicts:
        if (one := predictions.get(verdict.name)) is None:
            continue
        rows += [
            _Row(verdict.name, "time of a sample", one.sample, verdict.sample),
            _Row(verdict.name, "samples", one.samples, verdict.samples),
            _Row(verdict.name, "time of all steps", one.time, verdict.steps),
        ]
    return Table.of(rows, _FIELDS, "Predicted before the first run, with 90 % intervals")
