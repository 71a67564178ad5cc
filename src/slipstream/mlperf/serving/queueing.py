"""A queue in front of workers that batch, simulated: p50, p99 and the highest rate, foreseen.

Arrivals are Poisson, as the Server scenario's. When a worker is free it takes what waits by the
policy of `slipstream.runtimes.batching`; a batch of b takes the time that the service curve gives.
Event by event, since a batch is formed by what waits at that instant; the time simulated is none
of the processor's, so that a minute of a server takes milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.batching import BatchPolicy

Floats = NDArray[np.float64]
_QUERIES = 20_000
_SEED = 20_191_106
# Share of the time above which a worker is taken to have no pause left.
_FULLY_BUSY = 0.995
# Of the peak search: relative width at which it ends.
_PEAK_WIDTH = 0.005


@dataclass(frozen=True)
class ServiceCurve:
    """How long a batch takes, by its size; between sizes linear, beyond the last proportional.

    Attributes:
        times_ns: nanoseconds by batch size: their median, or all that were measured.
        delay_ns: from a query's arrival until a worker that waits for it begins.
    """

    times_ns: Mapping[int, tuple[float, ...]]
    delay_ns: float = 0.0

    @classmethod
    def of(cls, medians: Mapping[int, float]) -> ServiceCurve:
        """A curve of one time a size."""
        return cls({size: (time,) for size, time in sorted(medians.items())})

    def median_ns(self, batch: int) -> float:
        """Of a batch of that size."""
        sizes = sorted(self.times_ns)
        medians = [float(np.median(self.times_ns[size])) for size in sizes]
        if batch > sizes[-1]:
            return medians[-1] * batch / sizes[-1]
        return float(np.interp(batch, sizes, medians))

    def as_served(self, batches: Sequence[tuple[int, float]], delay_ns: float) -> ServiceCurve:
        """This curve of the model alone, with what a server adds to a batch and to a query of it.

        Args:
            batches: (size, nanoseconds) as a server under load had them; their spread is taken.
            delay_ns: as the attribute.
        """
        from scipy.optimize import nnls

        counts, took = np.array(batches, float).T
        sizes, number = np.unique(counts, return_counts=True)
        added = [np.median(took[counts == n]) - self.median_ns(int(n)) for n in sizes]
        weights = np.sqrt(number)
        (batch_ns, query_ns), _ = nnls(
            np.stack([weights, weights * sizes], 1), weights * np.array(added)
        )
        whole = {n: self.median_ns(n) + batch_ns + n * query_ns for n in self.times_ns}
        curve = ServiceCurve.of(whole)
        ratios = took / [curve.median_ns(int(n)) for n in counts]
        return ServiceCurve(
            {n: tuple(time * ratios / np.median(ratios)) for n, time in whole.items()}, delay_ns
        )

    def spread(self) -> Floats:
        """Measured times over their size's median: what one call differs by."""
        ratios = [np.asarray(times) / np.median(times) for times in self.times_ns.values()]
        return np.concatenate(ratios)

    @property
    def disturbance(self) -> float:
        """Mean of calls' times over their median: 1 on a quiet machine, more if interrupted."""
        return float(self.spread().mean())

    def capacity(self, policy: BatchPolicy, workers: int = 1) -> float:
        """Queries a second that can be served at most, batches as full as the policy allows."""
        best = max(n / self.median_ns(n) for n in range(1, policy.maximum + 1))
        return 1e9 * best * workers


@dataclass(frozen=True)
class Load:
    """What a rate does to a server.

    Attributes:
        rate: queries a second.
        latencies_ns: sorted, float64 [queries], from arrival to answer.
        mean_batch: queries a batch.
        busy: share of the time that a worker computes.
    """

    rate: float
    latencies_ns: Floats
    mean_batch: float
    busy: float

    @property
    def keeps_up(self) -> bool:
        """Whether queries are answered as fast as they arrive; if not, latencies keep growing."""
        return self.busy < _FULLY_BUSY

    def percentile_ns(self, share: float) -> float:
        """The latency that this share of queries does not exceed."""
        return float(np.quantile(self.latencies_ns, share))

    @property
    def mean_ns(self) -> float:
        return float(self.latencies_ns.mean())


def simulate(
    curve: ServiceCurve,
    rate: float,
    policy: BatchPolicy | None = None,
    *,
    workers: int = 1,
    queries: int = _QUERIES,
    overhead_ns: float = 0.0,
    seed: int = _SEED,
) -> Load:
    """Latencies of queries that arrive at `rate`.

    Args:
        workers: that answer batches independently of each other.
        overhead_ns: of each batch, on top of the curve.
        seed: of arrivals and of the times drawn from what was measured.

    Raises:
        InvalidArgumentError: no rate, no queries or no worker.
    """
    for name, value in (("rate", rate), ("queries", queries), ("workers", workers)):
        if value <= 0:
            raise InvalidArgumentError(name, f"{value} is not above zero")
    policy = policy or BatchPolicy()
    random = np.random.default_rng(seed)
    arrivals: list[float] = np.cumsum(random.exponential(1e9 / rate, queries)).tolist()
    drawn: list[float] = random.choice(curve.spread(), queries).tolist()
    medians = [0.0, *(curve.median_ns(n) + overhead_ns for n in range(1, policy.maximum + 1))]
    latencies = np.empty(queries)
    free = [0.0] * workers
    at = batches = 0
    busy = 0.0
    while at < queries:
        ready = heapq.heappop(free)
        start, end = _batch(arrivals, at, ready, policy)
        took = medians[end - at] * drawn[batches]
        for query in range(at, end):
            latencies[query] = start + took - arrivals[query] + curve.delay_ns
        heapq.heappush(free, start + took)
        busy += took
        batches += 1
        at = end
    span = max(max(free), arrivals[-1])
    return Load(rate, np.sort(latencies), queries / batches, busy / span / workers)


def _batch(arrivals: list[float], at: int, ready: float, policy: BatchPolicy) -> tuple[float, int]:
    """When a worker that is `ready` starts on the query `at` and those it takes along."""
    start = max(ready, arrivals[at])
    due = max(start, arrivals[at] + policy.delay_ns)
    end, last = at + 1, min(len(arrivals), at + policy.maximum)
    while end < last and arrivals[end] <= due:
        start = max(start, arrivals[end])
        end += 1
    return (start if end - at == policy.maximum else due), end


def peak(
    curve: ServiceCurve,
    bound_ns: float,
    percentile: float,
    policy: BatchPolicy | None = None,
    *,
    workers: int = 1,
    overhead_ns: float = 0.0,
    simulated: Callable[..., Load] = simulate,
) -> float:
    """The highest rate whose percentile stays within the bound; 0 where none does.

    The same arrivals are stretched for every rate, so that more load never looks like less.
    """
    policy = policy or BatchPolicy()

    def fits(rate: float) -> bool:
        load = simulated(curve, rate, policy, workers=workers, overhead_ns=overhead_ns)
        return load.percentile_ns(percentile) <= bound_ns

    high = curve.capacity(policy, workers)
    low = high
    while not fits(low):
        high, low = low, low / 2
        if low < high and 1e9 / low > 1e4 * bound_ns:
            return 0.0
    while high / low > 1 + _PEAK_WIDTH:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
