"""Costs of messages by size, since libraries and memories treat sizes differently.

A library sends small messages eagerly and large ones after a handshake; messages that fit a cache
are faster than others. One latency and one rate cannot describe that; one pair per range of sizes
can.
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
    """Cost of messages from a size to that of the next regime.

    Attributes:
        from_bytes: size of the smallest message; 0 for the first regime.
        alpha_ns: software latency of one message.
        slowdown: time per byte relative to the links' capacities; below 1 if messages are faster.
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
    """Raise InvalidArgumentError unless they begin at 0 and ascend."""
    starts = [regime.from_bytes for regime in regimes]
    if starts and starts[0] != 0.0:
        raise InvalidArgumentError(
            "regimes", f"begin at {starts[0]:g} bytes: smaller messages have no cost",
            remedy="set from_bytes = 0 for the first",
        )  # fmt: skip
    for before, after in itertools.pairwise(starts):
        if after <= before:
            raise InvalidArgumentError(
                "regimes", f"the regime from {after:g} bytes follows that from {before:g} bytes",
                remedy="list them in order of size",
            )  # fmt: skip


def regime_of(regimes: Sequence[Regime], nbytes: float, message: float) -> Regime:
    """Return the regime of a collective's messages.

    Args:
        nbytes: size of the collective.
        message: share of it in one message.
    """
    # The size of the collective is compared, as in the closed form, so that both change together.
    starts = [_of_collective(regime, message) for regime in regimes]
    return regimes[max(0, bisect.bisect_right(starts, nbytes) - 1)]


def starts_of(regimes: Sequence[Regime], message: float) -> list[float]:
    """Return the sizes of a collective from which its messages are in each regime."""
    return [_of_collective(regime, message) for regime in regimes]


def _of_collective(regime: Regime, message: float) -> float:
    return regime.from_bytes / message if message > 0.0 else math.inf * regime.from_bytes
