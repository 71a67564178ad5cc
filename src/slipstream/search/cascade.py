"""A cascade: cheap estimators choose whom the dear ones measure, as far as they prove to know.

A level prunes only where its order agrees with the next one's *in this study*: Kendall's tau over
candidates that went on whatever their rank. Until that is shown all go on. Later a few still do, so
that a level that stops agreeing loses its right again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidArgumentError
from slipstream.search.estimators import Estimator, as_estimator
from slipstream.search.metrics import SCORED, State, Trial
from slipstream.search.rungs import RungPolicy, Slot, surely_promoted

# Below it an order says so little that what it prunes is chance.
_LEAST_TAU = 0.2
# Fewer pairs tell nothing, whatever their tau.
_FEWEST = 8
# Of a level that prunes, every so many-th candidate goes on whatever its rank.
_PROBE = 16
_SIGMAS_95 = 1.96


@dataclass(frozen=True)
class Agreement:
    """How the order of one level agrees with that of the next.

    Attributes:
        tau: Kendall's rank correlation; 0 where there are fewer than two pairs.
        margin: half of its 95 % interval, for `pairs` of values that have nothing in common, which
            is the widest.
        pairs: candidates that both levels have judged, and that no level chose.
    """

    tau: float
    margin: float
    pairs: int

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, int]]) -> Agreement:
        """Of places by one level and by the next.

        The variance is Kendall's: 2 (2 n + 5) / (9 n (n - 1)) (*Rank Correlation Methods*, 1948).
        """
        n = len(ranks)
        if n < 2:
            return cls(0.0, math.inf, n)
        from scipy.stats import kendalltau

        tau = float(kendalltau(*zip(*ranks, strict=True)).statistic)
        return cls(tau, _SIGMAS_95 * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))), n)

    @property
    def prunes(self) -> bool:
        """Whether the level may keep candidates from the next."""
        return self.pairs >= _FEWEST and self.tau - self.margin > _LEAST_TAU

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.pairs} candidates at both: all go on"
        low, high = max(self.tau - self.margin, -1.0), min(self.tau + self.margin, 1.0)
        verdict = "it prunes" if self.prunes else "it may not prune, all go on"
        return f"tau {self.tau:.2f} [{low:.2f}, {high:.2f}] over {self.pairs}: {verdict}"


class Cascade(RungPolicy):
    """Estimators below a study's own: of each level the best 1 / `eta` go on to the next.

    Its levels are rungs: an estimator's `Run.fidelity` is its level's number, from 1 on, and the
    study's own estimator is the last. Every level reports the study's objectives.

    Args:
        levels: estimators, the cheapest first; what they report is best not declared as measured.
        eta: of so many one goes on.
        n: new candidates in all; None: until the budget ends.

    Raises:
        InvalidArgumentError: no level, or an `eta` that prunes nothing.
    """

    def __init__(
        self, *levels: Estimator | Callable[..., Any], eta: float = 4.0, n: int | None = None
    ) -> None:
        if not levels:
            raise InvalidArgumentError("levels", "a cascade has one level below the study's own")
        if not eta > 1:
            raise InvalidArgumentError("eta", f"of {eta:g} candidates one goes on: more than 1")
        self.levels = tuple(as_estimator(one) for one in levels)
        self.eta, self.n = eta, n
        self._asked = self._open = 0
        self._told: list[list[Trial]] = [[] for _ in self.levels]
        self._gone: list[set[int]] = [set() for _ in self.levels]
        self._pairs: list[list[tuple[Trial, Trial]]] = [[] for _ in self.levels]
        self._unchosen: dict[int, Trial] = {}
        self._agree = [Agreement.of([]) for _ in self.levels]

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.levels)
        return f"Cascade({names}, eta={self.eta:g}, n={self.n})"

    def ask(self) -> Slot | None:
        for level in range(len(self.levels) - 1, -1, -1):
            if waiting := self._going_on(level):
                trial, chosen = waiting[0]
                self._gone[level].add(trial.number)
                if not chosen:
                    self._unchosen[trial.number] = trial
                self._open += 1
                return Slot(level + 2.0, 0, level + 1, trial)
        if self.n is not None and self._asked >= self.n:
            return None
        self._asked += 1
        self._open += 1
        return Slot(1.0)

    def _going_on(self, level: int) -> list[tuple[Trial, bool]]:
        """Trials that the next level is to judge, and whether their rank is why."""
        told, gone = self._told[level], self._gone[level]
        if not self._agree[level].prunes:
            return [(one, False) for one in told if one.number not in gone]
        probes = [(one, False) for one in told[::_PROBE] if one.number not in gone]
        best = self.order(told)[: int(len(told) / self.eta + 1e-9)]
        return probes + [(one, True) for one in best if one.number not in gone]

    def tell(self, trial: Trial) -> None:
        self._open -= 1
        # A candidate that was judged before goes on once.
        if trial.state not in SCORED or trial.state is State.CACHED:
            return
        if trial.rung < len(self.levels):
            self._told[trial.rung].append(trial)
        before = self._unchosen.get(trial.parent) if trial.parent is not None else None
        if before is not None:
            below = trial.rung - 1
            self._pairs[below].append((before, trial))
            self._agree[below] = Agreement.of(self._places(self._pairs[below]))

    def _places(self, pairs: Sequence[tuple[Trial, Trial]]) -> list[tuple[int, int]]:
        """Each pair's place by its own level, and by the next."""
        sides = ([one for one, _ in pairs], [one for _, one in pairs])
        places = [
            {one.number: place for place, one in enumerate(self.order(side))} for side in sides
        ]
        return [(places[0][one.number], places[1][two.number]) for one, two in pairs]

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        return surely_promoted(trials, self.order, self.eta)

    def notes(self) -> list[str]:
        return [
            f"{one.name} as the order of the next level: {agree}"
            for one, agree in zip(self.levels, self._agree, strict=True)
        ]

    @property
    def done(self) -> bool:
        if self.n is None or self._asked < self.n or self._open:
            return False
        return not any(self._going_on(level) for level in range(len(self.levels)))
