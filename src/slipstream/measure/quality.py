"""Quality of candidates: intervals of a proportion, and paired tests of two arms.

A candidate that changes numerics needs a quality row to claim a speed-up. Outcomes are right or
wrong per item (accuracy, top-1, exact match), with the same items for both arms.

Sources: E. B. Wilson, 1927; Q. McNemar, 1947, in its exact binomial form.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.measure.statistics import Interval, critical_value

Outcomes = Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True)
class QualityRow:
    """Quality of one candidate, on the same items as the baseline.

    Attributes:
        baseline, candidate: Share of items that are right, with Wilson's 95 % interval.
        lost, gained: Items right only under the baseline, only under the candidate.
        p_value: Two-sided exact McNemar test that losses and gains are equally likely.
    """

    arm: str
    metric: str
    baseline: Interval
    candidate: Interval
    lost: int
    gained: int
    p_value: float
    items: int

    @property
    def difference(self) -> float:
        """Candidate minus baseline."""
        return self.candidate.estimate - self.baseline.estimate

    @property
    def verdict(self) -> str:
        """Short verdict for a table, at the level of the intervals."""
        if self.p_value >= 1 - self.baseline.level:
            return "no difference found"
        return "better" if self.difference > 0 else "worse"

    @property
    def sentence(self) -> str:
        """The full finding in words."""
        a, b = (
            f"{100 * side.estimate:.1f} % [{100 * side.low:.1f}, {100 * side.high:.1f}]"
            for side in (self.baseline, self.candidate)
        )
        return (
            f"{self.arm}, quality: {self.metric} {b}, baseline {a}; of {self.items} items, "
            f"{self.lost} were lost and {self.gained} gained (p = {self.p_value:.2g}): "
            f"{self.verdict}."
        )

    @classmethod
    def from_detail(cls, detail: Mapping[str, Any]) -> QualityRow:
        """Read a row from the details of a stored event."""
        sides = {side: Interval(**detail[side]) for side in ("baseline", "candidate")}
        return cls(**{**detail, **sides})


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Return the share of successes with Wilson's score interval.

    Raises:
        InvalidArgumentError: There are no trials, or more successes than trials.
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise InvalidArgumentError("successes", f"{successes} of {trials} is not a proportion")
    z = critical_value(level)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(share, low, high, level, "wilson")


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided exact p-value of equally likely losses and gains."""
    if lost < 0 or gained < 0:
        raise InvalidArgumentError("lost", "a count of items is negative")
    from scipy.stats import binomtest

    if lost + gained == 0:
        return 1.0
    return float(binomtest(lost, lost + gained, 0.5).pvalue)


def compare_quality(
    arm: str, baseline: Outcomes, candidate: Outcomes, *, metric: str = "accuracy"
) -> QualityRow:
    """Compare the outcomes [items] of `candidate` and `baseline`, in the same item order.

    Raises:
        InvalidArgumentError: There are no items, or different numbers of items.
    """
    a, b = np.asarray(baseline, bool), np.asarray(candidate, bool)
    if a.ndim != 1 or a.shape != b.shape or len(a) == 0:
        raise InvalidArgumentError(
            "quality",
            f"the baseline has outcomes of shape {a.shape}, '{arm}' of shape {b.shape}",
            remedy="judge both arms on the same items, one bool per item",
        )
    lost, gained = int(np.sum(a & ~b)), int(np.sum(~a & b))
    return QualityRow(
        arm=arm,
        metric=metric,
        baseline=wilson(int(a.sum()), len(a)),
        candidate=wilson(int(b.sum()), len(b)),
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
        items=len(a),
    )


def require_quality(
    changes_numerics: Sequence[str],
    quality: Mapping[str, Outcomes],
    baseline: str,
    checked: Collection[str] = (),
) -> None:
    """Check that arms that change numerics have quality outcomes.

    Args:
        checked: Arms whose quality was checked otherwise; see `checks`.

    Raises:
        InvalidArgumentError: An arm or the baseline has no outcomes.
    """
    for arm in changes_numerics:
        if arm in checked:
            continue
        missing = [name for name in (baseline, arm) if name not in quality]
        if missing:
            raise InvalidArgumentError(
                "quality",
                f"'{arm}' changes numerics, so a speed claim requires its quality",
                where=f"no outcomes of {' and '.join(repr(name) for name in missing)}",
                remedy="pass quality={arm: [right or wrong for each item]} for both arms",
            )
