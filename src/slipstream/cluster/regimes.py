"""What messages of different sizes cost: libraries and memories change their ways with size.

A library sends small messages eagerly and large ones after a handshake; what fits a cache passes
faster than what does not. One latency and one rate cannot follow that; a few of each can, every one
for the messages from some size on.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Regime:
    """Messages from a size on, up to where the next regime begins.

    Attributes:
        from_bytes: of the smallest message; 0 for the first regime.
        alpha_ns: start-up of one message in software.
        slowdown: how many times longer its bytes take than the links' capacities say; below 1
            where they pass faster.
    """

    from_bytes: float
    alpha_ns: float
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise InvalidArgumentError(
                    "regimes", f"{name} = {value} is not a finite number of at least 0"
                )


def check_regimes(regimes: Sequence[Regime]) -> None:
    """Raises InvalidArgumentError unless they begin at 0, and each above the one before."""
    starts = [one.from_bytes for one in regimes]
    if starts and starts[0] != 0.0:
        raise InvalidArgumentError(
            "regimes", f"begin at {starts[0]:g} bytes: smaller messages have no cost",
            remedy="from_bytes = 0 for the first",
        )  # fmt: skip
    for before, after in itertools.pairwise(starts):
        if after <= before:
            raise InvalidArgumentError(
                "regimes", f"one from {after:g} bytes on follows one from {before:g} bytes on",
                remedy="in order of size",
            )  # fmt: skip


def regime_of(regimes: Sequence[Regime], nbytes: float, message: float) -> Regime:
    """That of a collective's messages.

    Args:
        nbytes: of the collective.
        message: share of them that one message is.
    """
    # The size of the collective is compared, as the closed form does, so that both change at once.
    starts = [_of_collective(one, message) for one in regimes]
    return regimes[max(0, bisect.bisect_right(starts, nbytes) - 1)]


def starts_of(regimes: Sequence[Regime], message: float) -> list[float]:
    """Sizes of a collective from which its messages are in each regime."""
    return [_of_collective(one, message) for one in regimes]


def _of_collective(regime: Regime, message: float) -> float:
    return regime.from_bytes / message if message > 0.0 else math.inf * regime.from_bytes
