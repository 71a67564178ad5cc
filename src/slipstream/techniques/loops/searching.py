"""Search for a fast schedule: beam search with the cost model, and execution of the best few.

Source: Baghdadi et al., "A Deep Learning Based Cost Model for Automatic Code Optimization",
MLSys 2021, section 5.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slipstream.codegen.legality import is_legal
from slipstream.codegen.program import Program
from slipstream.codegen.schedule import (
    Fuse,
    Interchange,
    Schedule,
    ScheduleError,
    Skew,
    Tile,
    Tree,
    Unroll,
    Vectorise,
    extents_of,
)  # fmt: skip
from slipstream.codegen.walker import source
from slipstream.errors import SlipstreamError
from slipstream.techniques.loops.model import CostModel, Estimate
from slipstream.techniques.loops.running import Runner

_SIZES = (4, 16, 64)
_MAX_TILED = 3
_FACTORS = (2, 4, 8)
_SWAPS = 3
# Schedules that are compiled into one library and compared with one time of the original.
_BATCH = 24
# Added to the logarithm of a predicted time for each better schedule with the same loops.
_HANDICAP = 0.15
# Schedules that are executed give the same results up to the order of sums.
_MAX_ERROR = 1e-3


@dataclass(frozen=True)
class Candidate:
    """A schedule with its predicted and, if it was executed, measured speed-up."""

    schedule: Schedule
    predicted: Estimate
    measured: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: the candidate with the greatest measured speed-up, or predicted without executions;
            the empty schedule if none is faster.
        candidates: best first.
        scored: schedules that the cost model compared.
    """

    program: Program
    best: Candidate
    candidates: tuple[Candidate, ...]
    scored: int

    @property
    def code(self) -> str:
        """C++ of the best schedule, as the function ``loops_0``."""
        return source([Tree(self.program, self.best.schedule)])


def autoschedule(
    program: Program, model: CostModel | None = None, *, beam: int = 8, execute: int = 5,
    budget_s: float = 1.0, report: Callable[[str], None] = lambda text: None,
) -> SearchResult:  # fmt: skip
    """Search for a fast schedule on one thread.

    Args:
        beam: schedules that are retained after each stage.
        execute: number of best predictions that are compiled and timed in a child process; 0 to
            trust the model.
        budget_s: time for the timed calls, at least three of each schedule.

    Raises:
        ScheduleError: an extent is a symbol.
        SlipstreamError: an access is indirect, or an executed schedule changes a result.
        CompileError: there is no compiler.
        ChildError: a kernel crashes or hangs.
    """
    extents_of(program)
    model = model or CostModel.load()
    search = _Beam(program, model, beam)
    for number, stage in enumerate(search.stages()):
        search.advance(stage)
        report(f"stage {number + 1}, {search.scored} schedules compared")
    schedules = search.distinct(execute or beam)
    estimates = model.predict(program, schedules)
    found = [Candidate(s, e) for s, e in zip(schedules, estimates, strict=True)]
    if execute and found:
        report(f"executing {len(found)} schedules")
        found = execute_candidates(program, found, budget_s)
    found.append(Candidate(Schedule(), Estimate(1.0, 1.0, 1.0), 1.0 if execute else None))
    found.sort(key=lambda c: -(c.predicted.speedup if c.measured is None else c.measured))
    return SearchResult(program, found[0], tuple(found), search.scored)


def execute_candidates(
    program: Program, candidates: list[Candidate], budget_s: float = 1.0, timeout_s: float = 60.0
) -> list[Candidate]:
    """Return the candidates with measured speed-ups over the unscheduled program.

    Raises:
        SlipstreamError: a schedule changes a result, or as for `Runner.time`.
    """
    found = []
    with Runner(budget_s, timeout_s) as runner:
        for first in range(0, len(candidates), _BATCH):
            some = candidates[first : first + _BATCH]
            base, *timings = runner.time(program, [Schedule(), *(c.schedule for c in some)])
            for candidate, timing in zip(some, timings, strict=True):
                if timing.error > _MAX_ERROR:
                    raise SlipstreamError(
                        f"the schedule changes a result by {timing.error:.2g}",
                        where=str(candidate.schedule), remedy="report the program and the schedule",
                    )  # fmt: skip
                found.append(replace(candidate, measured=base.ns / timing.ns))
    return found


Stage = Callable[[Schedule], Iterator[Schedule]]


