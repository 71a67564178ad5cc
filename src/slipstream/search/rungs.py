"""Rung policies: successive halving, Hyperband and ASHA, for use with any strategy.

A policy determines the fidelity of the next trial, and whether it evaluates a new candidate, which
the strategy proposes, or promotes an earlier trial. BOHB is ``strategy="tpe"`` with `Hyperband`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.search.estimators import Estimator
from slipstream.search.metrics import SCORED, Trial

Order = Callable[[Sequence[Trial]], list[Trial]]


@dataclass(frozen=True)
class Slot:
    """Settings of the next trial.

    Attributes:
        fidelity: amount to spend on it, in the unit of the policy.
        parent: trial to promote; None for a new candidate.
    """

    fidelity: float
    bracket: int = 0
    rung: int = 0
    parent: Trial | None = None


class RungPolicy(ABC):
    """Policy that determines the fidelity of trials.

    Attributes:
        order: function that sorts trials, best first; set by the study.
        levels: estimators of the first rungs, instead of the study's estimator.
    """

    order: Order
    levels: tuple[Estimator, ...] = ()
    synchronous: ClassVar[bool] = False
    """Whether the trials of a rung are known in advance, so that they should finish together."""

    @abstractmethod
    def ask(self) -> Slot | None:
        """Return the next slot; None if `done`, or if no trial can begin before another ends."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """Record a trial that ended."""

    @property
    def rungs(self) -> int:
        """Maximum number of evaluations of a candidate."""
        return 1 + len(self.levels)

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials of a finished run that would run in any order of completion."""
        return [trial for trial in trials if trial.parent is None]

    def notes(self) -> list[str]:
        """Return notes for the user on how trials were promoted."""
        return []

    @property
    def done(self) -> bool:
        """Whether `ask` will return no further slot."""
        return False


@dataclass
class Whole(RungPolicy):
    """No rungs: every trial runs once, at one fidelity."""

    fidelity: float = 1.0

    def ask(self) -> Slot | None:
        return Slot(self.fidelity)

    def tell(self, trial: Trial) -> None:
        pass


def fidelities(minimum: float, maximum: float, eta: float) -> list[float]:
    """Return the fidelities `maximum`, `maximum` / eta, ... down to `minimum`, ascending.

    Raises:
        InvalidArgumentError: not 0 < `minimum` <= `maximum` < inf, or `eta` <= 1.
    """
    if not (0 < minimum <= maximum and eta > 1 and math.isfinite(maximum)):
        raise InvalidArgumentError(
            "rungs", f"cannot go from {minimum} to {maximum} by a factor of {eta}",
            remedy="use 0 < minimum <= maximum and eta > 1",
        )  # fmt: skip
    count = math.floor(math.log(maximum / minimum) / math.log(eta) + 1e-9) + 1
    return [maximum / eta ** (count - 1 - rung) for rung in range(count)]


def surely_promoted(trials: Sequence[Trial], order: Order, eta: float) -> list[Trial]:
    """Return the trials that an asynchronous policy runs in any order of completion.

    These are all trials of the first rung and the promotions of the best 1 / `eta` of each rung,
    provided that a candidate that is better at one rung is better at all.
    """
    promotions = {trial.parent: trial for trial in trials if trial.parent is not None}
    rung = [trial for trial in trials if trial.parent is None]
    certain: list[Trial] = []
    while rung:
        certain += rung
        best = order(rung)[: int(len(rung) / eta + 1e-9)]
        rung = [promotions[trial.number] for trial in best if trial.number in promotions]
    return certain


@dataclass
class _Rung:
    size: int
    ended: list[Trial] = field(default_factory=list)
    begun: int = 0


