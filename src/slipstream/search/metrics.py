"""Metrics of a study: objectives, limits, and the ranking of trials."""

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
    """State of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    REJECTED = "rejected"  # by an analytic estimator, before it was scheduled
    INFEASIBLE = "infeasible"  # evaluated, and violates a limit
    FAILED = "failed"  # with a reason, never with a score
    LOST = "lost"  # its worker died too many times
    PRUNED = "pruned"  # ended early by its estimator
    CACHED = "cached"  # the same candidate was evaluated before


SCORED = frozenset({State.COMPLETE, State.INFEASIBLE, State.CACHED})


@dataclass(frozen=True)
class Value:
    """A value of a metric, with its provenance and standard deviation.

    Attributes:
        value: number in the metric's unit.
        provenance: source of the value; None for the provenance that the estimator declares.
        stddev: standard deviation of the value over repeats; None for a single measurement.
    """

    value: float
    provenance: Provenance | None = None
    stddev: float | None = None


@dataclass(slots=True)
class Trial:
    """One evaluation of a candidate at one fidelity.

    Attributes:
        number: 0, 1, 2, ... in the order of proposal.
        fidelity: amount spent on it, in the rung policy's unit; 1.0 without a rung policy.
        bracket, rung: its group under a rung policy.
        parent: number of the trial from which it was promoted; None for a new candidate.
        values: latest value by metric; measured values replace predicted ones.
        measurements: all values, by (metric, provenance).
        violation: sum of relative limit violations; 0 if feasible.
        ask_event, tell_event: sequence numbers of its begin and end among all events; `tell_event`
            is -1 while it runs.
        started, ended: seconds since the epoch.
        device_s: device time, in seconds.
        reason: reason of the failure or rejection; None if there is none.
        reports: intermediate values of the first objective, by step.
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
    ask_event: int = -1
    tell_event: int = -1
    attempts: int = 0
    started: float = 0.0
    ended: float = 0.0
    device_s: float = 0.0
    reason: str | None = None
    reports: dict[int, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, object]:
        """Values of the candidate, including derived ones."""
        return self.candidate.config


@dataclass(frozen=True)
class Objective:
    """A metric to minimise or maximise."""

    metric: str
    direction: Literal["min", "max"]

    @property
    def sign(self) -> float:
        """1.0 to minimise, -1.0 to maximise; the smaller sign times value, the better."""
        return 1.0 if self.direction == "min" else -1.0


@dataclass(frozen=True)
class Limit:
    """A bound on a metric, such as ``"<= 128KB"``.

    Attributes:
        value: the bound in the metric's unit.
    """

    metric: str
    op: str
    value: float
    text: str

    def violation(self, measured: float) -> float:
        """Return the excess of `measured` relative to the limit; 0 if the limit holds."""
        excess = measured - self.value if self.op[0] == "<" else self.value - measured
        if excess < 0 or (excess == 0 and len(self.op) == 2):
            return 0.0
        return max(excess / abs(self.value) if self.value else excess, 1e-12)


def parse_objectives(objectives: Mapping[str, str] | str) -> tuple[Objective, ...]:
    """Parse ``{"loss": "min", "accuracy": "max"}``, or ``"loss"``, which is minimised.

    Raises:
        InvalidArgumentError: there is no objective, or a direction is neither min nor max.
    """
    objectives = {objectives: "min"} if isinstance(objectives, str) else objectives
    if not objectives:
        raise InvalidArgumentError("objectives", "a study needs at least one")
    for metric, direction in objectives.items():
        if direction not in ("min", "max"):
            raise InvalidArgumentError(
                "objectives", f"'{metric}' has direction '{direction}'", remedy="use min or max"
            )
    return tuple(Objective(metric, d) for metric, d in objectives.items())  # type: ignore[arg-type]


def parse_limits(
    constraints: Mapping[str, str], units: Mapping[str, str] | None
) -> tuple[Limit, ...]:
    """Parse ``{"memory": "<= 128KB"}`` to limits in the metrics' units.

    Args:
        units: unit in which estimators report each metric; None if they declare no metrics.

    Raises:
        InvalidArgumentError: a limit is malformed or in an incompatible unit, or two limits
            contradict each other.
    """
    limits = []
    for name, text in constraints.items():
        metric = name.rstrip("<>= ")
        for part in text.split(","):
            match = _LIMIT.fullmatch(part)
            if match is None:
                raise InvalidArgumentError(
                    "constraints",
                    f"'{text}' is not a limit",
                    where=metric,
                    remedy="for example '<= 128KB'",
                )
            unit = (units or {}).get(metric, "")
            value = float(match[2]) * _factor(match[3], unit, metric, declared=units is not None)
            limits.append(Limit(metric, match[1], value, part.strip()))
    for upper in (limit for limit in limits if limit.op[0] == "<"):
        for lower in (limit for limit in limits if limit.op[0] == ">"):
            if upper.metric == lower.metric and upper.value < lower.value:
                raise InvalidArgumentError(
                    "constraints",
                    f"{upper.metric} {upper.text} and {lower.text} contradict each other",
                )
    return tuple(limits)


