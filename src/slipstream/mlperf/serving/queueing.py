"""Simulate a queue in front of batching workers, to predict p50, p99 and the peak rate.

Arrivals are Poisson, like the Server scenario's. A free worker takes waiting queries by the policy
of `slipstream.runtimes.batching`; the service curve gives the time of its batch. The simulation is
event-driven, because a batch depends on the queries that wait at that instant.
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
# Utilization from which the queue counts as overloaded.
_FULLY_BUSY = 0.995
# Relative width of the bracket at which the peak search ends.
_PEAK_WIDTH = 0.005


@dataclass(frozen=True)
class ServiceCurve:
    """Time of a batch by its size, linear between sizes and proportional beyond the largest.

    Attributes:
        times_ns: measured times in ns, or their median, by batch size.
        delay_ns: time from a query's arrival until an idle worker starts on it.
    """

    times_ns: Mapping[int, tuple[float, ...]]
    delay_ns: float = 0.0

    @classmethod
    def of(cls, medians: Mapping[int, float]) -> ServiceCurve:
        """Build a curve with one time per size."""
        return cls({size: (time,) for size, time in sorted(medians.items())})

    def median_ns(self, batch: int) -> float:
        """Return the median time of a batch of that size."""
        sizes = sorted(self.times_ns)
        medians = [float(np.median(self.times_ns[size])) for size in sizes]
        if batch > sizes[-1]:
            return medians[-1] * batch / sizes[-1]
        return float(np.interp(batch, sizes, medians))

    def as_served(self, batches: Sequence[tuple[int, float]], delay_ns: float) -> ServiceCurve:
        """Add a server's overhead per batch and per query to this curve of the model alone.

        Args:
            batches: (size, ns) of a server under load; the result has their spread.
            delay_ns: see the attribute.
        """
        from scipy.optimize import nnls

        counts, served_ns = np.array(batches, float).T
        sizes, number = np.unique(counts, return_counts=True)
        added = [np.median(served_ns[counts == n]) - self.median_ns(int(n)) for n in sizes]
        weights = np.sqrt(number)
        (batch_ns, query_ns), _ = nnls(
            np.stack([weights, weights * sizes], 1), weights * np.array(added)
        )
        whole = {n: self.median_ns(n) + batch_ns + n * query_ns for n in self.times_ns}
        curve = ServiceCurve.of(whole)
        ratios = served_ns / [curve.median_ns(int(n)) for n in counts]
        return ServiceCurve(
            {n: tuple(time * ratios / np.median(ratios)) for n, time in whole.items()}, delay_ns
        )

    def spread(self) -> Floats:
        """Return all measured times over the median of their size, float64 [times]."""
        ratios = [np.asarray(times) / np.median(times) for times in self.times_ns.values()]
        return np.concatenate(ratios)

    @property
    def disturbance(self) -> float:
        """Mean of `spread`: 1 on a quiet machine, more if other programs interrupted calls."""
        return float(self.spread().mean())

    def capacity(self, policy: BatchPolicy, workers: int = 1) -> float:
        """Return the maximum throughput in queries/s, over batch sizes that the policy allows."""
        best = max(n / self.median_ns(n) for n in range(1, policy.maximum + 1))
        return 1e9 * best * workers


@dataclass(frozen=True)
class Load:
    """The simulated load of a server.

    Attributes:
        rate: arrival rate in queries/s.
        latencies_ns: latencies from arrival to answer, sorted, float64 [queries].
        mean_batch: mean queries per batch.
        busy: utilization of a worker, 0 to 1.
    """

    rate: float
    latencies_ns: Floats
    mean_batch: float
    busy: float

    @property
    def keeps_up(self) -> bool:
        """Whether queries are answered as fast as they arrive; otherwise latencies keep growing."""
        return self.busy < _FULLY_BUSY

    def percentile_ns(self, share: float) -> float:
        """Return the latency that a `share` of queries does not exceed."""
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
    """Simulate queries that arrive at `rate` per second.

    Args:
        workers: number of workers that answer batches independently.
        overhead_ns: time per batch in addition to the curve.
        seed: seed of arrivals and of the resampled service times.

    Raises:
        InvalidArgumentError: `rate`, `queries` or `workers` is not above zero.
    """
    for name, value in (("rate", rate), ("queries", queries), ("workers", workers)):
        if value <= 0:
            raise InvalidArgumentError(name, f"{value} is not above zero")
    policy = policy or BatchPolicy()
    random = np.random.default_rng(seed)
    arrivals: list[float] = np.cumsum(random.exponential(1e9 / rate, queries)).tolist()
    spread: list[float] = random.choice(curve.spread(), queries).tolist()
    medians = [0.0, *(curve.median_ns(n) + overhead_ns for n in range(1, policy.maximum + 1))]
    latencies = np.empty(queries)
    free = [0.0] * workers
    at = batches = 0
    busy = 0.0
    while at < queries:
        ready = heapq.heappop(free)
        start, end = _batch(arrivals, at, ready, policy)
        batch_ns = medians[end - at] * spread[batches]
        for query in range(at, end):
            latencies[query] = start + batch_ns - arrivals[query] + curve.delay_ns
        heapq.heappush(free, start + batch_ns)
        busy += batch_ns
        batches += 1
        at = end
    span = max(max(free), arrivals[-1])
    return Load(rate, np.sort(latencies), queries / batches, busy / span / workers)


def _batch(arrivals: list[float], at: int, ready: float, policy: BatchPolicy) -> tuple[float, int]:
    """Return when a worker that is free at `ready` starts, and the end of its batch from `at`."""
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
    """Find the highest rate whose percentile stays within the bound; 0 if there is none.

    All rates scale the same arrivals, so that latencies grow monotonically with the rate.
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