@dataclass
class Halving(RungPolicy):
    """Synchronous successive halving: the best 1 / eta of a rung's trials are promoted.

    A trial is promoted as soon as no running trial can displace it, which promotes the same trials
    as waiting for the whole rung. (Jamieson and Talwalkar, *Non-stochastic best arm
    identification and hyperparameter optimization*, AISTATS 2016.)

    Args:
        minimum, maximum: fidelity of the first and the last rung.
        n: number of trials in the first rung; None for as many as leave one in the last rung.
    """

    minimum: float
    maximum: float
    eta: float = 3.0
    n: int | None = None
    bracket: int = 0
    synchronous = True

    def __post_init__(self) -> None:
        self._at = fidelities(self.minimum, self.maximum, self.eta)
        first = self.n or round(self.eta ** (len(self._at) - 1))
        if first < 1:
            raise InvalidArgumentError("rungs", f"n={first} is not positive")
        sizes = [max(1, math.floor(first / self.eta**rung + 1e-9)) for rung in range(len(self._at))]
        self._rungs = [_Rung(size) for size in sizes]
        self._promoted: set[int] = set()

    def ask(self) -> Slot | None:
        for number in range(len(self._rungs) - 1, 0, -1):
            below = self._rungs[number - 1]
            for trial in self._certain(below, self._rungs[number].size):
                if trial.number not in self._promoted:
                    self._promoted.add(trial.number)
                    self._rungs[number].begun += 1
                    return Slot(self._at[number], self.bracket, number, trial)
        first = self._rungs[0]
        if first.begun < first.size:
            first.begun += 1
            return Slot(self._at[0], self.bracket)
        return None

    def _certain(self, rung: _Rung, count: int) -> list[Trial]:
        """Return ended trials that are among the best `count` however the running ones end."""
        open_ = rung.size - len(rung.ended)
        if open_ >= count:
            return []
        best = self.order(rung.ended)[: count - open_]
        return [trial for trial in best if trial.state in SCORED]

    def tell(self, trial: Trial) -> None:
        self._rungs[trial.rung].ended.append(trial)
        for rung, above in itertools.pairwise(self._rungs):
            # If too many trials failed, the next rung is smaller, possibly empty.
            alive = sum(ended.state in SCORED for ended in rung.ended)
            above.size = min(above.size, alive + rung.size - len(rung.ended))

    @property
    def rungs(self) -> int:
        return len(self._at)

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        return list(trials)

    @property
    def full(self) -> bool:
        """Whether the first rung accepts no further candidates."""
        return self._rungs[0].begun >= self._rungs[0].size

    @property
    def done(self) -> bool:
        return all(len(rung.ended) >= rung.size for rung in self._rungs)


@dataclass
class Hyperband(RungPolicy):
    """Repeated brackets of `Halving`, from many short trials to few long ones.

    A new bracket begins when no earlier one can begin a trial. (Li et al., *Hyperband*,
    JMLR 2018.)

    Args:
        rounds: number of repetitions of all brackets; None continues until the budget is spent.
    """

    minimum: float
    maximum: float
    eta: float = 3.0
    rounds: int | None = None

    def __post_init__(self) -> None:
        self._at = fidelities(self.minimum, self.maximum, self.eta)
        self._brackets: list[Halving] = []

    def ask(self) -> Slot | None:
        for bracket in self._brackets:
            if not bracket.done and (slot := bracket.ask()) is not None:
                return slot
        if self._all_begun:
            return None
        count = len(self._at)
        s = count - 1 - len(self._brackets) % count
        n = math.ceil(count / (s + 1) * self.eta**s)
        bracket = Halving(self._at[count - 1 - s], self.maximum, self.eta, n, len(self._brackets))
        bracket.order = self.order
        self._brackets.append(bracket)
        return bracket.ask()

    def tell(self, trial: Trial) -> None:
        self._brackets[trial.bracket].tell(trial)

    @property
    def rungs(self) -> int:
        return len(self._at)

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        return list(trials)

    @property
    def _all_begun(self) -> bool:
        return self.rounds is not None and len(self._brackets) >= self.rounds * len(self._at)

    @property
    def done(self) -> bool:
        return self._all_begun and all(bracket.done for bracket in self._brackets)


@dataclass
class Asha(RungPolicy):
    """Asynchronous successive halving: promotes the best 1 / eta of a rung's trials so far.

    (Li et al., *A system for massively parallel hyperparameter tuning*, MLSys 2020.)

    Args:
        n: number of new candidates; None continues until the budget is spent.
    """

    minimum: float
    maximum: float
    eta: float = 3.0
    n: int | None = None

    def __post_init__(self) -> None:
        self._at = fidelities(self.minimum, self.maximum, self.eta)
        self._finished: list[list[Trial]] = [[] for _ in self._at]
        self._promoted: list[set[int]] = [set() for _ in self._at]
        self._ask_count = self._open = 0

    def ask(self) -> Slot | None:
        for rung in range(len(self._at) - 2, -1, -1):
            for trial in self._promotable(rung):
                self._promoted[rung].add(trial.number)
                self._open += 1
                return Slot(self._at[rung + 1], 0, rung + 1, trial)
        if self.n is not None and self._ask_count >= self.n:
            return None
        self._ask_count += 1
        self._open += 1
        return Slot(self._at[0])

    def _promotable(self, rung: int) -> list[Trial]:
        count = int(len(self._finished[rung]) / self.eta + 1e-9)
        if count <= len(self._promoted[rung]) and not count:
            return []
        best = self.order(self._finished[rung])[:count]
        return [b for b in best if b.state in SCORED and b.number not in self._promoted[rung]]

    def tell(self, trial: Trial) -> None:
        self._open -= 1
        self._finished[trial.rung].append(trial)

    @property
    def rungs(self) -> int:
        return len(self._at)

    def certain(self, trials: Sequence[Trial]) -> list[Trial]:
        return surely_promoted(trials, self.order, self.eta)

    @property
    def done(self) -> bool:
        if self.n is None or self._ask_count < self.n or self._open:
            return False
        return not any(self._promotable(rung) for rung in range(len(self._at) - 1))
