"""Search a network together with its hardware, with the package's studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import GraphModule

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.nas.codesign.space import HardwareSpace
from slipstream.nas.searching import absolute_limit, calibrate, need_function
from slipstream.nas.supernet import Supernet, need_supernet
from slipstream.provenance import Provenance
from slipstream.search import Budget, Categorical, Estimator, Space, Study, Trial, Value, study
from slipstream.search.metrics import SCORED, Limit, parse_limits
from slipstream.tables import Column, Table
from slipstream.units import with_article

_Numbers = NDArray[np.float64]
# Steps from the smallest to the whole network among which the first candidates are chosen.
_LEVELS = 8


@dataclass(frozen=True)
class Pair:
    """A network with the hardware that it runs on.

    Attributes:
        config: configuration of the supernet.
        point: number of the hardware in its space.
        hardware: its values by attribute.
        score: score of the network.
        costs: metrics of the hardware space.
    """

    config: Mapping[str, int]
    point: int
    hardware: Mapping[str, Any]
    score: float
    costs: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the pair as JSON."""
        return {"score": self.score, "costs": dict(self.costs), "hardware": dict(self.hardware),
                "network": dict(self.config)}  # fmt: skip


class Codesign:
    """A search over networks and hardware; see `search`.

    Attributes:
        net, hardware: the two spaces.
        study: the study that proposes and stores candidates.
        limits: limits of the costs.
        exponents: exponent of each cost in the objective of the hardware.
        trainings: number of networks that were scored.
    """

    def __init__(
        self,
        net: Supernet,
        hardware: HardwareSpace,
        limits: tuple[Limit, ...],
        exponents: Mapping[str, float],
    ) -> None:
        self.net, self.hardware, self.limits = net, hardware, limits
        self.exponents = dict(exponents)
        self.study: Study
        self.trainings = 0
        self._costs: dict[tuple[int, ...], dict[str, _Numbers]] = {}
        self._scores: dict[tuple[int, ...], float] = {}

    def run(self, budget: Budget | int) -> Codesign:
        """Evaluate candidates; a number is that of trials."""
        self.study.run(budget=Budget(trials=budget) if isinstance(budget, int) else budget)
        return self

    def best(self) -> Pair | None:
        """Return the pair with the best objective within all limits; None if there is none."""
        trial = self.study.best()
        return None if trial is None else self._pair(trial)

    def pareto(self) -> list[Pair]:
        """Return the pairs that no other pair beats in score and the minimised costs.

        Every network that was scored is paired with every point of the hardware within the limits.
        """
        scores = {
            tuple(trial.config[name] for name in self.net.space.choices): trial.values["score"]
            for trial in self.study.trials
            if trial.state in SCORED
        }
        pairs = []
        for key, score in scores.items():
            config: dict[str, Any] = dict(zip(self.net.space.choices, key, strict=True))
            costs = self._costs_of(config)
            allowed = np.flatnonzero(_violation(costs, self.limits) == 0)
            allowed = allowed[np.argsort(_overall(costs)[allowed], kind="stable")]
            table = np.stack([costs[metric][allowed] for metric in self.exponents], axis=1)
            pairs += [self.pair(config, int(n), score) for n in allowed[_front(table)]]
        points = [[-p.score, *(p.costs[metric] for metric in self.exponents)] for p in pairs]
        return [pairs[n] for n in _front(np.array(points))] if points else []

    def pair(self, config: Mapping[str, int], point: int, score: float) -> Pair:
        """Return a network on a point of the hardware with its costs."""
        costs = self._costs_of(config)
        own = {metric: float(column[point]) for metric, column in costs.items()}
        return Pair(dict(config), point, self.hardware.at(point), score, own)

    def best_point(self, config: Mapping[str, int]) -> int:
        """Return the best hardware for a network: exact, by evaluating every point.

        That is the point within the limits with the smallest product of costs to their exponents,
        or the one that violates the limits least. Of equal ones it has the smallest product of all
        costs.
        """
        costs = self._costs_of(config)
        violation = _violation(costs, self.limits)
        product = np.where(violation == violation.min(), _product(costs, self.exponents), np.inf)
        equal = np.flatnonzero(product == product.min())
        return int(equal[np.argmin(_overall(costs)[equal])])

    def export(self, pair: Pair) -> GraphModule:
        """Return the network of a pair as a plain module with the supernet's weights."""
        return self.net.export(pair.config)

    def explain(self, pair: Pair) -> tuple[Table, Table]:
        """Return what bounds each layer, and the costs of the neighbours of the hardware.

        A neighbour has the previous or next value of one attribute; its costs are exact.
        """
        costs, rows = self._costs_of(pair.config), []
        for name, options in self.hardware.values.items():
            place = options.index(pair.hardware[name])
            for other in (*options[:place][-1:], *options[place + 1 :][:1]):
                point = self.hardware.point({**pair.hardware, name: other})
                changes = [f"{c[point] / pair.costs[m] - 1:+.1%}" for m, c in costs.items()]
                rows.append([name, _shown(pair.hardware[name]), _shown(other), *changes])
        columns = [Column("change"), *(Column(name, "right") for name in ("from", "to", *costs))]
        layers = self.hardware.explain(self.net, pair.config, pair.point)
        return layers, Table(columns, rows, "one change of the hardware")

    def table(self, pairs: Sequence[Pair]) -> Table:
        """Return a table of pairs."""
        metrics, attributes = self.hardware.metrics, self.hardware.values
        names = ["score", *(f"{name}, {unit}" for name, unit in metrics.items()), *attributes]
        rows = [
            [f"{pair.score:.4g}", *(f"{pair.costs[metric]:.4g}" for metric in metrics),
             *(_shown(pair.hardware[name]) for name in attributes)]
            for pair in pairs
        ]  # fmt: skip
        note = f"networks scored: {self.trainings}; hardware of each: {len(self.hardware):,} points"
        columns = [Column(name, "right") for name in names]
        return Table(columns, rows, "Pareto-optimal pairs of network and hardware", [note])

    def _costs_of(self, config: Mapping[str, int]) -> dict[str, _Numbers]:
        key = tuple(config[name] for name in self.net.space.choices)
        if key not in self._costs:
            # A candidate is evaluated several times in sequence.
            self._costs = {key: self.hardware.costs(self.net, config)}
        return self._costs[key]

    def _pair(self, trial: Trial) -> Pair:
        config, point = self._split(trial.config)
        return self.pair(config, point, trial.values["score"])

    def _split(self, values: Mapping[str, Any]) -> tuple[dict[str, int], int]:
        """Return the network and the point of hardware of a candidate."""
        config = {name: values[name] for name in self.net.space.choices}
        if set(self.hardware.values) <= set(values):
            return config, self.hardware.point(values)
        return config, self.best_point(config)


