"""Real ranks that exchange the same buffer by turns, one way and another; and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.ranks import Netlab
from slipstream.ranks.launch import Rank, run_ranks

_MODULE = "slipstream_bench.systems.adasum.rank"
_LIMIT_S = 600.0


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
    asked = {"what": "beside", "numbers": numbers, "layers": layers, "repeats": repeats}
    return _turns(size, asked, bytes_per_s)


def of_layers(size: int, numbers: int, layers: tuple[int, int], repeats: int) -> Turns:
    """Adasum of the same numbers in so many layers, and in as many others.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"what": "layers", "numbers": numbers, "layers": list(layers), "repeats": repeats}
    return _turns(size, asked, 0.0)


def memory(
    size: int, numbers: int, layers: int, algorithm: str, dtypes: Sequence[str]
) -> dict[str, float]:
    """Memory of an exchange besides its buffer, in the buffer's size, of the rank with the most.

    By dtype of the buffer, which has so many numbers.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    return _most(
        size,
        {
            "what": "memory", "numbers": numbers, "layers": layers, "algorithm": algorithm,
            "dtypes": list(dtypes),
        },
    )  # fmt: skip


def memory_of_a_step(size: int, numbers: int, layers: int, algorithm: str) -> dict[str, float]:
    """Memory of a step of `AdasumOptimizer` besides what SGD has, in the gradients' size.

    By SGD's momentum; float32, of the rank with the most.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {"what": "steps", "numbers": numbers, "layers": layers, "algorithm": algorithm}
    return _most(size, asked)


def _turns(size: int, asked: dict[str, Any], bytes_per_s: float) -> Turns:
    asked["algorithm"] = "auto"
    if bytes_per_s:
        with Netlab(size, bytes_per_s) as lab:
            found = lab.ask(_MODULE, asked, limit_s=_LIMIT_S)
    else:
        found = _ask(size, asked)
    slowest = np.max([one["times_s"] for one in found], axis=0)
    return Turns([(float(a), float(b)) for a, b in slowest])


def _most(size: int, asked: dict[str, Any]) -> dict[str, float]:
    found = _ask(size, asked)
    return {name: max(one[name] for one in found) for name in found[0]}


def _ask(size: int, asked: dict[str, Any]) -> list[Any]:
    answers = run_ranks([Rank()] * size, _MODULE, asked, limit_s=_LIMIT_S)
    return [one["found"] for one in answers]
