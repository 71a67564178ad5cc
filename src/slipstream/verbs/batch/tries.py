"""The largest batch under a memory limit, found by running it.

Lines through smaller sizes are some ten percent off there, and not only by chance: what an
allocator cannot use again jumps where a tensor outgrows a bin of it, so that a larger batch may fit
where a smaller one does not. So the size that lines predict is run, and what becomes of it says
which to run next: by the secant through sizes that ran, between one that ran and one that did not.

One size needs some percent more memory in one process than in the next. By how much they differ is
learned from the tries themselves, and a size counts as one that runs where it would run again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

# Between the largest that ran and the least that did not, relative.
_WITHIN = 0.03
# Memory is not monotone in the batch: so many times larger ones are tried in the end, too.
_BEYOND = (1.1, 1.5)
# A try is at most so many times as large as what ran.
_FARTHEST = 2.0
# Two sizes that tell a slope are this far apart: heaps jump between neighbours.
_APART = 0.8


# Of three more processes all stay below so many standard deviations eight times in ten. More
# would leave so much room that a tenth more of the samples runs, too.
_SURE = 1.5


@dataclass(frozen=True)
class Try:
    """A batch of that many samples was run under the limit, by several processes.

    Attributes:
        process_bytes: the most private memory of one of them; 0 where it did not fit into each.
        room: whether what other processes would need is below the limit, too.
    """

    samples: int
    process_bytes: int
    room: bool = True

    @property
    def ran(self) -> bool:
        """Whether its steps ran, and would run again."""
        return self.process_bytes > 0 and self.room


class Tries:
    """Sizes that were run, and what each process needed.

    Args:
        known: bytes by size, of one process each, that ran under the limit before.
        limit_bytes: what a process may have.
    """

    def __init__(self, known: Mapping[int, int], limit_bytes: int) -> None:
        self._known = known
        self._limit_bytes = limit_bytes
        self._needs: dict[int, Sequence[int]] = {}
        self._runs: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._runs.total()

    def add(self, samples: int, needs: Sequence[int]) -> None:
        """What processes needed for `samples`; nothing where it did not fit into each."""
        before = self._needs.get(samples, ())
        self._needs[samples] = [*before, *needs] if needs else []
        self._runs[samples] += 1

    @property
    def spread(self) -> float:
        """What processes of one size differ by: a standard deviation, relative, over all sizes."""
        squares, free = 0.0, 0
        for needs in filter(None, self._needs.values()):
            squares += sum((one / fmean(needs) - 1) ** 2 for one in needs)
            free += len(needs) - 1
        return math.sqrt(squares / free) if free else 0.0

    def next_size(self, quantum: int) -> int | None:
        """As `next_size`, of what is known by now; the largest is run twice, as luck chose it."""
        sure = {
            **self._known,
            **{size: self._sure_bytes(needs) for size, needs in self._needs.items() if needs},
        }
        ran = {samples: needs for samples, needs in sure.items() if needs <= self._limit_bytes}
        failed = [samples for samples in self._needs if samples not in ran]
        size = next_size(ran, failed, self._limit_bytes, quantum)
        return max(ran) if size is None and self._runs[max(ran)] == 1 else size

    def judged(self) -> list[Try]:
        """The largest that was known, and then all in their order."""
        largest = max(self._known)
        tries = [Try(largest, self._known[largest])]
        for samples, needs in self._needs.items():
            room = not needs or self._sure_bytes(needs) <= self._limit_bytes
            tries.append(Try(samples, max(needs, default=0), room))
        return tries

    def _sure_bytes(self, needs: Sequence[int]) -> int:
        """What hardly any process of that size exceeds."""
        return round(max(max(needs), fmean(needs) * (1 + _SURE * self.spread)))


def next_size(
    ran: Mapping[int, int], failed: Collection[int], limit_bytes: int, quantum: int
) -> int | None:
    """Which size to run after those that ran and those that did not.

    None once the largest that runs is known to 3 %, and 1.1 and 1.5 times it do not run.

    Args:
        ran: bytes by size; one at least.
        limit_bytes: what a process may have.
        quantum: sizes are multiples of it.
    """
    low = max(ran)
    above = [size for size in failed if size > low]
    high = min(above, default=None)
    if high is None:
        wanted = min(max(_secant(ran, limit_bytes), low * (1 + _WITHIN)), low * _FARTHEST)
    elif high <= low * (1 + _WITHIN) or high - low <= quantum:
        for factor in _BEYOND:
            larger = math.ceil(factor * low / quantum) * quantum
            if not any(abs(size / larger - 1) < _WITHIN for size in above):
                return larger
        return None
    else:
        wanted = _between(low, high, _secant(ran, limit_bytes), len(above))
    size = max(int(wanted) // quantum, low // quantum + 1) * quantum
    return size if high is None else min(size, high - quantum)


def _between(low: int, high: int, line: float, failures: int) -> float:
    """Between one that ran and one that did not, where a line meets the limit at `line`."""
    middle = math.sqrt(low * high)
    if line >= high:
        # The line is wrong, and by little as a rule: down in steps that grow.
        return max(high * (1 - _WITHIN * 2.0 ** (failures - 1)), middle)
    # So that the next try, whatever becomes of it, makes the gap less.
    nearest = low * (1 + _WITHIN)
    return min(max(line, nearest), max(high / (1 + _WITHIN), nearest))


def _secant(ran: Mapping[int, int], limit_bytes: int) -> float:
    """Where the line through two sizes that ran meets the limit."""
    low = max(ran)
    far = max((size for size in ran if size <= _APART * low), default=min(ran))
    slope = (ran[low] - ran[far]) / (low - far) if far < low else 0.0
    if slope <= 0:
        slope = ran[low] / low
    return low + max(limit_bytes - ran[low], 0) / slope
