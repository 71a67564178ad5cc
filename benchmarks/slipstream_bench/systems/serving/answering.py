"""Systems of known speed for load tests of a bench."""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def rows() -> tuple[Rows, NDArray[np.int64]]:
    """Return 64 samples of 8 numbers; the class is the sample's number modulo 4."""
    numbers = np.arange(64)
    x = (numbers[:, None] + np.arange(8)).astype(np.float32)
    return x, numbers % 4


def digits() -> tuple[Rows, NDArray[np.int64]]:
    """Return 256 handwritten digits of 1 x 8 x 8, and their labels."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    return (images[:256] / 16).reshape(-1, 1, 8, 8).astype(np.float32), classes[:256]


def anomalies() -> Rows:
    """Return 64 spectra of 640 numbers, inputs of an autoencoder for machine sounds."""
    return np.random.default_rng(0).standard_normal((64, 640)).astype(np.float32)


def scores(x: Rows) -> NDArray[np.float64]:
    """Return scores of four classes, immediately."""
    return np.asarray(np.eye(4)[x[:, 0].astype(int) % 4])


def timed(x: Rows) -> NDArray[np.float64]:
    """Take exactly ``$SERVICE_US`` per sample: sleep first, then spin."""
    until = time.perf_counter() + float(os.environ.get("SERVICE_US", "2000")) * 1e-6 * len(x)
    left = until - time.perf_counter() - 4e-4
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < until:
        pass
    return scores(x)
