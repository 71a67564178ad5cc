"""A cascade: cheap estimators select the candidates that expensive ones evaluate.

A level prunes only if its ranking agrees with that of the next level *in this study*, by Kendall's
tau over candidates promoted regardless of rank. Until then, it promotes all candidates. Afterwards,
it still promotes a few regardless of rank, so that it stops pruning if the agreement is lost.
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

# Below this, pruning would be little better than chance.
_MIN_TAU = 0.2
# With fewer pairs, tau is meaningless.
_MIN_PAIRS = 8
# A level that prunes promotes every 16th candidate regardless of rank.
_PROBE_STRIDE = 16
_SIGMAS_95 = 1.96


@dataclass(frozen=True)
class Agreement:
    """Rank agreement between one level and the next.

    Attributes:
        tau: Kendall's rank correlation; 0 with fewer than two pairs.
        margin: half-width of its 95 % interval for independent rankings, which is the widest.
        pairs: candidates that both levels evaluated and that were promoted regardless of rank.
    """

    tau: float
    margin: float
    pairs: int

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, int]]) -> Agreement:
        """Compute the agreement of (rank in this level, rank in the next level) pairs.

        The variance is 2 (2 n + 5) / (9 n (n - 1)) (*Rank Correlation Methods*, 1948).
        """
        n = len(ranks)
        if n < 2:
            return cls(0.0, math.inf, n)
        from scipy.stats import kendalltau

        tau = float(kendalltau(*zip(*ranks, strict=True)).statistic)
        return cls(tau, _SIGMAS_95 * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))), n)

    @property
    def prunes(self) -> bool:
        """Whether the level may prune candidates."""
        return self.pairs >= _MIN_PAIRS and self.tau - self.margin > _MIN_TAU

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.pairs} candidates at both levels: all are promoted"
        low, high = max(self.tau - self.margin, -1.0), min(self.tau + self.margin, 1.0)
        verdict = "it prunes" if self.prunes else "it may not prune, all are promoted"
        return f"tau {self.tau:.2f} [{low:.2f}, {high:.2f}] over {self.pairs} candidates: {verdict}"


class Cascade(RungPolicy):
    """Cheap estimators that run before a study's estimator and promote the best 1 / `eta`.

    Levels are rungs: `TrialRun.fidelity` is the number of the level, starting at 1, and the study's
    estimator is the last level. Every level reports the study's objectives.

    Args:
        levels: estimators, cheapest first. Declare a provenance other than "measured" for them.
        eta: number of candidates per promoted one.
        n: number of new candidates; None continues until the budget is spent.

    Raises:
        InvalidArgumentError: there is no level, or `eta` is at most 1.
    """

    def __init__(
        self, *levels: Estimator | Callable[..., Any], eta: float = 4.0, n: int | None = None
    ) -> None:
        if not levels:
            raise InvalidArgumentError("levels", "a cascade needs at least one estimator")
        if not eta > 1:
            raise InvalidArgumentError("eta", f"{eta:g} is not greater than 1")
        self.levels = tuple(as_estimator(level) for level in levels)
        self.eta, self.n = eta, n
        self._ask_count = self._open = 0
        self._finished: list[list[Trial]] = [[] for _ in self.levels]
        self._promoted: list[set[int]] = [set() for _ in self.levels]
        self._pairs: list[list[tuple[Trial, Trial]]] = [[] for _ in self.levels]
        self._unchosen: dict[int, Trial] = {}
        self._agreements = [Agreement.of([]) for _ in self.levels]

    def __repr__(self) -> str:
        names = ", ".join(level.name for level in self.levels)
        return f"Cascade({names}, eta={self.eta:g}, n={self.n})"

    def ask(self) -> Slot | None:
        for level in range(len(self.levels) - 1, -1, -1):
            if promotable := self._promotable(level):
                trial, chosen = promotable[0]
                self._promoted[level].add(trial.number)
                if not chosen:
                    self._unchosen[trial.number] = trial
                self._open += 1
                return Slot(level + 2.0, 0, level + 1, trial)
        if self.n is not None and self._ask_count >= self.n:
            return None
        self._ask_count += 1
        self._open += 1
        return Slot(1.0)

    def _promotable(self, level: int) -> list[tuple[Trial, bool]]:
        """Return trials to promote, and whether each was selected by rank."""
        ended, promoted = self._finished[level], self._promoted[level]
        if not self._agreements[level].prunes:
            return [(trial, False) for trial in ended if trial.number not in promoted]
        probes = [(t, False) for t in ended[::_PROBE_STRIDE] if t.number not in promoted]
        best = self.order(ended)[: int(len(ended) / self.eta + 1e-9)]
        return probes + [(trial, True) for trial in best if trial.number not in promoted]

    def tell(self, trial: Trial) -> None:
        self._open -= 1
        # A repeated candidate is not promoted twice.
        if trial.state not in SCORED or trial.state is State.CACHED:
            return
        if trial.rung < len(self.levels):
            self._finished[trial.rung].append(trial)
        parent = self._unchosen.get(trial.parent) if trial.parent is not None else None
        if parent is not None:
            below = trial.rung - 1
            self._pairs[below].append((parent, trial))
            self._agreements[below] = Agreement.of(self._ranks(self._pairs[below]))

    def _ranks(self, pairs: Sequence[tuple[Trial, Trial]]) -> list[tuple[int, int]]:
        """Return the rank of each pair within its own level and within the next."""
        levels = ([low for low, _ in pairs], [high for _, high in pairs])
        low_ranks, high_ranks = (
            {trial.number: rank for rank, trial in enumerate(self.order(level))} for level in levels
        )
        return [(low_ranks[low.number], high_ranks[high.number]) for low, high in pairs]

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        return surely_promoted(trials, self.order, self.eta)

    def notes(self) -> list[str]:
        return [
            f"agreement of {level.name} with the next level: {agreement}"
            for level, agreement in zip(self.levels, self._agreements, strict=True)
        ]

    @property
    def done(self) -> bool:
        if self.n is None or self._ask_count < self.n or self._open:
            return False
        return not any(self._promotable(level) for level in range(len(self.levels)))
