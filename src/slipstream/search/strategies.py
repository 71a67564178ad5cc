"""Strategies that propose candidates: random, grid, quasi-random, evolution, boosted trees.

A strategy reads no clock and does no I/O. Its proposals are determined by the seed, the number of
the proposal, and the sequence of trials passed to `tell`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.errors import MissingExtraError
from slipstream.search.metrics import SCORED, Limit, Objective, Trial, order, score
from slipstream.search.space import Candidate, Space, every

if TYPE_CHECKING:
    from collections.abc import Iterator


class Strategy(ABC):
    """Source of candidates that may learn from trials.

    Attributes:
        stateless: whether `ask` depends only on the number of proposals and the trials passed to
            `tell`, so that a study can be resumed without repeating its earlier proposals.
    """

    name: ClassVar[str]
    stateless: ClassVar[bool] = True

    def begin(
        self, space: Space, objectives: Sequence[Objective], limits: Sequence[Limit], seed: int
    ) -> None:
        """Initialise the strategy; called once, before any other method."""
        self.space, self.objectives, self.limits, self.seed = space, objectives, limits, seed
        self.ask_count = 0

    def rng(self) -> np.random.Generator:
        """Return the random number generator of the next proposal."""
        return np.random.Generator(np.random.PCG64((self.seed, self.ask_count)))

    def propose(self, number: int) -> Candidate | None:
        """Return the candidate for trial `number`; None if the space is exhausted."""
        candidate = self.ask(number)
        self.ask_count += 1
        return candidate

    @abstractmethod
    def ask(self, number: int) -> Candidate | None:
        """See `propose`."""

    def tell(self, trial: Trial) -> None:  # noqa: B027
        """Record a trial that ended; its number is -1 if it is from a warm start."""


class Random(Strategy):
    """Independent random candidates."""

    name = "random"

    def ask(self, number: int) -> Candidate | None:
        return self.space.sample(self.rng())


class Grid(Strategy):
    """Every candidate of a finite space, in order."""

    name = "grid"

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._remaining: Iterator[Candidate] = every(self.space)
        self._at = 0

    def ask(self, number: int) -> Candidate | None:
        while self._at < self.ask_count:
            # Skip the proposals of an earlier run.
            next(self._remaining, None)
            self._at += 1
        self._at += 1
        return next(self._remaining, None)


class QuasiRandom(Strategy):
    """Points of a scrambled Sobol sequence, which cover the space evenly."""

    name = "quasirandom"

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        from scipy.stats import qmc

        self._sequence = qmc.Sobol(min(self.space.units, 21201), rng=self.seed)
        self._at = 0
        self._points: list[list[float]] = []

    def ask(self, number: int) -> Candidate | None:
        for _ in range(1000):
            while self._at >= len(self._points):
                # Powers of two keep the sequence balanced.
                points = self._sequence.random(max(len(self._points), 64))
                self._points += np.minimum(points, np.nextafter(1, 0)).tolist()
            candidate = self.space.from_units(self._points[self._at])
            self._at += 1
            if self.space.broken_rule(candidate) is None:
                return candidate
        return self.space.sample(self.rng())

    stateless = False


class Evolution(Strategy):
    """Regularised evolution: mutation and crossover of the best of a sample of recent trials.

    (Real et al., *Regularized evolution for image classifier architecture search*, AAAI 2019; with
    several objectives, parents are ranked by Pareto fronts.)

    Args:
        population: number of latest trials that may be parents.
        sample: number of trials drawn from the population, the best of which is a parent.
        crossover: probability that a second parent contributes half of the values.
    """

    name = "evolution"

    def __init__(self, population: int = 64, sample: int = 10, crossover: float = 0.3) -> None:
        self.population, self.sample, self.crossover = population, sample, crossover

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._living: list[Trial] = []

    def tell(self, trial: Trial) -> None:
        if trial.state in SCORED:
            self._living.append(trial)
            del self._living[: -self.population]

    def ask(self, number: int) -> Candidate | None:
        rng = self.rng()
        if len(self._living) < self.sample or self.ask_count < self.sample:
            return self.space.sample(rng)
        parent = self._parent(rng)
        if rng.random() < self.crossover:
            parent = self.space.crossover(parent, self._parent(rng), rng)
        return self.space.mutate(parent, rng)

    def _parent(self, rng: np.random.Generator) -> Candidate:
        chosen = rng.choice(len(self._living), self.sample, replace=False)
        return order([self._living[at] for at in chosen], self.objectives)[0].candidate


# Trials to which a surrogate is fitted: the best, and others spread evenly over the history.
_BEST, _SPREAD = 128, 384


def keep_best(best: list[Trial], trial: Trial, objectives: Sequence[Objective]) -> None:
    """Insert `trial` into the sorted list of the 128 best trials, after equal ones."""
    insort(best, trial, key=lambda other: score(other, objectives))
    del best[_BEST:]


def summary(trials: Sequence[Trial], best: Sequence[Trial]) -> list[Trial]:
    """Return at most 512 representative trials, to bound the time of `ask`.

    Args:
        best: the best of `trials`, as maintained by `keep_best`.
    """
    if len(trials) <= _BEST + _SPREAD:
        return list(trials)
    stride = np.linspace(0, len(trials) - 1, _SPREAD).astype(int)
    chosen = {id(trial) for trial in (*best, *(trials[at] for at in stride))}
    return [trial for trial in trials if id(trial) in chosen]


class BoostedTrees(Strategy):
    """Gradient-boosted trees (scikit-learn) over the unit cube, which select from a pool.

    The pool holds random candidates and neighbours of the best trials. One proposal in eight is
    random.
    """

    name = "trees"

    def __init__(self, startup: int = 20, refit: int = 8, pool: int = 512) -> None:
        self.startup, self.refit, self.pool = startup, refit, pool

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        try:
            import sklearn.ensemble  # noqa: F401
        except ImportError:
            raise MissingExtraError("strategy 'trees'", "scikit-learn", "search") from None
        self._finished: list[Trial] = []
        self._best: list[Trial] = []
        self._models: list[Any] = []
        self._fits = 0
        self._seen: set[bytes] = set()
        self._waiting: set[bytes] = set()

    def tell(self, trial: Trial) -> None:
        if trial.state in SCORED:
            self._finished.append(trial)
            self._seen.add(trial.candidate.id)
            keep_best(self._best, trial, self.objectives)

    def ask(self, number: int) -> Candidate | None:
        rng = self.rng()
        if len(self._finished) < self.startup or rng.random() < 0.125:
            return self.space.sample(rng)
        fits = len(self._finished) // self.refit
        if fits != self._fits:
            self._fit()
            self._fits = fits
        best = self._best[:8]
        pool = [self.space.sample(rng) for _ in range(self.pool // 2)]
        pool += [self.space.mutate(best[at % len(best)].candidate, rng) for at in range(
            self.pool // 2)]  # fmt: skip
        seen, waiting = self._seen, self._waiting
        pool = [c for c in pool if c.id not in seen and c.id not in waiting] or pool
        from threadpoolctl import threadpool_limits

        points = np.array([self.space.to_units(candidate) for candidate in pool])
        weights = rng.dirichlet(np.ones(len(self._models))) if len(self._models) > 1 else (1.0,)
        with threadpool_limits(1):
            predictions = [model.predict(points) for model in self._models]
        cost = sum(w * prediction for w, prediction in zip(weights, predictions, strict=True))
        chosen = pool[int(np.argmin(cost))]
        self._waiting = {*list(self._waiting)[-64:], chosen.id}
        return chosen

    def _fit(self) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

        trials = summary(self._finished, self._best)
        points = np.array([self.space.to_units(trial.candidate) for trial in trials])
        self._models = []
        for objective in self.objectives:
            costs = np.array([objective.sign * t.values[objective.metric] for t in trials])
            # By ranks, so that one huge loss does not hide all other differences; violations of
            # limits are added, scaled by the number of trials.
            ranks = np.argsort(np.argsort(costs)).astype(float)
            ranks += len(trials) * np.array([trial.violation for trial in trials])
            model = HistGradientBoostingRegressor(
                max_iter=60, max_leaf_nodes=8, min_samples_leaf=3, early_stopping=False,
                random_state=self.seed % 2**31,
            )  # fmt: skip
            # So small a fit is many times slower with several threads on a busy machine.
            with threadpool_limits(1):
                self._models.append(model.fit(points, ranks))

    stateless = False
