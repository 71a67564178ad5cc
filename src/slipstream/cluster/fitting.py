"""Fit latency, bandwidth and the cost of summation to timed communications.

A duration is a sum of three known terms with unknown factors: consecutive messages, bytes on the
busiest link, bytes that are summed. The factors minimise the squared relative errors and are not
negative; samples with varying repeats have less weight, as those of small messages that wait for a
core. Intervals come from a bootstrap over the repeats.

If the cost of messages changes with their size, each regime has its own latency and rate. The
number of regimes is found by leaving out each size in turn: another regime is accepted only if it
predicts the omitted sizes better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.cluster.closed_form import closed_form_ns
from slipstream.cluster.errors import ClusterError
from slipstream.cluster.regimes import Regime, regime_of
from slipstream.cluster.samples import COMPUTING, Operation, Sample
from slipstream.cluster.topology import Float64s

_WORST_RESIDUAL = 0.30
_DRAWS = 200
_INTERVAL = (5.0, 95.0)
# Relative amount by which a larger message may be faster before the measurement is rejected.
_NOISE = 0.25
# Minimum number of sizes in a regime: a line always fits two.
_SIZES_EACH = 3
# Relative error of the model itself, for samples without noise.
_MODEL_ERROR = 0.02
# Required reduction of the error of omitted sizes by another regime: relative and absolute.
_GAIN, _MIN_GAIN = 0.1, 0.002


@dataclass(frozen=True)
class Fit:
    """Cost of a message, ``alpha_ns + nbytes * ns_per_byte``, and of summation.

    Attributes:
        alpha_ns, ns_per_byte, reduce_ns_per_byte: see above; with several regimes the latency of
            the smallest messages, and the time per byte of the largest.
        intervals: for each, 5 % and 95 % of the bootstrap.
        residuals: relative error of each sample.
        regimes: set if one latency and one rate do not suffice; relative to `ns_per_byte`.
    """

    alpha_ns: float
    ns_per_byte: float
    reduce_ns_per_byte: float
    intervals: dict[str, tuple[float, float]]
    residuals: tuple[float, ...]
    regimes: tuple[Regime, ...] = ()

    @property
    def residual(self) -> float:
        return float(np.median(np.abs(self.residuals)))

    @property
    def residual_p90(self) -> float:
        return float(np.percentile(np.abs(self.residuals), 90))

    def predict_ns(self, operation: Operation) -> float:
        """Return the duration of an operation by this fit."""
        regimes = self.regimes or (Regime(0.0, self.alpha_ns),)
        duration = 0.0
        for part, message in _parts(operation):
            regime = regime_of(regimes, message, 1.0)
            slope = self.ns_per_byte * regime.slowdown
            duration += float(part @ np.array([regime.alpha_ns, slope, self.reduce_ns_per_byte]))
        return duration


def terms(operation: Operation) -> Float64s:
    """Return consecutive messages, bytes on the busiest link, bytes summed: as gloo executes them.

    Its all-reduce is a ring, its all-gather one too except for one half piece (see `patterns`); its
    ``reduce_scatter_tensor`` is an all-reduce, as bytes on the wire show, and so is the first phase
    of the two-dimensional all-reduce.
    """
    total: Float64s = np.sum([part for part, _ in _parts(operation)], axis=0)
    return total


def _parts(operation: Operation) -> list[tuple[Float64s, float]]:
    """Return the three terms of consecutive parts, each with the bytes of a message."""
    n, size = len(operation.ranks), float(operation.nbytes)
    if operation.kind == "p2p":
        return [(np.array([1.0, size, 0.0]), size)]
    if operation.kind == "add":
        return [(np.array([0.0, 0.0, size]), size)]
    if operation.kind == "2d":
        half = n // 2
        rows = _gloo("all_reduce", size, half) + _gloo("all_gather", size, half)
        return [(rows, size / half), (_gloo("all_reduce", size / half, 2), size / half / 2)]
    if operation.kind != "all_gather":
        return [(_gloo("all_reduce", size, n), size / n)]
    # Of consecutive gathers only the first waits for a request: the next one is already there.
    ring = _gloo("all_gather", size, n, "ring")
    return [(ring + (_gloo("all_gather", size, n) - ring) / operation.in_a_row, size / n)]


def _gloo(kind: str, size: float, n: int, algo: str = "") -> Float64s:
    algo = algo or ("gloo" if kind == "all_gather" else "ring")

    def cost(alpha: float, rate: float, add: float) -> float:
        return float(
            closed_form_ns(kind, algo, size, n, alpha_ns=alpha, bytes_per_s=rate,
                           reduce_ns_per_byte=add)
        )  # fmt: skip

    # The formula is linear in its three factors.
    unlimited = np.inf
    return np.array([cost(1.0, unlimited, 0.0), cost(0.0, 1e9, 0.0), cost(0.0, unlimited, 1.0)])


def fit(samples: Sequence[Sample], *, most_regimes: int = 1, seed: int = 0) -> Fit:
    """Fit the factors to samples of communications; others are ignored.

    Args:
        most_regimes: maximum number of regimes.

    Raises:
        ClusterError: larger messages took less time, or the median sample has a residual above
            30 %.
    """
    samples = [sample for sample in samples if sample.operation.kind not in COMPUTING]
    if len(samples) < 3:
        raise ClusterError(
            f"{len(samples)} samples are too few to fit", remedy="measure more sizes"
        )
    _check_monotone(samples)
    durations = np.array([sample.duration_ns for sample in samples])
    lines = _accepted(samples, most_regimes)
    table, factors = _table(samples, lines.starts), lines.factors
    residuals = table @ factors / durations - 1.0
    if float(np.median(np.abs(residuals))) > _WORST_RESIDUAL:
        raise ClusterError(
            "latency and bandwidth leave the median measurement off by "
            f"{np.median(np.abs(residuals)):.0%}",
            remedy="use a quieter machine, or fewer ranks than CPU cores",
        )
    rng = np.random.default_rng(seed)
    repeats = [np.array(sample.repeats_ns) for sample in samples]
    weights = _weights(samples)
    draws = np.array([
        _solve(table, np.array([np.median(rng.choice(r, r.size)) for r in repeats]), weights)
        for _ in range(_DRAWS)
    ])  # fmt: skip
    low, high = np.percentile(draws, _INTERVAL, axis=0)
    # The latency of the smallest messages, the rate of the largest.
    last = len(lines.starts) - 1
    columns = {"alpha_ns": 0, "ns_per_byte": 2 * last + 1, "reduce_ns_per_byte": 2 * last + 2}
    alpha, slope, add = (float(factors[column]) for column in columns.values())
    regimes = tuple(
        Regime(start, float(factors[2 * k]), float(factors[2 * k + 1]) / slope)
        for k, start in enumerate(lines.starts) if last and slope > 0.0
    )  # fmt: skip
    return Fit(
        alpha, slope, add, {name: (float(low[c]), float(high[c])) for name, c in columns.items()},
        tuple(residuals.tolist()), regimes,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Lines:
    """A line per regime.

    Attributes:
        starts: sizes of messages at which regimes begin.
        factors: latency and time per byte of each regime in turn, then the cost of summation.
    """

    starts: tuple[float, ...]
    factors: Float64s
    error: float


def _accepted(samples: Sequence[Sample], most: int) -> _Lines:
    """Return the largest number of regimes that predicts omitted sizes better than fewer do."""
    lines = _lines(samples, 1)
    sizes = sorted({sample.operation.nbytes for sample in samples})
    if most == 1 or len(sizes) <= 2 * _SIZES_EACH:
        return lines
    error = _left_out(samples, sizes, 1)
    for count in range(2, most + 1):
        more = _lines(samples, count)
        if len(more.starts) < count:
            break
        new_error = _left_out(samples, sizes, count)
        if error - new_error < max(_GAIN * error, _MIN_GAIN):
            break
        lines, error = more, new_error
    return lines


def _left_out(samples: Sequence[Sample], sizes: Sequence[int], count: int) -> float:
    """Return the weighted mean relative error of each size predicted from the others."""
    errors: list[float] = []
    weights: list[float] = []
    for size in sizes:
        others = [sample for sample in samples if sample.operation.nbytes != size]
        omitted = [sample for sample in samples if sample.operation.nbytes == size]
        lines = _lines(others, count)
        durations = np.array([sample.duration_ns for sample in omitted])
        errors += np.abs(_table(omitted, lines.starts) @ lines.factors / durations - 1.0).tolist()
        weights += _weights(omitted).tolist()
    return float(np.average(errors, weights=weights))


def _lines(samples: Sequence[Sample], count: int) -> _Lines:
    """Fit this many regimes, or fewer if no more can be distinguished.

    Each cut is the one with the smallest error for which no message is cheaper than a smaller one.
    """
    best = _solved(samples, (0.0,))
    sizes = sorted({message for sample in samples for _, message in _parts(sample.operation)})
    for _ in range(1, count):
        options = [
            lines
            for low, high in itertools.pairwise(sizes)
            if (lines := _cut(samples, sizes, best.starts, low, high)) is not None
        ]
        if not options:
            break
        best = min(options, key=lambda lines: lines.error)
    return best


def _cut(
    samples: Sequence[Sample], sizes: Sequence[float], starts: tuple[float, ...], low: float,
    high: float,
) -> _Lines | None:  # fmt: skip
    """Fit one regime more, from a size above `low`; None if that is not allowed.

    It begins where the lines meet if that is between the two sizes, otherwise half way with a step.
    """
    middle = float(np.sqrt(low * high))
    cuts = tuple(sorted({*starts, middle}))
    if np.histogram(sizes, [*cuts, np.inf])[0].min() < _SIZES_EACH:
        return None
    solved = _solved(samples, cuts)
    lines = solved.factors[:-1].reshape(-1, 2)
    moved = [0.0]
    for k, start in enumerate(cuts[1:], start=1):
        less, more = lines[k - 1], lines[k]
        below = max(size for size in sizes if size < start)
        above = min(size for size in sizes if size >= start)
        meet = (less[0] - more[0]) / (more[1] - less[1]) if more[1] != less[1] else np.nan
        if below < meet <= above:
            moved.append(float(meet))
        elif more[0] + more[1] * start >= less[0] + less[1] * start:
            moved.append(start)
        else:
            return None
    return _Lines(tuple(moved), solved.factors, solved.error)


def _solved(samples: Sequence[Sample], starts: tuple[float, ...]) -> _Lines:
    durations = np.array([sample.duration_ns for sample in samples])
    table = _table(samples, starts)
    weights = _weights(samples)
    factors = _solve(table, durations, weights)
    error = float(np.square(weights * (table @ factors / durations - 1.0)).sum())
    return _Lines(starts, factors, error)


def _table(samples: Sequence[Sample], starts: Sequence[float]) -> Float64s:
    """Return each sample's factors: messages and bytes of each regime, bytes summed."""
    table = np.zeros((len(samples), 2 * len(starts) + 1))
    for row, sample in zip(table, samples, strict=True):
        for part, message in _parts(sample.operation):
            k = int(np.searchsorted(starts, message, side="right")) - 1
            row[2 * k : 2 * k + 2] += part[:2]
            row[-1] += part[2]
    return table


