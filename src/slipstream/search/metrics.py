"""What a study wants of its metrics: objectives, limits, and which of two trials is better."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.provenance import Provenance
from slipstream.search.space import Candidate
from slipstream.units import parse_bytes, parse_duration_ns

_LIMIT = re.compile(r"\s*(<=|>=|<|>)\s*([-+0-9.eE]+)\s*([A-Za-zµμ%]*)\s*")
_DURATIONS = ("ns", "us", "µs", "ms", "s", "min", "h")


class State(StrEnum):
    """Where a trial is in its life."""

    RUNNING = "running"
    COMPLETE = "complete"
    REJECTED = "rejected"  # by an analytic constraint, before it was scheduled
    INFEASIBLE = "infeasible"  # measured, and beyond a limit
    FAILED = "failed"  # with a reason, never with a score
    LOST = "lost"  # its worker died, too often
    PRUNED = "pruned"  # ended early by its estimator
    CACHED = "cached"  # the same candidate was evaluated before


SCORED = frozenset({State.COMPLETE, State.INFEASIBLE, State.CACHED})


@dataclass(frozen=True)
class Value:
    """A value of a metric, with more about it than the number.

    Attributes:
        value: in the metric's unit.
        provenance: where it comes from; None for what its estimator declares.
        stddev: of the value, by repeats; None where it was taken once.
    """

    value: float
    provenance: Provenance | None = None
    stddev: float | None = None


@dataclass(slots=True)
class Trial:
    """One candidate at one fidelity: what was asked, and what became of it.

    Attributes:
        number: 0, 1, 2, ... in the order of asking.
        fidelity: how much is spent on it, in the rung policy's unit; 1.0 without one.
        bracket, rung: its group under a rung policy.
        parent: the trial it goes on from, or repeats.
        values: by metric, the value that counts: measured where there is one.
        measurements: all of them, by (metric, provenance).
        violation: sum of what it exceeds its limits by, relative to the limits; 0 if feasible.
        asked, told: their places in the order of events; told is -1 while it runs.
        started, ended: seconds since the epoch.
        device_s: seconds of a device that it took.
        reason: why it failed, or was rejected.
        reports: values of the first objective on the way, by step.
    """

    number: int
    candidate: Candidate
    fidelity: float = 1.0
    bracket: int = 0
    rung: int = 0
    parent: int | None = None
    state: State = State.RUNNING
    values: dict[str, float] = field(default_factory=dict)
    measurements: dict[tuple[str, Provenance], Value] = field(default_factory=dict)
    violation: float = 0.0
    asked: int = -1
    told: int = -1
    attempts: int = 0
    started: float = 0.0
    ended: float = 0.0
    device_s: float = 0.0
    reason: str | None = None
    reports: dict[int, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, object]:
        """The candidate's values, with the derived ones."""
        return self.candidate.config


@dataclass(frozen=True)
class Objective:
    """A metric to make small or large."""

    metric: str
    direction: Literal["min", "max"]

    @property
    def sign(self) -> float:
        """Times which smaller is better."""
        return 1.0 if self.direction == "min" else -1.0


@dataclass(frozen=True)
class Limit:
    """A metric's bound, ``"<= 128KB"``.

    Attributes:
        value: in the metric's own unit.
    """

    metric: str
    op: str
    value: float
    text: str

    def violation(self, measured: float) -> float:
        """By how much `measured` is beyond it, relative to the limit; 0 where it holds."""
        beyond = measured - self.value if self.op[0] == "<" else self.value - measured
        if beyond < 0 or (beyond == 0 and len(self.op) == 2):
            return 0.0
        return max(beyond / abs(self.value) if self.value else beyond, 1e-12)


def parse_objectives(given: Mapping[str, str] | str) -> tuple[Objective, ...]:
    """``{"loss": "min", "accuracy": "max"}``, or ``"loss"`` alone, which is made small.

    Raises:
        InvalidArgumentError: none, or another direction.
    """
    given = {given: "min"} if isinstance(given, str) else given
    if not given:
        raise InvalidArgumentError("objectives", "a study needs one at least")
    for metric, direction in given.items():
        if direction not in ("min", "max"):
            raise InvalidArgumentError(
                "objectives", f"'{metric}' is to be '{direction}'", remedy="min or max"
            )
    return tuple(Objective(metric, d) for metric, d in given.items())  # type: ignore[arg-type]


