"""The first choice of `advise`, measured next to the baseline within the time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream import technique
from slipstream.errors import SlipstreamError
from slipstream.measure.records import PredictionRecord, Verdict
from slipstream.measure.render import (
    ComparisonRow,
    comparison_rows,
    describe_inside,
    format_change,
    on_busy_machine,
    speedup,
)
from slipstream.measure.runner import ArmFailedError
from slipstream.measure.store import Store
from slipstream.units import format_percent
from slipstream.verbs.deadline import CHECK_S, MIN_CHECK_S, Schedule
from slipstream.verbs.proving.sides import prove
from slipstream.verbs.request import Request
from slipstream.verbs.results import WORTH_IT, Predicted

# With less time left, nothing is started.
_SHORTEST_S = 5.0
# Three launches show how much launches differ; two of them start both sides again.
_MORE_LAUNCHES = 2
_NO_TIME = "there was no time left"


@dataclass(frozen=True)
class Check:
    """The first choice and its measurement.

    Attributes:
        predicted: the first choice.
        row: the measurement, in the predicted metric; None without one.
        reason: why it was not measured.
        failed: whether the first choice fails in the user's code, which `reason` quotes.
        alternative: the next choice, which is not measured.
        for_limit: whether it was chosen for a limit that it keeps, and not for its speed.
    """

    predicted: Predicted
    row: ComparisonRow | None = None
    reason: str = ""
    failed: bool = False
    alternative: Predicted | None = None
    for_limit: bool = False

    @property
    def _measured(self) -> tuple[float, float, float] | None:
        return None if self.row is None else speedup(self.row)

    @property
    def worth_it(self) -> bool | None:
        """Whether the measured speed-up is worth it; None if that cannot be decided."""
        if self._measured is None or self.row is None:
            return False if self.failed else None
        if self._for_memory or self.row.verdict == Verdict.UNTRUSTWORTHY:
            return None
        gain = self._measured[0] >= WORTH_IT
        return None if self._undecided and not gain else gain

    @property
    def _for_memory(self) -> bool:
        """Whether it was chosen for a limit or for the memory it saves, and not for its speed."""
        return self.for_limit or self.predicted.speedup < WORTH_IT

    @property
    def _undecided(self) -> str:
        """Reason why one launch does not show that there is no gain; empty if it does."""
        if self._measured is None or self.row is None or self.row.launches > 1:
            return ""
        if on_busy_machine(self.row):
            return "the machine is busy"
        reaches = self._measured[2] >= self.predicted.speedup_interval[0]
        if reaches and self.row.verdict == Verdict.INCONCLUSIVE:
            return "too noisy to tell"
        return self.row.doubt

    @property
    def sentence(self) -> str:
        text = f"first choice {self.predicted.technique}: predicted {self.predicted.gain}"
        if self._for_memory and self.predicted.saved > 0:
            text += f" and {format_percent(-self.predicted.saved, signed=True)} memory"
        if self._measured is None or self.row is None:
            if self.failed:
                return f"{text}, but it fails here: {self.reason}{self._next}"
            return f"{text}; not measured: {self.reason}"
        text += f", measured {format_change(self.row, 2)}"
        if self.row.verdict == Verdict.UNTRUSTWORTHY:
            return f"{text}, which is not trustworthy: {self.row.reason} ({self._how})"
        if self.worth_it is False:
            clear = self._measured[2] < WORTH_IT
            verdict = "not worth it here" if clear else "no clear gain; `prove` measures longer"
            return f"{text}: {verdict} ({self._how}){self._next}"
        if self.worth_it is None and not self._for_memory:
            return f"{text}: not decided: {self._undecided}; `prove` measures longer ({self._how})"
        inside = describe_inside(self.row.inside)
        inside += " the predicted interval" if self.row.inside is not None else ""
        return f"{text}: {inside} ({self._how})"

    @property
    def _how(self) -> str:
        """The amount of data, and what the interval does not include."""
        assert self.row is not None
        blocks, launches = self.row.blocks, self.row.launches
        text = f"{self.row.metric} time of {blocks} paired step{'s' * (blocks != 1)}"
        if launches > 1:
            return f"{text} in {launches} launches of each side"
        return f"{text} in one launch of each side: other launches may differ"

    @property
    def _next(self) -> str:
        if self.alternative is None:
            return ""
        return (
            f"; next choice, not measured: {self.alternative.technique}, predicted "
            f"{self.alternative.gain}"
        )

    def to_json(self) -> dict[str, Any]:
        measured = self._measured
        return {
            "technique": self.predicted.technique,
            "predicted_speedup": self.predicted.speedup,
            "predicted_speedup_interval": self.predicted.speedup_interval,
            "speedup": measured and measured[0],
            "speedup_interval": measured and measured[1:],
            "inside": self.row and self.row.inside,
            "worth_it": self.worth_it,
            "failed": self.failed,
            "reason": self.reason or None,
            "metric": self.row and self.row.metric,
            "blocks": self.row and self.row.blocks,
            "launches": self.row and self.row.launches,
            "verdict": self.row and self.row.verdict,
            "next": self.alternative and self.alternative.technique,
        }


def measure_first_choice(
    check: Check,
    request: Request,
    schedule: Schedule,
    predictions: Mapping[str, PredictionRecord],
    *,
    store: Store | None = None,
    progress: Callable[[Any], None] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Check:
    """Measure a first choice in paired steps for about ten seconds, as `prove` does.

    Failures are returned as `Check.reason`, not raised.

    Args:
        check: the first choice, not measured yet.
        predictions: those that are shown, by technique.
        store: keeps the measurement; None to keep nothing.
    """
    left_s = schedule.check - time.monotonic()
    if left_s < _SHORTEST_S:
        return replace(check, reason=_NO_TIME)
    if left_s < schedule.starting_s + MIN_CHECK_S:
        return replace(check, reason="starting it twice takes longer than the time limit leaves")
    name = check.predicted.technique
    try:
        workload = request.workload()
        if (reason := technique.not_in_script(check.predicted.techniques, workload)) is not None:
            return replace(check, reason=reason)
        comparison = prove(
            workload,
            [name],
            predictions={name: predictions[name]},
            # Starting further launches counts.
            budget=min(left_s, CHECK_S + _MORE_LAUNCHES * schedule.starting_s),
            quality_budget=None,
            threads=request.threads,
            # The sides start sequentially.
            timeout_s=min(request.timeout_s, left_s / 2),
            until=schedule.check,
            store=store,
            progress=progress,
            report=report,
        )
    except SlipstreamError as error:
        if time.monotonic() >= schedule.check - 1:
            return replace(check, reason=_NO_TIME)
        failed = isinstance(error, ArmFailedError) and error.arm == name
        # The error of the user's code, without the runner's words around it.
        cause = error.__cause__ if isinstance(error.__cause__, SlipstreamError) else error
        where = f" ({cause.where})" if cause.where else ""
        reason = cause.what.partition("\n")[0] + where
        return replace(check, reason=reason, failed=failed)
    rows = comparison_rows(comparison.experiment, comparison.claims)
    measured = [row for row in rows if row.arm == name and (row.predicted or row.carries)]
    measured.sort(key=lambda row: row.predicted is None)
    if not measured:
        return replace(check, reason=_NO_TIME)
    row = measured[0]
    if not 0 < row.low <= row.high < math.inf:
        steps = f"{row.blocks} paired step{'s' * (row.blocks != 1)}"
        return replace(check, reason=f"only {steps} fitted into the time, too few for an interval")
    return replace(check, row=row)
