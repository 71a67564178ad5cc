"""Find the largest batch under a memory limit by running it.

Lines through smaller sizes are off by some ten percent near the limit, partly systematically:
fragmentation jumps when a tensor outgrows an allocator's bin, so a larger batch may fit where a
smaller one does not. The size that the lines predict is run, and the outcome determines the next
one: by the secant through sizes that ran, between one that ran and one that did not.

One size needs a few percent more memory in some processes than in others. The tries themselves
estimate this spread, and a size counts as fitting only if it would fit again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

# Relative gap between the largest size that ran and the smallest that did not.
_WITHIN = 0.03
# Memory is not monotone in the batch: finally, these multiples are tried, too.
_FINAL_FACTORS = (1.1, 1.5)
# A try is at most this many times as large as the largest that ran.
_MAX_GROWTH = 2.0
# Sizes for a secant are this far apart, since memory jumps between neighbouring sizes.
_SECANT_RATIO = 0.8


# Margin in standard deviations: three more processes stay below it in 8 of 10 cases. A larger one
# would give up a tenth more of the samples.
_MARGIN_SDS = 1.5


@dataclass(frozen=True)
class Try:
    """A batch that several processes ran under the limit.

    Attributes:
        process_bytes: peak private memory over the processes; 0 if one of them did not fit.
        room: whether the expected need of further processes is below the limit, too.
    """

    samples: int
    process_bytes: int
    room: bool = True

    @property
    def ran(self) -> bool:
        return self.process_bytes > 0 and self.room


class Tries:
    """Sizes that were run, and the memory of each process.

    Args:
        sampled: bytes by size, of one process each, that ran under the limit before.
        limit_bytes: memory limit of a process.
    """

    def __init__(self, sampled: Mapping[int, int], limit_bytes: int) -> None:
        self._sampled = sampled
        self._limit_bytes = limit_bytes
        self._needs: dict[int, Sequence[int]] = {}
        self._runs: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._runs.total()

    def add(self, samples: int, needs: Sequence[int]) -> None:
        """Add the bytes that processes needed for `samples`; empty if one did not fit."""
        before = self._needs.get(samples, ())
        self._needs[samples] = [*before, *needs] if needs else []
        self._runs[samples] += 1

    @property
    def spread(self) -> float:
        """Relative standard deviation between processes of one size, over all sizes."""
        squares, free = 0.0, 0
        for needs in filter(None, self._needs.values()):
            squares += sum((need / fmean(needs) - 1) ** 2 for need in needs)
            free += len(needs) - 1
        return math.sqrt(squares / free) if free else 0.0

    def next_size(self, quantum: int) -> int | None:
        """Return `next_size` of the tries so far; the largest runs twice, against chance."""
        sure = {
            **self._sampled,
            **{size: self._sure_bytes(needs) for size, needs in self._needs.items() if needs},
        }
        ran = {samples: needs for samples, needs in sure.items() if needs <= self._limit_bytes}
        failed = [samples for samples in self._needs if samples not in ran]
        size = next_size(ran, failed, self._limit_bytes, quantum)
        return max(ran) if size is None and self._runs[max(ran)] == 1 else size

    def judged(self) -> list[Try]:
        """Return the largest size that was known before, then all tries in order."""
        largest = max(self._sampled)
        tries = [Try(largest, self._sampled[largest])]
        for samples, needs in self._needs.items():
            room = not needs or self._sure_bytes(needs) <= self._limit_bytes
            tries.append(Try(samples, max(needs, default=0), room))
        return tries

    def _sure_bytes(self, needs: Sequence[int]) -> int:
        return round(max(max(needs), fmean(needs) * (1 + _MARGIN_SDS * self.spread)))


def next_size(
    ran: Mapping[int, int], failed: Collection[int], limit_bytes: int, quantum: int
) -> int | None:
    """Return the size to run next.

    None once the largest that runs is known to 3 %, and 1.1 and 1.5 times it do not run.

    Args:
        ran: bytes by size; at least one.
        failed: sizes that did not run.
        limit_bytes: memory limit of a process.
        quantum: sizes are multiples of it.
    """
    low = max(ran)
    above = [size for size in failed if size > low]
    high = min(above, default=None)
    if high is None:
        target = min(max(_secant(ran, limit_bytes), low * (1 + _WITHIN)), low * _MAX_GROWTH)
    elif high <= low * (1 + _WITHIN) or high - low <= quantum:
        for factor in _FINAL_FACTORS:
            larger = math.ceil(factor * low / quantum) * quantum
            if not any(abs(size / larger - 1) < _WITHIN for size in above):
                return larger
        return None
    else:
        target = _between(low, high, _secant(ran, limit_bytes), len(above))
    size = max(int(target) // quantum, low // quantum + 1) * quantum
    return size if high is None else min(size, high - quantum)


def _between(low: int, high: int, line: float, failures: int) -> float:
    """Choose a size between `low`, which ran, and `high`; a line meets the limit at `line`."""
    middle = math.sqrt(low * high)
    if line >= high:
        # The line is wrong, usually by little: go down in growing steps.
        return max(high * (1 - _WITHIN * 2.0 ** (failures - 1)), middle)
    # The next try narrows the gap, whatever its outcome.
    nearest = low * (1 + _WITHIN)
    return min(max(line, nearest), max(high / (1 + _WITHIN), nearest))


def _secant(ran: Mapping[int, int], limit_bytes: int) -> float:
    low = max(ran)
    far = max((size for size in ran if size <= _SECANT_RATIO * low), default=min(ran))
    slope = (ran[low] - ran[far]) / (low - far) if far < low else 0.0
    if slope <= 0:
        slope = ran[low] / low
    return low + max(limit_bytes - ran[low], 0) / slope