def parse_limits(given: Mapping[str, str], units: Mapping[str, str] | None) -> tuple[Limit, ...]:
    """``{"memory": "<= 128KB"}`` in the metrics' own units.

    Args:
        units: by metric, the unit in which estimators report it; None where nothing is declared.

    Raises:
        InvalidArgumentError: no limit, a clash of units, or two that contradict each other.
    """
    limits = []
    for name, text in given.items():
        metric = name.rstrip("<>= ")
        for part in text.split(","):
            match = _LIMIT.fullmatch(part)
            if match is None:
                raise InvalidArgumentError(
                    "constraints", f"'{text}' is no limit", where=metric, remedy="as '<= 128KB'"
                )
            unit = (units or {}).get(metric, "")
            value = float(match[2]) * _factor(match[3], unit, metric, declared=units is not None)
            limits.append(Limit(metric, match[1], value, part.strip()))
    for one in limits:
        for other in limits:
            upper, lower = one.op[0] == "<", other.op[0] == ">"
            if one.metric == other.metric and upper and lower and one.value < other.value:
                raise InvalidArgumentError(
                    "constraints", f"{one.metric} {one.text} and {other.text} contradict each other"
                )
    return tuple(limits)


def _factor(given: str, own: str, metric: str, *, declared: bool) -> float:
    """What a number in the unit `given` is multiplied with to be in the metric's `own`."""
    if not given or given == own or not declared:
        return 1.0
    (kind, factor), (own_kind, own_factor) = _dimension(given), _dimension(own)
    if kind != own_kind:
        raise InvalidArgumentError(
            "constraints", f"a limit in {given} for a metric in {own or 'no unit'}", where=metric,
            remedy=f"a limit in {own}" if own else "a limit without a unit, or declare one",
        )  # fmt: skip
    return factor / own_factor


def _dimension(unit: str) -> tuple[str, float]:
    if unit in ("", "%"):
        return "number", 0.01 if unit else 1.0
    if unit in _DURATIONS:
        return "time", parse_duration_ns(f"1{unit}")
    try:
        return "size", float(parse_bytes(f"1{unit}"))
    except InvalidArgumentError:
        return unit, 1.0


def need_reported(
    objectives: Iterable[Objective], limits: Iterable[Limit], known: Mapping[str, str] | None
) -> None:
    """Every metric that is asked for is one that an estimator declares.

    Raises:
        UnknownNameError: nobody reports it.
    """
    if known is None:
        return
    for metric in (*(o.metric for o in objectives), *(limit.metric for limit in limits)):
        if metric not in known:
            raise UnknownNameError("metric", metric, known, where="what the estimators report")


def score(trial: Trial, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Smaller is better; feasible before infeasible, infeasible by how far."""
    if trial.state not in SCORED:
        return (math.inf, math.inf)
    return (trial.violation, *(one.sign * trial.values[one.metric] for one in objectives))


def order(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Trials, the best first: by `score`, or by fronts where there are several objectives.

    Within a front the ones with the smallest rank sum come first; ties go by number. (Deb et al.,
    *A fast and elitist multiobjective genetic algorithm: NSGA-II*, 2002, with its rule for
    constraints.)
    """
    if len(objectives) == 1:
        return sorted(trials, key=lambda one: (score(one, objectives), one.number))
    feasible = [one for one in trials if one.state in SCORED and not one.violation]
    rest = [one for one in trials if one.state not in SCORED or one.violation]
    ordered: list[Trial] = []
    while feasible:
        front = pareto(feasible, objectives)
        chosen = {one.number for one in front}
        ranks = dict.fromkeys(chosen, 0)
        for objective in objectives:
            by_one = sorted(front, key=lambda t: objective.sign * t.values[objective.metric])
            for place, trial in enumerate(by_one):
                ranks[trial.number] += place
        ordered += sorted(front, key=lambda one: (ranks[one.number], one.number))
        feasible = [one for one in feasible if one.number not in chosen]
    return ordered + sorted(rest, key=lambda one: (score(one, objectives)[:1], one.number))


def whole(trials: Sequence[Trial]) -> list[Trial]:
    """Those that were evaluated at the highest fidelity reached, each candidate once."""
    scored = [one for one in trials if one.state in SCORED and one.told >= 0]
    most = max((one.fidelity for one in scored), default=0.0)
    return [one for one in scored if one.fidelity == most and one.state is not State.CACHED]


def best(trials: Sequence[Trial], objectives: Sequence[Objective], n: int) -> list[Trial]:
    """The first `n` of `order`, without putting all of them in order where that can be."""
    if len(objectives) > 1:
        return order(trials, objectives)[:n]
    return heapq.nsmallest(n, trials, key=lambda one: (score(one, objectives), one.number))


def pareto(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Feasible trials that no other one is better than in everything, by their first objective."""
    import numpy as np

    fine = [one for one in trials if one.state in SCORED and not one.violation]
    if not fine:
        return []
    costs = np.array([[o.sign * t.values[o.metric] for o in objectives] for t in fine])
    at = np.lexsort(costs.T[::-1])
    kept: list[int] = []
    if len(objectives) == 2:
        least = math.inf
        for number in at:
            if costs[number, 1] < least:
                kept.append(int(number))
                least = costs[number, 1]
    else:
        front = np.empty((0, len(objectives)))
        for number in at:
            one = costs[number]
            if not ((front <= one).all(axis=1)).any():
                kept.append(int(number))
                front = np.vstack([front, one])
    return [fine[number] for number in kept]
