"""Two arms of runs from the same seeds: is it the step that changed, or the training?

Time to quality is the product of two factors that are estimated apart: time of a sample, and
samples to the target. Pairs of runs have the seed in common, the first weights and the order of the
data with it; logarithms of their ratios give intervals and a test (Student's, paired).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.mlperf.training.score import LEAST_RUNS, olympic

# A factor is called the same while its interval holds 1 and is no wider than this either way.
_ALIKE = 0.03


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        status: ``success`` or ``aborted``.
        samples: to the target, or until it was given up.
        seconds: of the clock, evaluations and preparing included.
        cpu_s: of the processor, likewise.
        sample_s: of the processor for one training sample; of the clock where work moves to others.
        digest: of all losses.
        wall: whether `sample_s` is of the clock.
    """

    seed: int
    status: str
    samples: int
    seconds: float
    cpu_s: float
    sample_s: float
    digest: str
    qualities: tuple[tuple[int, float], ...] = ()
    reason: str = ""
    log: str = ""
    wall: bool = False

    @property
    def whole_s(self) -> float:
        """Seconds of the whole run, evaluations and preparing included, by `sample_s`'s clock."""
        return self.seconds if self.wall else self.cpu_s

    @property
    def converged(self) -> bool:
        """Whether it reached the target."""
        return self.status == "success"

    @property
    def to_target(self) -> float:
        """Samples; infinite where it failed."""
        return float(self.samples) if self.converged else math.inf

    @classmethod
    def of(cls, found: Mapping[str, Any], log: str, *, wall: bool) -> Outcome:
        """From what `slipstream.mlperf.training.running.run` told."""
        took = found["step_s" if wall else "step_cpu_s"]
        return cls(
            found["seed"], found["status"], found["samples"], found["seconds"], found["cpu_s"],
            took / max(found["samples"], 1), found["digest"],
            tuple((int(n), float(q)) for n, q in found["qualities"]), found["reason"], log,
            wall,
        )  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """A ratio, candidate over baseline, with its 95 % interval; below 1 is better.

    Attributes:
        p_value: of no difference, two-sided.
        n: pairs.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    n: int

    @classmethod
    def of(cls, baseline: Sequence[float], candidate: Sequence[float]) -> Factor:
        """The geometric mean of pairs' ratios."""
        from scipy.stats import t

        logs = np.log(np.asarray(candidate) / np.asarray(baseline))
        n, middle = len(logs), float(np.mean(logs)) if len(logs) else math.nan
        if n < 2:
            return cls(math.exp(middle), 0.0, math.inf, 1.0, n)
        error = float(np.std(logs, ddof=1)) / math.sqrt(n)
        if not error:
            p_value = 1.0 if not middle else 0.0
            return cls(math.exp(middle), math.exp(middle), math.exp(middle), p_value, n)
        reach = float(t.ppf(0.975, n - 1)) * error
        p_value = 2 * float(t.sf(abs(middle) / error, n - 1))
        return cls(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), p_value, n)

    @property
    def significant(self) -> bool:
        """At 5 %."""
        return self.p_value < 0.05

    def words(self, better: str, worse: str, alike: str) -> str:
        """``22 % faster``, ``9 % slower``, or that no difference was found."""
        if self.n < 2:
            return f"{self.ratio:.2f} of it in the one pair, which says nothing"
        if not self.significant:
            narrow = self.high < 1 + _ALIKE and self.low > 1 - _ALIKE
            reach = self.high / self.ratio - 1
            if reach > 1:
                return f"{alike} as far as {self.n} pairs can tell, which is not far"
            return alike if narrow else f"{alike} within {100 * reach:.0f} %"
        if self.ratio < 1:
            return f"{100 * (1 - self.ratio):.0f} % {better}"
        return f"{100 * (self.ratio - 1):.0f} % {worse}"


