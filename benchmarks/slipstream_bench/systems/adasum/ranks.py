"""Real ranks that exchange the same buffer by turns, one way and another; and their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.ranks import Netlab
from slipstream_bench.lab import on_ranks
from slipstream_bench.systems.adasum import rank

_LIMIT_S, _TIMEOUT_S = 600.0, 300.0


@dataclass(frozen=True)
class Turns:
    """What ranks took.

    Attributes:
        times_s: of one exchange and another, turn by turn, of the slowest rank.
    """

    times_s: list[tuple[float, float]]

    @property
    def ratios(self) -> list[float]:
        """The one's time over the other's."""
        return [one / other for one, other in self.times_s]


def beside_all_reduce(
    size: int, numbers: int, layers: int, repeats: int, *, bytes_per_s: float = 0.0
) -> Turns:
    """Adasum, and torch's all-reduce, of `size` ranks, float32 [numbers].

    Args:
        bytes_per_s: of the cables of a network lab; 0: through this machine's memory.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"numbers": numbers, "layers": layers, "repeats": repeats}
    if not bytes_per_s:
        return _turns(_ask(size, rank.beside_all_reduce, asked))
    with Netlab(size, bytes_per_s) as cables:
        return _turns(_ask(cables, rank.beside_all_reduce, asked))


def of_layers(size: int, numbers: int, layers: tuple[int, int], repeats: int) -> Turns:
    """Adasum of the same numbers in so many layers, and in as many others.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"numbers": numbers, "layers": list(layers), "repeats": repeats}
    return _turns(_ask(size, rank.of_layers, asked))


def memory(
    size: int, numbers: int, layers: int, algorithm: str, dtypes: Sequence[str]
) -> dict[str, float]:
    """Memory of an exchange besides its buffer, in the buffer's size, of the rank with the most.

    By dtype of the buffer, which has so many numbers.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"numbers": numbers, "layers": layers, "algorithm": algorithm, "dtypes": list(dtypes)}
    return _most(_ask(size, rank.memory, asked))


def memory_of_a_step(size: int, numbers: int, layers: int, algorithm: str) -> dict[str, float]:
    """Memory of a step of `AdasumOptimizer` besides what SGD has, in the gradients' size.

    By SGD's momentum; float32, of the rank with the most.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"numbers": numbers, "layers": layers, "algorithm": algorithm}
    return _most(_ask(size, rank.memory_of_a_step, asked))


def _ask(where: Netlab | int, function: Callable[..., Any], asked: dict[str, Any]) -> list[Any]:
    return on_ranks(where, function, limit_s=_LIMIT_S, timeout_s=_TIMEOUT_S, **asked)


def _turns(times_s: list[Any]) -> Turns:
    return Turns([(float(a), float(b)) for a, b in np.max(times_s, axis=0)])


def _most(of_ranks: list[Any]) -> dict[str, float]:
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}
