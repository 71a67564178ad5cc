"""Random streams and distributions that the generators share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Return independent generators from one seed; a larger `count` does not change the first ones.

    Raises:
        InvalidArgumentError: the seed is negative.
    """
    if seed < 0:
        raise InvalidArgumentError("seed", "must not be negative")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def power_law(size: int, exponent: float) -> NDArray[np.float64]:
    """Return probabilities [size] of ranks 0, 1, ... by Zipf's law, (rank + 1)^-exponent."""
    weights: NDArray[np.float64] = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def positive(**arguments: float) -> None:
    """Refuse every argument that is not greater than zero.

    Raises:
        InvalidArgumentError: an argument is not greater than zero.
    """
    for argument, value in arguments.items():
        # This form refuses NaN too.
        if not value > 0:
            raise InvalidArgumentError(argument, f"must be greater than 0, not {value}")
