"""Predict from the context of a request when an object is read again, and how long and large it is.

A table is looked up by context, with back-off to less informative keys and to prefixes of the
object's name. Intervals that have not ended when the trace does are censored, not omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engines.storage.policies import (
    BINS,
    NEVER,
    CachePolicy,
    Float64s,
    Int32s,
    Int64s,
    bin_edges,
    gittins,
    next_requests,
)
from slipstream.engines.storage.simulating import key_information, served_requests
from slipstream.engines.storage.tokens import Context, key_tokens
from slipstream.engines.storage.traces import OPS, AccessTrace, distinct
from slipstream.errors import InvalidArgumentError, UnknownNameError

TASKS = ("interval", "interval_s", "lifetime_s", "size", "read_fraction")
"""Requests and seconds to the next request of the object, seconds from creation to deletion, bytes,
and the share of requests that read."""
SHRINKAGE = 20.0
"""Number of observations of a context that a less specific one counts for."""
_PREFIXES = 4
_ITERATIONS = 80
_MAX_STRENGTH = 200.0
_SHARES = np.arange(1, 100) / 100
# The share of a trace that is learned from before the rest of it yields the scores.
_BEFORE = 0.8
_MIN_SCORES = 200
# Values that vary less have no meaningful scores.
_CONSTANT = 0.01


@dataclass(frozen=True, eq=False)
class AccessForecast:
    """A log-normal distribution, and for intervals its hazards.

    Attributes:
        mean_log, sd_log: of the natural logarithm, in the unit of the task (see `TASKS`).
        observations: of the most specific context that was found.
        hazard: float64 [64] by bin of age (see `bin_edges`), for ``interval``; else None.
        scores: float64 [99], standard scores that 1 % to 99 % of later values of the task did not
            exceed; None if they were not measured, so that a normal distribution's are used.
    """

    mean_log: float
    sd_log: float
    observations: float
    hazard: Float64s | None = None
    scores: Float64s | None = None

    def quantile(self, share: float) -> float:
        """Return the value that is not exceeded with a probability of `share`.

        Raises:
            InvalidArgumentError: `share` is not between 0 and 1.
        """
        if not 0 < share < 1:
            raise InvalidArgumentError("share", f"{share} is not between 0 and 1")
        score = NormalDist().inv_cdf(share)
        if self.scores is not None and self.sd_log > _CONSTANT and 0.01 <= share <= 0.99:
            score = float(np.interp(share, _SHARES, self.scores))
        return math.exp(min(self.mean_log + self.sd_log * score, 700.0))

    def gittins(self) -> Float64s:
        """Return the hit density [64] by age that the cache policy ranks by.

        Raises:
            InvalidArgumentError: this is no forecast of ``interval``.
        """
        if self.hazard is None:
            raise InvalidArgumentError("task", "only 'interval' has hazards")
        return gittins(self.hazard)


@dataclass(frozen=True, eq=False)
class Observations:
    """Values of one task.

    Attributes:
        classes: int32 [N], class of context.
        value: float64 [N], positive.
        censored: bool [N], whether the value is only a lower bound.
        position: int64 [N], of the request in its trace; None without a trace.
    """

    classes: npt.NDArray[np.int32]
    value: Float64s
    censored: npt.NDArray[np.bool_]
    position: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class _Group:
    """Statistics of one context at one level of back-off.

    Attributes:
        bins: for ``interval``, the number of ended and censored intervals by bin, [2, 64].
    """

    count: float
    mean: float
    variance: float
    bins: Int64s | None


class AccessPredictor:
    """Distributions by context, learned from a trace with `fit`.

    Args:
        tasks: those of `TASKS` to learn.

    Raises:
        UnknownNameError: there is no such task.
    """

    def __init__(self, tasks: Sequence[str] = ("interval", "interval_s", "size")) -> None:
        for task in tasks:
            if task not in TASKS:
                raise UnknownNameError("task", task, TASKS)
        self.tasks = tuple(tasks)
        self._levels: list[tuple[str, ...]] = [()]
        self._groups: dict[str, list[dict[Context, _Group]]] = {}
        self._memo: dict[tuple[str, Context], AccessForecast] = {}
        self._scores: dict[str, Float64s] = {}

    def fit(self, trace: AccessTrace) -> AccessPredictor:
        """Learn from all requests of a trace; tasks without observations there are left out.

        Raises:
            InvalidArgumentError: the trace has no reads.
        """
        classes, tokens = trace.classes()
        features, ranked = ranked_features(trace, classes, tokens)
        count = round(_BEFORE * len(trace))
        before, found = (
            {
                task: seen
                for task in self.tasks
                if (seen := observations(part, task, classes[: len(part)])).value.size
            }
            for part in (trace.first(count), trace)
        )
        self._scores = {}
        self.fit_observations(before, features, ranked)
        scores = {task: self._later_scores(found[task], task, tokens, count) for task in before}
        self.fit_observations(found, features, ranked)
        self._scores = {task: each for task, each in scores.items() if each is not None}
        return self

    def _later_scores(
        self, seen: Observations, task: str, tokens: Sequence[Context], count: int
    ) -> Float64s | None:
        """Return `AccessForecast.scores` of the requests from `count` on; None if there are few."""
        assert seen.position is not None
        late = seen.position >= count
        used, of_value = np.unique(seen.classes[late], return_inverse=True)
        forecasts = [self.predict_tokens(tokens[number], task) for number in used]
        mean, sd = np.reshape([(each.mean_log, each.sd_log) for each in forecasts], (-1, 2)).T
        varies = sd[of_value] > _CONSTANT
        if np.count_nonzero(varies & ~seen.censored[late]) < _MIN_SCORES:
            return None
        score = ((np.log(seen.value[late]) - mean[of_value]) / sd[of_value])[varies]
        # Kaplan-Meier: values that have not ended count as far as they are observed.
        order = np.argsort(score)
        ended = ~seen.censored[late][varies][order]
        above = np.cumprod(1 - ended / np.arange(score.size, 0, -1))
        at = np.searchsorted(1 - above, _SHARES)
        normal = np.array([NormalDist().inv_cdf(share) for share in _SHARES])
        observed = score[order][np.minimum(at, score.size - 1)]
        return np.asarray(np.where(at < score.size, observed, np.maximum(observed, normal)))

    def fit_observations(
        self,
        observed: Mapping[str, Observations],
        features: Sequence[Mapping[str, str]],
        keys: Sequence[str],
    ) -> AccessPredictor:
        """Learn from values.

        Args:
            observed: by task.
            features: text by key, of each class.
            keys: the most informative one first.
        """
        self._levels = [tuple(keys[:count]) for count in range(len(keys) + 1)]
        self._groups, self._memo = {task: [] for task in observed}, {}
        for names, of_class in back_off(features, keys):
            for task, seen in observed.items():
                group = of_class[seen.classes]
                self._groups[task].append(_statistics(seen, group, names, task))
        return self

    def predict(
        self, context: Mapping[str, str], task: str = "interval", object_name: str = ""
    ) -> AccessForecast:
        """Return the distribution of a task for a context; memoised by its tokens.

        Raises:
            UnknownNameError: the task was not learned.
        """
        extra = (("object", object_name),) if object_name else ()
        return self.predict_tokens(key_tokens((*sorted(context.items()), *extra)), task)

    def predict_tokens(self, tokens: Context, task: str = "interval") -> AccessForecast:
        """Return the distribution of a task for the tokens of a class of context."""
        if task not in self._groups:
            raise UnknownNameError("task", task, self._groups)
        key = task, tokens
        if key not in self._memo:
            self._memo[key] = self._look_up(_features(tokens), task)
        return self._memo[key]

    def _look_up(self, features: Mapping[str, str], task: str) -> AccessForecast:
        mean = variance = count = 0.0
        hazard: Float64s | None = None
        for level, groups in zip(self._levels, self._groups[task], strict=True):
            group = groups.get(tuple((key, features.get(key, "")) for key in level))
            if group is None:
                continue
            count = group.count
            weight = count / (count + SHRINKAGE) if level else 1.0
            # How far apart the contexts are matters only if there are few observations.
            between = ((1 - weight) * (group.mean - mean)) ** 2
            # Geometric: an arithmetic mean would add the variance between all contexts.
            variance = group.variance**weight * (variance or 1.0) ** (1 - weight) + between
            mean = weight * group.mean + (1 - weight) * mean
            if group.bins is not None:
                hazard = _hazards(group.bins, hazard)
        return AccessForecast(mean, math.sqrt(variance), count, hazard, self._scores.get(task))

    def set_prior(self, policy: CachePolicy, number: int, tokens: Context) -> None:
        """Tell a policy what to expect of a class of context that it has not seen."""
        forecast = self.predict_tokens(tokens)
        if forecast.hazard is not None:
            strength = min(max(forecast.observations, SHRINKAGE), _MAX_STRENGTH)
            policy.set_prior(number, forecast.hazard, strength)


def _features(tokens: Context) -> dict[str, str]:
    """Return the text of each key, and of prefixes of the object's name."""
    found = dict(tokens)
    words = found.get("object", "").split()
    prefixes = range(1, min(_PREFIXES, len(words) - 1) + 1)
    return found | {f"object[:{n}]": " ".join(words[:n]) for n in prefixes}


