"""Random streams and laws the generators share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Independent generators from one seed: asking one for more never changes the others.

    Raises:
        InvalidArgumentError: a negative seed.
    """
    if seed < 0:
        raise InvalidArgumentError("seed", "must not be negative")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def power_law(size: int, exponent: float) -> NDArray[np.float64]:
    """Probabilities [size] of ranks 0, 1, ...: proportional to (rank + 1)^-exponent (Zipf)."""
    weights: NDArray[np.float64] = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def positive(**arguments: float) -> None:
    """Refuse every argument that is not greater than zero.

    Raises:
        InvalidArgumentError: names the argument.
    """
    for argument, value in arguments.items():
        # Written so that a NaN is refused as well.
        if not value > 0:
            raise InvalidArgumentError(argument, f"must be greater than 0, not {value}")