def search(
    net: Supernet,
    score: Callable[[nn.Module], float],
    hardware: HardwareSpace,
    *,
    constraints: Mapping[str, str] | None = None,
    minimize: Sequence[str] = ("energy",),
    exponents: Mapping[str, float] | None = None,
    calibration: Sequence[torch.Tensor] | torch.Tensor = (),
    algorithm: str = "nested",
    strategy: str = "evolution",
    seed: int = 0,
    store: str | Path | None = None,
    name: str = "codesign",
) -> Codesign:
    """Return a search over networks and hardware, to be run with ``.run(trials)``.

    The nested algorithm searches networks, and pairs each with the hardware that is best for it,
    found by evaluating every point; the joint one searches both (NaaS, Zhou et al., MLSys 2022).
    A network that violates a limit on all hardware is rejected before it is scored. The first
    candidates are the smallest network and the largest uniformly scaled one within the limits.
    With a trained supernet, `score` evaluates shared weights; it can also train the network first.

    Args:
        score: function of an exported sub-network; higher is better, for example its accuracy. It
            is called once per network.
        hardware: a `ChipSpace` or `ProcessorSpace`.
        constraints: limits of the hardware's metrics, such as ``{"time": "<= 2 ms"}``, or
            ``"<= 1x"`` of the whole network on the base hardware.
        minimize: metrics to minimise next to the score, for a Pareto set.
        exponents: instead of `minimize`, one objective: the score times each metric, relative to
            the whole network on the base hardware, to an exponent such as -0.07.
        calibration: batches on which batch norms are recomputed before a sub-network is scored.
        strategy: strategy of `slipstream.search`.
        store: file of the study; None to keep it in memory.

    Raises:
        InvalidArgumentError: a constraint is malformed, an exponent is not negative, a metric is
            not described, or no hardware satisfies the constraints with the smallest network (the
            error states how close it gets).
        UnknownNameError: a metric or the algorithm is unknown.
        WorkloadError: the hardware cannot run an operator of the network.
    """
    need_supernet(net)
    need_function("score", score)
    if not isinstance(hardware, HardwareSpace):
        raise InvalidArgumentError(
            "hardware", f"{with_article(type(hardware).__name__)} is not a space of hardware",
            remedy="for example ss.codesign.ChipSpace.load('edge')",
        )  # fmt: skip
    if algorithm not in ("nested", "joint"):
        raise UnknownNameError("algorithm", algorithm, ("nested", "joint"))
    for metric in (*(constraints or {}), *minimize, *(exponents or {})):
        if metric not in hardware.metrics:
            raise UnknownNameError("metric", metric, hardware.metrics)
    weights = dict(exponents) if exponents else dict.fromkeys(minimize, -1.0)
    for metric, weight in weights.items():
        if not weight < 0:
            raise InvalidArgumentError(
                "exponents", f"{weight} of {metric} is not negative", remedy="for example -0.07"
            )
    if not weights:
        raise InvalidArgumentError("minimize", "names no metric", remedy="for example energy")
    base = hardware.baseline(net, net.space.full)
    for metric in {*(constraints or {}), *weights}:
        if not base[metric] > 0:
            raise InvalidArgumentError(
                metric, "is 0 on the base hardware", remedy="describe it, or leave the metric out"
            )
    limits = _limits(hardware, base, constraints or {})
    found = Codesign(net, hardware, limits, weights)
    _need_feasible(found)

    def costs_of(values: Mapping[str, Any]) -> dict[str, float]:
        config, point = found._split(values)
        return dict(found.pair(config, point, 0.0).costs)

    def evaluate(values: Mapping[str, Any]) -> dict[str, float | Value]:
        config, point = found._split(values)
        key = tuple(config.values())
        if key not in found._scores:
            module = net.export(config)
            calibrate(module, calibration)
            found._scores[key] = float(score(module))
            found.trainings += 1
        pair = found.pair(config, point, found._scores[key])
        relative = {metric: np.array(pair.costs[metric] / base[metric]) for metric in weights}
        reward = {"reward": pair.score / float(_product(relative, weights))} if exponents else {}
        simulated = {m: Value(v, Provenance.SIMULATED) for m, v in pair.costs.items()}
        return {"score": pair.score, **simulated, **reward}

    units = {"score": "", **hardware.metrics, **({"reward": ""} if exponents else {})}
    networks = {
        path: Categorical(choice.choices, ordered=True)
        for path, choice in net.space.choices.items()
    }
    both = {path: Categorical(options, ordered=True) for path, options in hardware.values.items()}
    start: list[dict[str, Any]] = [net.space.smallest, _largest(found)]
    if algorithm == "joint":
        start = [config | hardware.at(found.best_point(config)) for config in start]
    found.study = study(
        name, Space(networks | both if algorithm == "joint" else networks),
        {"reward": "max"} if exponents else {"score": "max", **dict.fromkeys(minimize, "min")},
        estimator=Estimator(evaluate, units),
        analytic=[Estimator(costs_of, hardware.metrics, Provenance.SIMULATED)],
        constraints={limit.metric: f"{limit.op} {limit.value!r}" for limit in limits},
        strategy=strategy, seed=seed, store=store, start=start,
        context={"hardware": hardware.identity, "exponents": weights},
    )  # fmt: skip
    return found


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(
    hardware: HardwareSpace, base: Mapping[str, float], constraints: Mapping[str, str]
) -> tuple[Limit, ...]:
    """Return the upper limits of costs; multiples are those of the base."""
    absolute = {metric: absolute_limit(text, base[metric]) for metric, text in constraints.items()}
    limits = parse_limits(absolute, hardware.metrics)
    for limit in limits:
        if limit.op[0] != "<":
            raise InvalidArgumentError(
                "constraints", f"'{limit.text}' of {limit.metric} is not an upper limit",
                remedy="for example '<= 2'",
            )  # fmt: skip
    return limits


