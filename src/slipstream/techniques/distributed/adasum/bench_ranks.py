"""Real ranks that exchange the same buffer by turns: Adasum, and torch's all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.cluster import Netlab
from slipstream.cluster.measuring import Rank, run_ranks

_MODULE = "slipstream.techniques.distributed.adasum._bench_rank"
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Turns:
    """What ranks took.

    Attributes:
        times_s: of (Adasum, all-reduce), turn by turn, of the slowest rank.
    """

    times_s: list[tuple[float, float]]

    @property
    def ratios(self) -> list[float]:
        """Adasum's time over the all-reduce's."""
        return [ours / theirs for ours, theirs in self.times_s]


def paired_times(
    size: int, numbers: int, layers: int, repeats: int, *, bytes_per_s: float = 0.0
) -> Turns:
    """Turns of `size` ranks, float32 [numbers].

    Args:
        bytes_per_s: of the cables of a network lab; 0: through this machine's memory.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {
        "numbers": numbers, "layers": layers, "repeats": repeats, "algorithm": "auto", "dtypes": [],
    }  # fmt: skip
    if not bytes_per_s:
        answers = run_ranks([Rank()] * size, _MODULE, asked, limit_s=_LIMIT_S)
        found = [one["found"] for one in answers]
    else:
        with Netlab(size, bytes_per_s) as lab:
            found = lab.ask(_MODULE, asked, limit_s=_LIMIT_S)
    slowest = np.max([one["times_s"] for one in found], axis=0)
    return Turns([(float(a), float(b)) for a, b in slowest])


def memory(
    size: int, numbers: int, layers: int, algorithm: str, dtypes: Sequence[str]
) -> dict[str, float]:
    """Memory of an exchange besides its buffer, in the buffer's size, of the rank with the most.

    By dtype of the buffer, which has so many numbers.

    Raises:
        ClusterError: a rank failed; the others are ended.
    """
    asked = {
        "numbers": numbers, "layers": layers, "algorithm": algorithm, "dtypes": list(dtypes),
    }  # fmt: skip
    found = [one["found"] for one in run_ranks([Rank()] * size, _MODULE, asked, limit_s=_LIMIT_S)]
    return {name: max(one[name] for one in found) for name in dtypes}