def ranked_features(
    trace: AccessTrace, classes: Int32s, tokens: Sequence[Context]
) -> tuple[list[dict[str, str]], list[str]]:
    """Return the text by key of each class, and the keys, the most informative one first."""
    served = served_requests(trace)
    information = key_information(trace.select(served), classes[served], tokens)
    features = [_features(context) for context in tokens]
    ranked = sorted(
        {key for row in features for key in row},
        key=lambda key: (-information.get(key.partition("[")[0], 0.0), key),
    )
    return features, ranked


def back_off(
    features: Sequence[Mapping[str, str]], keys: Sequence[str]
) -> Iterator[tuple[list[Context], Int32s]]:
    """Yield groups, and the group of each class, by none of the keys up to all of them."""
    for count in range(len(keys) + 1):
        names, of_class = distinct(
            tuple((key, row.get(key, "")) for key in keys[:count]) for row in features
        )
        yield list(names), of_class


def observations(
    trace: AccessTrace, task: str, classes: npt.NDArray[np.int32] | None = None
) -> Observations:
    """Return the values of one of `TASKS` in a trace, by class of context."""
    classes = trace.classes()[0] if classes is None else classes
    time_s = trace.time_ns / 1e9
    following = next_requests(trace.objects)
    last, every = following == NEVER, np.arange(len(trace))
    if task == "interval":
        value = np.where(last, len(trace), following) - np.arange(len(trace))
        return Observations(classes, value.astype(np.float64), last, every)
    if task == "interval_s":
        until = time_s[np.where(last, -1, following)]
        return Observations(classes, np.maximum(until - time_s, 1e-9), last, every)
    if task == "size":
        size = np.maximum(trace.sizes, 1).astype(np.float64)
        return Observations(classes, size, last & False, every)
    if task == "read_fraction":
        read = np.isin(trace.ops, [OPS.index("open"), OPS.index("read")])
        share = np.bincount(trace.objects, read) / np.maximum(np.bincount(trace.objects), 1)
        return Observations(classes, np.maximum(share[trace.objects], 1e-3), last & False, every)
    deleted = np.full(int(trace.objects.max(initial=-1)) + 1, np.inf)
    gone = trace.ops == OPS.index("delete")
    deleted[trace.objects[gone]] = time_s[gone]
    made = np.flatnonzero(trace.ops == OPS.index("create"))
    end = deleted[trace.objects[made]]
    censored = (end < time_s[made]) | np.isinf(end)
    life = np.where(censored, time_s[-1:].max(initial=0.0), end) - time_s[made]
    return Observations(classes[made], np.maximum(life, 1e-9), censored, made)