def _weights(samples: Sequence[Sample]) -> Float64s:
    """Return the weight of each sample's relative error: 1 if its median is exact.

    The standard error of the median of n normal variates is 0.93 times their interquartile range
    over the root of n.
    """
    unsure = []
    for sample in samples:
        low, high = np.percentile(sample.repeats_ns, (25, 75))
        unsure.append(0.93 * (high - low) / np.sqrt(len(sample.repeats_ns)) / sample.duration_ns)
    weights: Float64s = _MODEL_ERROR / np.hypot(_MODEL_ERROR, unsure)
    return weights


def _solve(table: Float64s, durations: Float64s, weights: Float64s) -> Float64s:
    scaled = table * (weights / durations)[:, None]
    scale = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    from scipy.optimize import nnls  # slow to import, and many callers do not fit

    factors: Float64s = nnls(scaled / scale, weights)[0] / scale
    return factors


def _check_monotone(samples: Sequence[Sample]) -> None:
    kinds = {(s.operation.kind, s.operation.ranks) for s in samples}
    for kind, ranks in sorted(kinds):
        line = sorted(
            (s for s in samples if (s.operation.kind, s.operation.ranks) == (kind, ranks)),
            key=lambda s: s.operation.nbytes,
        )
        longest = line[0]
        for sample in line:
            faster = sample.duration_ns < longest.duration_ns * (1.0 - _NOISE)
            # Latencies of small messages scatter: most repeats have to confirm it.
            if faster and np.percentile(sample.repeats_ns, 75) < np.percentile(
                longest.repeats_ns, 25
            ):
                raise ClusterError(
                    f"{kind} of {sample.operation.nbytes} bytes took {sample.duration_ns:.0f} ns, "
                    f"less than a smaller one's {longest.duration_ns:.0f} ns",
                    remedy="measure again on a quieter machine",
                )
            longest = max(longest, sample, key=lambda s: s.duration_ns)