@dataclass(frozen=True)
class Verdict:
    """A candidate against the baseline.

    Attributes:
        sample, samples, steps, time: factors of the time of a sample, of samples to the target, of
            their product, and of the whole run's time, where evaluations and whatever the technique
            does are on the clock; of pairs in which both converged.
        same: whether every pair had the same losses, to the bit.
        converged, runs: of the candidate.
        score, baseline_score: olympic times in seconds; NaN of fewer than three runs.
    """

    name: str
    sample: Factor
    samples: Factor
    steps: Factor
    time: Factor
    same: bool
    converged: int
    runs: int
    score: float
    baseline_score: float

    @classmethod
    def of(cls, name: str, baseline: Sequence[Outcome], candidate: Sequence[Outcome]) -> Verdict:
        """Of runs from the same seeds."""
        by_seed = {one.seed: one for one in baseline}
        pairs = [(by_seed[one.seed], one) for one in candidate if one.seed in by_seed]
        both = [(a, b) for a, b in pairs if a.converged and b.converged]

        def factor(value: Any, chosen: Any) -> Factor:
            return Factor.of([value(a) for a, _ in chosen], [value(b) for _, b in chosen])

        return cls(
            name,
            factor(lambda one: one.sample_s, pairs),
            factor(lambda one: float(one.samples), both),
            factor(lambda one: one.sample_s * one.samples, both),
            factor(lambda run: run.whole_s, both),
            bool(pairs) and all(a.digest == b.digest for a, b in pairs),
            sum(one.converged for one in candidate), len(candidate),
            _score(candidate), _score(baseline),
        )  # fmt: skip

    @property
    def sentence(self) -> str:
        """What a person needs to know."""
        step = self.sample.words("faster", "slower", "as fast")
        lost = self.runs - self.converged
        if not self.converged:
            return f"{self.name}: the step is {step}, and no run reached the target"
        whole = self.time.words("faster", "slower", "as fast")
        if self.same:
            return (
                f"{self.name}: the step is {step}, the training is the same to the bit and {whole}"
            )
        need = self.samples.words("fewer samples", "more samples", "as many samples")
        lost_words = f"; {lost} of {self.runs} runs did not reach the target" if lost else ""
        told = self.sample.significant and self.time.significant
        turn = "but" if told and (self.sample.ratio < 1) != (self.time.ratio < 1) else "and"
        return (
            f"{self.name}: the step is {step}, it takes {need}, {turn} the training is {whole}"
            f"{lost_words}"
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "technique": self.name,
            **{
                name: {**vars(getattr(self, name))}
                for name in ("sample", "samples", "steps", "time")
            },
            "same": self.same, "converged": self.converged, "runs": self.runs,
            "score_s": self.score, "baseline_score_s": self.baseline_score,
            "sentence": self.sentence,
        }  # fmt: skip


def _score(runs: Sequence[Outcome]) -> float:
    if len(runs) < LEAST_RUNS:
        return math.nan
    return olympic([one.seconds if one.converged else math.inf for one in runs])


def detectable(spread: float, pairs: int, power: float = 0.8) -> float:
    """The smallest relative difference that so many pairs find, at 5 % two-sided.

    Args:
        spread: standard deviation of the logarithm of one arm's samples to the target; arms are
            taken to be independent, which pairs at worst are.
    """
    from scipy.optimize import brentq

    if pairs < 2:
        return math.inf

    def lacking(effect: float) -> float:
        return power_of(effect, spread, pairs) - power

    return math.expm1(float(brentq(lacking, 1e-6, 20 * spread + 1e-3)))


def power_of(effect: float, spread: float, pairs: int) -> float:
    """How often so many pairs find a difference of `effect` in logarithms, at 5 % two-sided."""
    from scipy.stats import nct, t

    critical = float(t.ppf(0.975, pairs - 1))
    shift = effect / (math.sqrt(2) * spread) * math.sqrt(pairs)
    lower = float(nct.cdf(-critical, pairs - 1, shift))
    return float(nct.sf(critical, pairs - 1, shift)) + (0.0 if math.isnan(lower) else lower)