def _statistics(
    seen: Observations, group: npt.NDArray[Any], names: list[Context], task: str
) -> dict[Context, _Group]:
    """Fit a censored log-normal to each group by expectation maximisation."""
    # Not at import, since finding techniques imports this package.
    from scipy.special import log_ndtr

    count = np.bincount(group, minlength=len(names)).astype(np.float64)
    size, x = np.maximum(count, 1.0), np.log(seen.value)
    mean = np.bincount(group, x, len(names)) / size
    variance = np.maximum(np.bincount(group, (x - mean[group]) ** 2, len(names)) / size, 1e-6)
    for _ in range(_ITERATIONS if seen.censored.any() else 0):
        mu, sd = mean[group], np.sqrt(variance[group])
        z = (x - mu) / sd
        # Inverse Mills ratio: the mean of a standard normal above z.
        mills = np.exp(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - log_ndtr(-z))
        first = np.where(seen.censored, mu + sd * mills, x)
        second = np.where(seen.censored, mu**2 + sd**2 + sd * (mu + x) * mills, x**2)
        mean = np.bincount(group, first, len(names)) / size
        variance = np.bincount(group, second, len(names)) / size - mean**2
        variance = np.clip(variance, 1e-6, 400.0)
    bins = None
    if task == "interval":
        at = np.clip(np.searchsorted(bin_edges(), seen.value, "right") - 1, 0, BINS - 1)
        cell = (group * 2 + seen.censored) * BINS + at
        bins = np.bincount(cell, minlength=len(names) * 2 * BINS).reshape(-1, 2, BINS)
    return {
        name: _Group(
            float(count[n]), float(mean[n]), float(variance[n]), None if bins is None else bins[n]
        )
        for n, name in enumerate(names) if count[n]
    }  # fmt: skip


def _hazards(bins: Int64s, prior: Float64s | None) -> Float64s:
    """Return the Kaplan-Meier hazards [64] of binned intervals, shrunk to `prior`."""
    ended, open_ = bins
    exposed = np.cumsum((ended + open_)[::-1])[::-1] - 0.5 * open_
    if prior is None:
        return np.asarray(ended / np.maximum(exposed, 1e-9))
    return np.asarray((ended + SHRINKAGE * prior) / (exposed + SHRINKAGE))