class _Beam:
    """The best schedules so far; children are compared first, and checked from the best on."""

    def __init__(self, program: Program, model: CostModel, width: int) -> None:
        self._program, self._model, self._width = program, model, width
        self.scored = 0
        self.schedules = [Schedule()]
        # Logarithm of the predicted time, and loops without sizes and marks.
        self._found: dict[Schedule, tuple[float, str]] = {}

    def advance(self, stage: Stage) -> None:
        """Replace the beam by its best legal members after one more stage."""
        children = dict.fromkeys(self.schedules, True)
        for parent in self.schedules:
            for child in stage(parent):
                children.setdefault(child.canonical(self._program), False)
        trees: list[tuple[Schedule, Tree]] = []
        for schedule in children:
            with contextlib.suppress(ScheduleError):
                trees.append((schedule, Tree(self._program, schedule)))
        times = self._model.log_times([tree for _, tree in trees])
        self.scored += len(trees)
        retained: dict[str, Schedule] = {}
        for place in np.argsort(times, kind="stable"):
            schedule, tree = trees[place]
            if tree.key not in retained and (children[schedule] or is_legal(tree)):
                retained[tree.key] = schedule
                self._found[schedule] = (float(times[place]), _structure(tree))
                if len(retained) == self._width:
                    break
        self.schedules = list(retained.values())

    def distinct(self, count: int) -> list[Schedule]:
        """Return the best schedules, with a handicap for those that differ in sizes and marks only.

        Their errors are similar: executing several of them would not correct the model.
        """
        similar: dict[str, int] = {}
        order = []
        for schedule, (time, structure) in sorted(self._found.items(), key=lambda item: item[1]):
            similar[structure] = similar.get(structure, 0) + 1
            if schedule.steps:
                order.append((time + _HANDICAP * similar[structure], schedule))
        order.sort(key=lambda item: item[0])
        return [schedule for _, schedule in order[:count]]

    def stages(self) -> Iterator[Stage]:
        """Yield fusion, then for each statement skewing, order, tiles and marks of loops."""
        numbers = range(len(self._program.statements))
        for first, second in itertools.pairwise(numbers):
            yield partial(self._fused, first, second)
        for number in numbers:
            statement = self._program.statements[number]
            if sum(self._program.axis[a].kind == "sequential" for a in statement.axes) > 1:
                yield partial(self._skewed, number)
            for _ in range(min(_SWAPS, len(statement.axes) - 1)):
                yield partial(self._swapped, number)
        for number in numbers:
            yield partial(self._vectorised, number)
            yield partial(self._tiled, number)
            yield partial(self._resized, number)
            yield partial(self._marked, number)

    def _fused(self, first: int, second: int, schedule: Schedule) -> Iterator[Schedule]:
        for swapped in (schedule, *self._swapped(second, schedule)):
            for depth in range(1, 4):
                yield swapped.then(Fuse(first, second, depth))

    def _skewed(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        for pair in itertools.combinations(self._program.statements[number].axes, 2):
            for factor in (1, 2):
                yield schedule.then(Skew(number, *pair, factor))

    def _swapped(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        for pair in itertools.combinations(self._program.statements[number].axes, 2):
            yield schedule.then(Interchange(number, *pair))

    def _order(self, schedule: Schedule, number: int) -> list[str]:
        path = Tree(self._program, schedule).path(number)
        return [loop.axes[number] for loop in path if not loop.tile]

    def _vectorised(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        yield schedule.then(Vectorise(number, self._order(schedule, number)[-1]))

    def _tiled(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        order = self._order(schedule, number)
        for count in range(1, min(_MAX_TILED, len(order)) + 1):
            for axes in itertools.combinations(order, count):
                for sizes in itertools.product(_SIZES, repeat=count):
                    yield schedule.then(Tile(number, axes, sizes))

    def _resized(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        """Yield the schedule with one size of its tiles halved or doubled."""
        for place, step in enumerate(schedule.steps):
            if not isinstance(step, Tile) or step.statement != number:
                continue
            for at, factor in itertools.product(range(len(step.sizes)), (0.5, 2)):
                sizes = list(step.sizes)
                sizes[at] = int(sizes[at] * factor)
                changed = Tile(number, step.axes, tuple(sizes))
                yield Schedule((*schedule.steps[:place], changed, *schedule.steps[place + 1 :]))

    def _marked(self, number: int, schedule: Schedule) -> Iterator[Schedule]:
        *outer, inner = self._order(schedule, number)
        vector = schedule.then(Vectorise(number, inner))
        yield vector
        for factor in _FACTORS:
            yield schedule.then(Unroll(number, inner, factor))
            for axis in outer[-1:]:
                yield schedule.then(Unroll(number, axis, factor))
                yield vector.then(Unroll(number, axis, factor))


def _structure(tree: Tree) -> str:
    numbers = range(len(tree.program.statements))
    return str([[loop.name for loop in tree.path(number)] for number in numbers])
