"""Compare two arms of runs: did the technique change the step time, or the convergence?

Time to quality is the product of two factors, estimated separately: time per sample and samples to
the target. Runs are paired by seed, which fixes the initial weights and the order of the data. The
logarithms of the pairs' ratios give the intervals and Student's paired t-test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.mlperf.training.score import MIN_RUNS, olympic_mean
from slipstream.units import format_speedup, inverse_interval

# Two arms count as equal if the interval contains 1 and extends no further than this on each side.
_EQUIVALENCE = 0.03


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        status: ``success`` or ``aborted``.
        samples: training samples to the target, or until the run ended.
        seconds: wall time, including preparation and evaluations.
        cpu_s: CPU time, including preparation and evaluations.
        sample_s: CPU time per training sample; wall time if `wall`.
        digest: SHA-256 of all losses.
        wall: whether `sample_s` is wall time, used if the technique moves work to other processes.
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
        """Time of the whole run in s, on the same clock as `sample_s`."""
        return self.seconds if self.wall else self.cpu_s

    @property
    def converged(self) -> bool:
        """Whether the run reached the target."""
        return self.status == "success"

    @property
    def to_target(self) -> float:
        """Samples to the target; infinite for a failed run."""
        return float(self.samples) if self.converged else math.inf

    @classmethod
    def of(cls, found: Mapping[str, Any], log: str, *, wall: bool) -> Outcome:
        """Convert the result of `slipstream.mlperf.training.running.run`."""
        steps_s = found["step_s" if wall else "step_cpu_s"]
        return cls(
            found["seed"], found["status"], found["samples"], found["seconds"], found["cpu_s"],
            steps_s / max(found["samples"], 1), found["digest"],
            tuple((int(n), float(q)) for n, q in found["qualities"]), found["reason"], log,
            wall,
        )  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """A ratio, candidate over baseline, with its 95 % interval; as text its inverse, the speed-up.

    Attributes:
        ratio, low, high: below 1 is better.
        p_value: two-sided p-value of the paired t-test.
        n: number of pairs.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    n: int

    @classmethod
    def of(cls, baseline: Sequence[float], candidate: Sequence[float]) -> Factor:
        """Return the geometric mean of the pairs' ratios, with its interval."""
        from scipy.stats import t

        logs = np.log(np.asarray(candidate) / np.asarray(baseline))
        n, middle = len(logs), float(np.mean(logs)) if len(logs) else math.nan
        if n < 2:
            return cls(math.exp(middle), 0.0, math.inf, 1.0, n)
        error = float(np.std(logs, ddof=1)) / math.sqrt(n)
        if not error:
            p_value = 1.0 if not middle else 0.0
            return cls(math.exp(middle), math.exp(middle), math.exp(middle), p_value, n)
        half_width = float(t.ppf(0.975, n - 1)) * error
        p_value = 2 * float(t.sf(abs(middle) / error, n - 1))
        low, high = math.exp(middle - half_width), math.exp(middle + half_width)
        return cls(math.exp(middle), low, high, p_value, n)

    def __str__(self) -> str:
        return format_speedup(inverse_interval(self.ratio, self.low, self.high), 3)

    @property
    def significant(self) -> bool:
        """Whether the ratio differs from 1 at the 5 % level."""
        return self.p_value < 0.05

    def words(self, better: str, worse: str, equal: str) -> str:
        """Describe the ratio: ``22 % faster``, ``9 % slower``, or that no difference was found."""
        if self.n < 2:
            return f"{self.ratio:.2f} times the baseline's in a single pair (inconclusive)"
        if not self.significant:
            narrow = self.high < 1 + _EQUIVALENCE and self.low > 1 - _EQUIVALENCE
            reach = self.high / self.ratio - 1
            if reach > 1:
                return f"not measurably different in {self.n} pairs (inconclusive)"
            return equal if narrow else f"{equal} within {100 * reach:.0f} %"
        if self.ratio < 1:
            return f"{100 * (1 - self.ratio):.0f} % {better}"
        return f"{100 * (self.ratio - 1):.0f} % {worse}"


