"""Goals for a step: ``memory<8GiB``, ``p99<20ms`` at a request rate, or ``cost``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.errors import InvalidArgumentError, UnknownNameError, UsageError
from slipstream.units import format_bytes, format_duration, parse_bytes, parse_duration_ns
from slipstream.verbs.results import Predicted

if TYPE_CHECKING:
    from slipstream.mlperf.serving.threads import ThreadCosts

# Shares of the queries under load.
_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_NAMES_WITH_LIMIT = ("memory", "latency", *_PERCENTILES)
_NAMES = (*_NAMES_WITH_LIMIT, "cost")
_FORM = re.compile(r"\s*([A-Za-z_]+[0-9]*)\s*(?:(<=?)\s*(.+?))?\s*")


@dataclass(frozen=True)
class Goal:
    """A limit on a step, or its cost to minimise.

    Attributes:
        name: ``memory`` (peak bytes of a step), ``latency`` (time of a step), ``p50`` to ``p99``
            (latency of queries arriving at `rate`, each a step) or ``cost`` (per sample; time
            per sample if the price is unknown).
        limit: exclusive limit in bytes or nanoseconds; None for ``cost``, which is minimised.
        rate: queries per second, of a percentile.
        costs: what a server's threads add to a query, of a percentile; None for nothing.
    """

    name: str
    limit: float | None = None
    rate: float | None = None
    costs: ThreadCosts | None = None

    def __str__(self) -> str:
        if self.limit is None:
            return self.name
        shown = format_bytes if self.name == "memory" else format_duration
        at = f" at {self.rate:g}/s" if self.rate else ""
        return f"{self.name} < {shown(self.limit)}{at}"

    @property
    def bound(self) -> tuple[float, float] | None:
        """(share of queries, nanoseconds) of a percentile; None for another goal."""
        if self.name not in _PERCENTILES or self.limit is None:
            return None
        return _PERCENTILES[self.name], self.limit

    def met(self, step_ns: float, peak_bytes: float) -> bool:
        """Whether a step of this time and peak memory (0: not recorded) is within the limit."""
        if self.limit is None:
            return True
        if self.name == "memory":
            return 0 < peak_bytes < self.limit
        if self.bound is not None and self.rate is not None:
            from slipstream.verbs.serving import loaded

            load = loaded(step_ns, self.rate, *filter(None, [self.costs]))
            return load.keeps_up and load.percentile_ns(self.bound[0]) < self.limit
        return step_ns < self.limit

    def met_by(self, prediction: Predicted) -> bool:
        return self.met(prediction.step_ns, prediction.memory[1])


def met_note(goal: Goal, predictions: Sequence[Predicted]) -> str:
    """Return a sentence that names the versions of a step that are predicted to meet a goal."""
    first = predictions[0]
    versions = {"as recorded": goal.met(first.baseline_ns, first.memory[0])}
    versions |= {prediction.technique: goal.met_by(prediction) for prediction in predictions}
    by_answer = [", ".join(name for name in versions if versions[name] is met) or "none"
                 for met in (True, False)]  # fmt: skip
    return f"goal {goal}: met: {by_answer[0]}; not met: {by_answer[1]}"


def parse_goals(texts: Sequence[str], rate: str | None = None) -> list[Goal]:
    """Parse the goals of a command line; percentiles get `rate` (``40/s``).

    Raises:
        UsageError: a percentile without a rate, or a rate without one.
        UnknownNameError, InvalidArgumentError: as `parse_goal`.
    """
    goals = [parse_goal(text) for text in texts]
    under_load = [goal for goal in goals if goal.bound]
    if rate is None:
        if under_load:
            raise UsageError(
                f"'{under_load[0]}' limits queries that arrive at a rate, and none is set",
                remedy="add --rate, for example --rate 40/s; 'latency<20ms' limits a single query",
            )
        return goals
    return [replace(goal, rate=parse_rate(rate)) if goal.bound else goal for goal in goals]


def parse_rate(text: str) -> float:
    """Parse queries per second from ``40/s`` or ``40``."""
    try:
        rate = float(text.removesuffix("/s").replace(",", ""))
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise InvalidArgumentError(
            "--rate",
            f"'{text}' is not a rate above zero",
            remedy="pass queries per second, for example --rate 40/s",
        )
    return rate


def parse_goal(text: str) -> Goal:
    """Parse a goal."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            "--goal",
            f"'{text}' is not a goal",
            remedy="for example 'memory<8GiB', 'latency<10ms', 'p99<20ms' or cost",
        )
    name, sign, quantity = match[1].lower(), match[2], match[3]
    if name not in _NAMES:
        raise UnknownNameError("goal", name, _NAMES, where="--goal")
    if (sign is None) is (name in _NAMES_WITH_LIMIT):
        example = "memory<8GiB" if name == "memory" else f"{name}<10ms"
        what = "needs a limit" if name in _NAMES_WITH_LIMIT else "takes no limit"
        remedy = f"quote it for the shell: --goal '{example}'" if sign is None else "--goal cost"
        raise InvalidArgumentError("--goal", f"'{name}' {what}", remedy=remedy)
    if sign is None:
        return Goal(name)
    parse = parse_bytes if name == "memory" else parse_duration_ns
    limit = float(parse(quantity, "--goal"))
    if not limit:
        raise InvalidArgumentError(
            "--goal", f"'{quantity}' is zero", remedy="set a limit above zero"
        )
    return Goal(name, limit)
