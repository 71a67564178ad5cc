"""Block streams with a known ratio and four kinds of noise, on which intervals are tested."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KINDS = ("lognormal", "bimodal", "drifting", "autocorrelated")
RATIO = 1.05
# Lag-1 autocorrelation of the autocorrelated stream.
CORRELATION = 0.5


def log_ratios(
    kind: str, blocks: int, streams: int, *, seed: int = 0
) -> tuple[NDArray[np.float64], float]:
    """Return log(t_B / t_A), float64 [streams, blocks], and the true log ratio.

    - ``lognormal``: machine speed and both arms vary lognormally (30 %, 10 %, 10 %).
    - ``bimodal``: 3 of 10 samples take 1.5 times as long (a neighbour, another frequency).
    - ``drifting``: the machine gets twice as slow over the run, and varies by 3 % per sample;
      the arms alternate, ABBA or BAAB.
    - ``autocorrelated``: the log ratio is an AR(1) process of 5 %.
    """
    rng = np.random.default_rng(seed)
    shape = (streams, blocks)
    truth = float(np.log(RATIO))
    if kind == "lognormal":
        return truth + rng.normal(0, 0.1, shape) - rng.normal(0, 0.1, shape), truth
    if kind == "bimodal":
        slow = np.log(1.5) * ((rng.random(shape) < 0.3) * 1.0 - (rng.random(shape) < 0.3))
        return truth + slow + rng.normal(0, 0.03, shape), truth
    if kind == "drifting":
        steps = rng.normal(0, 0.03, (streams, 2 * blocks))
        level = np.cumsum(steps, axis=1) + np.linspace(0, np.log(2), 2 * blocks)
        first = rng.random((streams, (blocks + 1) // 2)) < 0.5
        sign = np.where(np.stack([first, ~first], axis=2).reshape(streams, -1)[:, :blocks], 1, -1)
        between = sign * (level[:, 1::2] - level[:, 0::2])
        return truth + between + rng.normal(0, 0.04, shape), truth
    if kind == "autocorrelated":
        shocks = rng.normal(0, 0.05 * np.sqrt(1 - CORRELATION**2), (streams, blocks))
        stream = np.empty(shape)
        stream[:, 0] = rng.normal(0, 0.05, streams)
        for t in range(1, blocks):
            stream[:, t] = CORRELATION * stream[:, t - 1] + shocks[:, t]
        return truth + stream, truth
    raise ValueError(f"unknown stream '{kind}'")