@dataclass(frozen=True)
class Verdict:
    """A candidate compared with the baseline.

    Attributes:
        sample: factor of the time per sample, over all pairs.
        samples, steps, time: factors of the samples to the target, of their product with the time
            per sample, and of the whole run's time (with evaluations and the technique's own work),
            over pairs in which both runs converged.
        same: whether the losses of every pair are bitwise identical.
        converged, runs: number of the candidate's runs that converged, and of all its runs.
        score, baseline_score: olympic times in s; NaN for fewer than three runs.
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
        """Compare the runs that have the same seeds."""
        by_seed = {run.seed: run for run in baseline}
        pairs = [(by_seed[run.seed], run) for run in candidate if run.seed in by_seed]
        both = [(a, b) for a, b in pairs if a.converged and b.converged]

        def factor(value: Any, chosen: Any) -> Factor:
            return Factor.of([value(a) for a, _ in chosen], [value(b) for _, b in chosen])

        return cls(
            name,
            factor(lambda run: run.sample_s, pairs),
            factor(lambda run: float(run.samples), both),
            factor(lambda run: run.sample_s * run.samples, both),
            factor(lambda run: run.whole_s, both),
            bool(pairs) and all(a.digest == b.digest for a, b in pairs),
            sum(run.converged for run in candidate), len(candidate),
            _score(candidate), _score(baseline),
        )  # fmt: skip

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        step = self.sample.words("faster", "slower", "as fast")
        failed = self.runs - self.converged
        if not self.converged:
            return f"{self.name}: the step is {step}, and no run reached the target"
        whole = self.time.words("faster", "slower", "as fast")
        if self.same:
            return f"{self.name}: the step is {step}, the losses are bitwise identical and the " \
                f"training is {whole}"  # fmt: skip
        need = self.samples.words("fewer samples", "more samples", "as many samples")
        ending = f"; {failed} of {self.runs} runs did not reach the target" if failed else ""
        significant = self.sample.significant and self.time.significant
        opposite = (self.sample.ratio < 1) != (self.time.ratio < 1)
        turn = "but" if significant and opposite else "and"
        return (
            f"{self.name}: the step is {step}, it takes {need}, {turn} the training is {whole}"
            f"{ending}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        factors = ("sample", "samples", "steps", "time")
        return {
            "technique": self.name, **{name: {**vars(getattr(self, name))} for name in factors},
            "same": self.same, "converged": self.converged, "runs": self.runs,
            "score_s": self.score, "baseline_score_s": self.baseline_score,
            "sentence": self.sentence,
        }  # fmt: skip


def _score(runs: Sequence[Outcome]) -> float:
    if len(runs) < MIN_RUNS:
        return math.nan
    return olympic_mean([run.seconds if run.converged else math.inf for run in runs])


def detectable(spread: float, pairs: int, power: float = 0.8) -> float:
    """Return the smallest relative difference that `pairs` pairs detect, at 5 % two-sided.

    Args:
        spread: standard deviation of the logarithm of one arm's samples to the target. Arms are
            assumed to be independent, the worst case for pairs.
    """
    from scipy.optimize import brentq

    if pairs < 2:
        return math.inf

    def lacking(effect: float) -> float:
        return power_of(effect, spread, pairs) - power

    return math.expm1(float(brentq(lacking, 1e-6, 20 * spread + 1e-3)))


def power_of(effect: float, spread: float, pairs: int) -> float:
    """Return the power of `pairs` pairs to detect a log-ratio of `effect`, at 5 % two-sided."""
    from scipy.stats import nct, t

    critical = float(t.ppf(0.975, pairs - 1))
    noncentrality = effect / (math.sqrt(2) * spread) * math.sqrt(pairs)
    lower = float(nct.cdf(-critical, pairs - 1, noncentrality))
    return float(nct.sf(critical, pairs - 1, noncentrality)) + (0.0 if math.isnan(lower) else lower)
