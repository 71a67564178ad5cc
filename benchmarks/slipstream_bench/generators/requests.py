"""Requests of several tenants to a server: Poisson, or bursts of a two-state process.

A bursty tenant alternates between a calm and a burst state of exponentially distributed lengths
(a Markov-modulated Poisson process). Its mean rate and the dispersion of its counts are known in
closed form (Fischer & Meier-Hellstern, "The Markov-modulated Poisson process cookbook",
Performance Evaluation 18, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams


@dataclass(frozen=True)
class Tenant:
    """A source of requests.

    Attributes:
        rate_per_s: mean requests per second, bursts included.
        burst_ratio: request rate in a burst over the rate in calm; 1 is a Poisson process.
        burst_share: share of the time spent in bursts.
        burst_s: mean length of a burst.
        size_median, size_sigma: median of request sizes and standard deviation of their logarithm;
            sizes are log-normal, rounded up to integers (tokens, items).
    """

    name: str
    rate_per_s: float
    burst_ratio: float = 1.0
    burst_share: float = 0.1
    burst_s: float = 1.0
    size_median: float = 1.0
    size_sigma: float = 0.0

    def __post_init__(self) -> None:
        positive(rate_per_s=self.rate_per_s, burst_s=self.burst_s, size_median=self.size_median)
        if not 0 < self.burst_share < 1:
            raise InvalidArgumentError("burst_share", "must be between 0 and 1")
        if not (self.burst_ratio >= 1 and math.isfinite(self.burst_ratio)):
            raise InvalidArgumentError("burst_ratio", "must be at least 1")
        if not self.size_sigma >= 0:
            raise InvalidArgumentError("size_sigma", "is negative")

    @property
    def calm_rate_per_s(self) -> float:
        """Requests per second outside bursts."""
        return self.rate_per_s / (1 + self.burst_share * (self.burst_ratio - 1))

    @property
    def calm_s(self) -> float:
        """Mean time between two bursts."""
        return self.burst_s * (1 - self.burst_share) / self.burst_share

    def dispersion(self, window_s: float) -> float:
        """Return variance over mean of the request count in a window; 1 for a Poisson process."""
        positive(window_s=window_s)
        burst_rate = self.calm_rate_per_s * self.burst_ratio
        switching = 1 / self.burst_s + 1 / self.calm_s
        variance = (
            self.burst_share * (1 - self.burst_share) * (burst_rate - self.calm_rate_per_s) ** 2
        )
        product = switching * window_s
        # The rate's autocovariance decays as exp(-switching * t); integrated twice.
        return 1 + 2 * variance / (self.rate_per_s * switching) * (
            1 + math.expm1(-product) / product
        )


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of arrival.

    Attributes:
        times_s: float64 [N], seconds from the start, ascending.
        tenants: int64 [N], indices into `sources`.
        sizes: int64 [N], at least 1.
        sources: the tenants with their true rates and dispersions.
    """

    times_s: NDArray[np.float64]
    tenants: NDArray[np.int64]
    sizes: NDArray[np.int64]
    sources: tuple[Tenant, ...]
    duration_s: float

    def __len__(self) -> int:
        return len(self.times_s)


def request_trace(sources: Sequence[Tenant], duration_s: float, *, seed: int = 0) -> RequestTrace:
    """Draw the requests of all tenants, each from a separate random stream.

    Every tenant starts in the stationary distribution of its states, so no warm-up is needed.

    Raises:
        InvalidArgumentError: there are no tenants, or the duration is not positive.
    """
    positive(duration_s=duration_s)
    if not sources:
        raise InvalidArgumentError("sources", "must have at least one tenant")
    times = []
    sizes = []
    for tenant, generator in zip(sources, streams(seed, len(sources)), strict=True):
        arrivals = _arrivals(tenant, duration_s, generator)
        logarithms = generator.normal(
            math.log(tenant.size_median), tenant.size_sigma, len(arrivals)
        )
        times.append(arrivals)
        # Rounding errors must not turn an integer into the next one.
        sizes.append(np.maximum(1, np.ceil(np.exp(logarithms) - 1e-9)).astype(np.int64))
    owner = np.repeat(np.arange(len(sources)), [len(arrivals) for arrivals in times])
    merged = np.concatenate(times)
    order = np.argsort(merged, kind="stable")
    return RequestTrace(
        merged[order], owner[order], np.concatenate(sizes)[order], tuple(sources), duration_s
    )


def _arrivals(
    tenant: Tenant, duration_s: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    bursting = bool(generator.random() < tenant.burst_share)
    if tenant.burst_ratio == 1:
        count = generator.poisson(tenant.rate_per_s * duration_s)
        return np.sort(generator.uniform(0, duration_s, count))
    parts = []
    now = 0.0
    while now < duration_s:
        length = generator.exponential(tenant.burst_s if bursting else tenant.calm_s)
        end = min(now + length, duration_s)
        rate = tenant.calm_rate_per_s * (tenant.burst_ratio if bursting else 1)
        # Given their number, the arrivals of a Poisson process are uniform.
        parts.append(np.sort(generator.uniform(now, end, generator.poisson(rate * (end - now)))))
        now = end
        bursting = not bursting
    return np.concatenate(parts)