def _largest(found: Codesign) -> dict[str, int]:
    """Return the largest network within the limits whose choices are scaled uniformly."""

    def scaled(level: int) -> dict[str, int]:
        choices = {name: choice.choices for name, choice in found.net.space.choices.items()}
        return {name: o[round(level / _LEVELS * (len(o) - 1))] for name, o in choices.items()}

    def excess(level: int) -> float:
        config = scaled(level)
        return float(_violation(found._costs_of(config), found.limits).min())

    low, high = 0, _LEVELS + 1
    if not excess(_LEVELS):
        return scaled(_LEVELS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if excess(middle) else (middle, high)
    return scaled(low)


def _need_feasible(found: Codesign) -> None:
    """Check that some hardware runs the smallest network within the limits."""
    config = found.net.space.smallest
    nearest = found.pair(config, found.best_point(config), 0.0)
    broken = [limit for limit in found.limits if limit.violation(nearest.costs[limit.metric])]
    if broken:
        units = found.hardware.metrics
        reached = ", ".join(
            f"{limit.metric} {nearest.costs[limit.metric]:.4g} {units[limit.metric]} "
            f"instead of {limit.op} {limit.value:.4g}"
            for limit in broken
        )
        values = ", ".join(f"{name} = {_shown(v)}" for name, v in nearest.hardware.items())
        raise InvalidArgumentError(
            "constraints", "no hardware of the space runs the smallest network within them; the "
            f"nearest reaches {reached}", where=values,
            remedy="relax these limits, or extend the space of hardware or networks",
        )  # fmt: skip


def _violation(costs: Mapping[str, _Numbers], limits: Sequence[Limit]) -> _Numbers:
    """Return the sum of relative excesses over upper limits, [points]."""
    total: _Numbers = np.zeros(len(next(iter(costs.values()))))
    for limit in limits:
        column = costs[limit.metric]
        excess = column - limit.value
        broken = excess > 0 if limit.op == "<=" else excess >= 0
        total += np.where(broken, np.maximum(excess / (limit.value or 1.0), 1e-12), 0.0)
    return total


def _product(costs: Mapping[str, Any], exponents: Mapping[str, float]) -> Any:
    """Return the product of costs to the negated exponents; smaller is better."""
    return math.prod(costs[metric] ** -weight for metric, weight in exponents.items())


def _overall(costs: Mapping[str, _Numbers]) -> _Numbers:
    positive = [np.maximum(column, np.finfo(float).tiny) for column in costs.values()]
    return np.asarray(np.prod(positive, axis=0), np.float64)


def _front(points: _Numbers) -> NDArray[np.int64]:
    """Return the rows [points, metrics] that no other row dominates; one of equal rows."""
    order = np.lexsort(points.T[::-1])
    front: list[int] = []
    remaining = order
    while len(remaining):
        first = remaining[0]
        front.append(int(first))
        # Rows that are as bad or worse in every column are dominated, or equal.
        remaining = remaining[(points[remaining] < points[first]).any(axis=1)]
    return np.array(front, np.int64)
