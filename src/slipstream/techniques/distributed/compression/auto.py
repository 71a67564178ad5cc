"""auto: the fastest of several compressors on this machine, or none if none is faster.

The first timed steps are uncompressed and show how long the backward pass waits for the network; if
that is negligible, no candidate is tried. Otherwise candidates take turns in several rounds, and
the medians decide; they compare the slowest rank of each step, so that all ranks choose the same.
The choice is compared with no compression again at regular intervals.
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

# DDP rebuilds buckets after the first step; caches and the allocator warm up in the next.
_WARM_UP = 3
_DENSE_STEPS = 5
_ROUNDS = 4
# Steps of a candidate per round; the first is a warm-up.
_TURN = 3
# A smaller gain does not justify another sequence of updates.
_MIN_GAIN = 0.03


@dataclass(frozen=True)
class Auto:
    """Settings of `auto`.

    Attributes:
        candidates: technique specs of compressors, joined by ``|``.
        recheck: number of steps after which the candidates are timed again; 0 for never.
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
            parsed = parse(text)
            if len(parsed) != 1 or not isinstance(parsed[0], Compressor):
                raise InvalidArgumentError("auto:candidates", f"'{text}' is not a compressor")
            choices.append(parsed[0])
        return choices


class Chooser:
    """Choice of the current step's compressor, the same on all ranks.

    Attributes:
        current: compressor of the current step; None for no compression.
        decided: whether a choice has been made.
        timings: median seconds per step by candidate; ``dense`` for no compression.
    """

    def __init__(self, settings: Auto, ranks: ProcessGroup) -> None:
        self.settings = settings
        self.current: Compressor | None = None
        self.decided = False
        self.timings: dict[str, float] = {}
        self._ranks = ranks
        self._began: float | None = None
        self._step = 0
        self._waited: deque[float] = deque(maxlen=_DENSE_STEPS)
        self._dense_s: list[float] = []
        self._plan: list[tuple[Compressor | None, bool]] = []
        self._elapsed_s: dict[str, list[float]] = {}
        self._arms: list[Compressor | None] = []

    def step_begins(self, now: float) -> None:
        """Note that the first bucket of a step is ready, where steps begin and end."""
        previous, self._began = self._began, now
        if previous is None or self._ranks.size == 1:
            return
        elapsed_s = now - previous
        self._step += 1
        if self.decided:
            again = self.settings.recheck
            if again and self._step >= again:
                self._plan_rounds([None, *self.settings.compressors()])
            return
        if not self._plan and not self._arms:
            self._time_dense(elapsed_s)
        elif self._plan:
            self._end_turn(elapsed_s)

    def step_ends(self, waited_s: float) -> None:
        """Note that backward waited `waited_s` since it passed on the last bucket."""
        self._waited.append(waited_s)

    def _time_dense(self, elapsed_s: float) -> None:
        if self._step <= _WARM_UP:
            return
        self._dense_s.append(elapsed_s)
        if len(self._dense_s) < _DENSE_STEPS:
            return
        exposed = statistics.median(self._waited) / statistics.median(self._dense_s)
        if self._slowest([exposed])[0] < _MIN_GAIN:
            self.timings = {"dense": statistics.median(self._dense_s)}
            self._decide(None)
        else:
            self._plan_rounds([None, *self.settings.compressors()])

    def _plan_rounds(self, arms: list[Compressor | None]) -> None:
        self.decided = False
        self._arms, self._elapsed_s = arms, {}
        self._plan = [
            (arm, turn > 0) for _ in range(_ROUNDS) for arm in arms for turn in range(_TURN)
        ]
        self.current = self._plan[0][0]

    def _end_turn(self, elapsed_s: float) -> None:
        """Record the step that ended under the first entry of the plan."""
        arm, counts = self._plan.pop(0)
        if counts:
            self._elapsed_s.setdefault(_name(arm), []).append(elapsed_s)
        if self._plan:
            self.current = self._plan[0][0]
            return
        names = [_name(arm) for arm in self._arms]
        count = min(len(self._elapsed_s[name]) for name in names)
        flat = self._slowest([s for name in names for s in self._elapsed_s[name][:count]])
        medians = [statistics.median(flat[i * count : (i + 1) * count]) for i in range(len(names))]
        self.timings = dict(zip(names, medians, strict=True))
        best = min(range(len(names)), key=medians.__getitem__)
        faster = medians[best] < (1.0 - _MIN_GAIN) * medians[0]
        self._decide(self._arms[best] if faster else None)

    def _decide(self, chosen: Compressor | None) -> None:
        self.current, self.decided, self._step = chosen, True, 0
        self._waited.clear()
        self._dense_s.clear()

    def _slowest(self, numbers: list[float]) -> list[float]:
        """Return the elementwise maximum over ranks."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self._ranks.named_errors("the choice of auto"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return [float(number) for number in tensor]


def _name(arm: Compressor | None) -> str:
    return "dense" if arm is None else str(arm)
