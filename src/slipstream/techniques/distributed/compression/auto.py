"""auto: whichever of several ways to compress is fastest here, and none unless it is faster.

Steps are timed as they come: first some as they are, which show how long the backward pass waits
for the network; where that is next to nothing, nothing can be won and nothing is tried. Else every
candidate has a few turns, in rounds, and the medians decide, the same on all ranks: they compare
each step's slowest rank. Afterwards the choice is tried against none again from time to time.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import InvalidArgumentError
from slipstream.technique import parse
from slipstream.techniques.distributed.compression.compressor import Compressor

if TYPE_CHECKING:
    from slipstream.ranks.group import ProcessGroup

# Buckets are rebuilt after the first step, caches and the allocator warm up in the next.
_WARM_UP = 3
_LOOKED_AT = 5
_ROUNDS = 4
# In a round each has a step to settle and one or more that count.
_TURN = 3
# A gain below this is not worth another sequence of updates.
_LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Auto:
    """Settings of `auto`.

    Attributes:
        candidates: ways to compress, in the grammar of techniques, joined by ``|``.
        recheck: after how many steps the choice is tried against none again; 0 for never.
    """

    candidates: str = "cast:bf16|powersgd:4"
    recheck: int = 2000

    def __post_init__(self) -> None:
        if self.recheck < 0:
            raise InvalidArgumentError("auto:recheck", f"{self.recheck} is negative")
        self.compressors()

    def __str__(self) -> str:
        return f"auto:{self.candidates},recheck={self.recheck}"

    def compressors(self) -> list[Compressor]:
        choices: list[Compressor] = []
        for text in filter(None, self.candidates.split("|")):
            one = parse(text)
            if len(one) != 1 or not isinstance(one[0], Compressor):
                raise InvalidArgumentError("auto:candidates", f"'{text}' does not compress")
            choices.append(one[0])
        return choices


class Chooser:
    """Which candidate the current step takes; all ranks go through the same.

    Attributes:
        current: what the current step's buckets are compressed with; None for as they are.
        decided: whether the choice is made, for now.
        timings: median seconds a step of each that was tried, by name; ``dense`` for none.
    """

    def __init__(self, settings: Auto, ranks: ProcessGroup) -> None:
        self.settings = settings
        self.current: Compressor | None = None
        self.decided = False
        self.timings: dict[str, float] = {}
        self._ranks = ranks
        self._began: float | None = None
        self._step = 0
        self._waited: deque[float] = deque(maxlen=_LOOKED_AT)
        self._plain: list[float] = []
        self._plan: list[tuple[Compressor | None, bool]] = []
        self._taken: dict[str, list[float]] = {}
        self._arms: list[Compressor | None] = []

    def step_begins(self, now: float) -> None:
        """The first bucket of a step is ready; a step lasts from there to there."""
        before, self._began = self._began, now
        if before is None or self._ranks.size == 1:
            return
        took = now - before
        self._step += 1
        if self.decided:
            again = self.settings.recheck
            if again and self._step >= again:
                self._plan_rounds([None, *self.settings.compressors()])
            return
        if not self._plan and not self._arms:
            self._look(took)
        elif self._plan:
            self._turn(took)

    def step_ends(self, waited_s: float) -> None:
        """The last bucket was handed over `waited_s` ago, which backward waited."""
        self._waited.append(waited_s)

    def _look(self, took: float) -> None:
        if self._step <= _WARM_UP:
            return
        self._plain.append(took)
        if len(self._plain) < _LOOKED_AT:
            return
        exposed = statistics.median(self._waited) / statistics.median(self._plain)
        if self._slowest([exposed])[0] < _LEAST_GAIN:
            self.timings = {"dense": statistics.median(self._plain)}
            self._decide(None)
        else:
            self._plan_rounds([None, *self.settings.compressors()])

    def _plan_rounds(self, arms: list[Compressor | None]) -> None:
        self.decided = False
        self._arms, self._taken = arms, {}
        self._plan = [
            (arm, turn > 0) for _ in range(_ROUNDS) for arm in arms for turn in range(_TURN)
        ]
        self.current = self._plan[0][0]

    def _turn(self, took: float) -> None:
        """The step that ended belonged to the first entry of the plan."""
        arm, counts = self._plan.pop(0)
        if counts:
            self._taken.setdefault(_name(arm), []).append(took)
        if self._plan:
            self.current = self._plan[0][0]
            return
        names = [_name(arm) for arm in self._arms]
        count = min(len(self._taken[name]) for name in names)
        flat = self._slowest([took for name in names for took in self._taken[name][:count]])
        medians = [statistics.median(flat[i * count : (i + 1) * count]) for i in range(len(names))]
        self.timings = dict(zip(names, medians, strict=True))
        best = min(range(len(names)), key=medians.__getitem__)
        worth = medians[best] < (1.0 - _LEAST_GAIN) * medians[0]
        self._decide(self._arms[best] if worth else None)

    def _decide(self, chosen: Compressor | None) -> None:
        self.current, self.decided, self._step = chosen, True, 0
        self._waited.clear()
        self._plain.clear()

    def _slowest(self, numbers: list[float]) -> list[float]:
        """Of each number the largest on any rank."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self._ranks.named_errors("the choice of auto"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return [float(number) for number in tensor]


def _name(arm: Compressor | None) -> str:
    return "dense" if arm is None else str(arm)