def _factor(unit: str, metric_unit: str, metric: str, *, declared: bool) -> float:
    """Return the factor that converts `unit` to `metric_unit`."""
    if not unit or unit == metric_unit or not declared:
        return 1.0
    (kind, factor), (metric_kind, metric_factor) = _dimension(unit), _dimension(metric_unit)
    if kind != metric_kind:
        raise InvalidArgumentError(
            "constraints", f"a limit in {unit} for a metric in {metric_unit or 'no unit'}",
            where=metric, remedy=f"state the limit in {metric_unit}" if metric_unit
            else "state the limit without a unit, or declare the metric's unit",
        )  # fmt: skip
    return factor / metric_factor


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
    objectives: Iterable[Objective], limits: Iterable[Limit], units: Mapping[str, str] | None
) -> None:
    """Check that estimators declare every metric of the objectives and limits.

    Raises:
        UnknownNameError: a metric is not declared.
    """
    if units is None:
        return
    for metric in (*(o.metric for o in objectives), *(limit.metric for limit in limits)):
        if metric not in units:
            raise UnknownNameError("metric", metric, units, where="metrics of the estimators")


def score(trial: Trial, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Return the sort key of a trial: violation of limits first, then objectives."""
    if trial.state not in SCORED:
        return (math.inf, math.inf)
    return (trial.violation, *(o.sign * trial.values[o.metric] for o in objectives))


def order(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Sort trials, best first: by `score`, or by Pareto fronts with several objectives.

    Trials of a front are sorted by the sum of their ranks, ties by number. The fronts and the
    handling of constraints follow Deb et al., *A fast and elitist multiobjective genetic algorithm:
    NSGA-II*, 2002.
    """
    if len(objectives) == 1:
        return sorted(trials, key=lambda trial: (score(trial, objectives), trial.number))
    feasible = [trial for trial in trials if trial.state in SCORED and not trial.violation]
    infeasible = [trial for trial in trials if trial.state not in SCORED or trial.violation]
    ordered: list[Trial] = []
    while feasible:
        front = pareto(feasible, objectives)
        chosen = {trial.number for trial in front}
        ranks = dict.fromkeys(chosen, 0)
        for objective in objectives:
            by_value = sorted(front, key=lambda t: objective.sign * t.values[objective.metric])
            for rank, trial in enumerate(by_value):
                ranks[trial.number] += rank
        ordered += sorted(front, key=lambda trial: (ranks[trial.number], trial.number))
        feasible = [trial for trial in feasible if trial.number not in chosen]
    return ordered + sorted(
        infeasible, key=lambda trial: (score(trial, objectives)[:1], trial.number)
    )


def full_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return scored trials at the highest fidelity reached, each candidate once."""
    scored = [trial for trial in trials if trial.state in SCORED and trial.tell_event >= 0]
    highest = max((trial.fidelity for trial in scored), default=0.0)
    return [t for t in scored if t.fidelity == highest and t.state is not State.CACHED]


def best(trials: Sequence[Trial], objectives: Sequence[Objective], n: int) -> list[Trial]:
    """Return the first `n` trials of `order`, without a full sort for a single objective."""
    if len(objectives) > 1:
        return order(trials, objectives)[:n]
    return heapq.nsmallest(n, trials, key=lambda trial: (score(trial, objectives), trial.number))


def pareto(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Return Pareto-optimal feasible trials, sorted by the first objective."""
    import numpy as np

    feasible = [trial for trial in trials if trial.state in SCORED and not trial.violation]
    if not feasible:
        return []
    costs = np.array([[o.sign * t.values[o.metric] for o in objectives] for t in feasible])
    by_first = np.lexsort(costs.T[::-1])
    optimal: list[int] = []
    if len(objectives) == 2:
        smallest = math.inf
        for index in by_first:
            if costs[index, 1] < smallest:
                optimal.append(int(index))
                smallest = costs[index, 1]
    else:
        front = np.empty((0, len(objectives)))
        for index in by_first:
            point = costs[index]
            if not ((front <= point).all(axis=1)).any():
                optimal.append(int(index))
                front = np.vstack([front, point])
    return [feasible[index] for index in optimal]
