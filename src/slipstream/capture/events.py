"""Profiler events of steps as arrays in pre-order, and their alignment between steps.

Most steps run the same operators. Some run operators that an execution trace omits (an error ended
them, which recomputation in the backward pass does intentionally), and some take another path
through the model (a branch on data, experts, early exits).

`align` uses Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1986: the
longest common subsequence in time proportional to length times number of differences, which is
small between two steps of one model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError

MARKER = "slipstream::step"
_NOT_OPERATORS = ("[memory]", "[OutOfMemory]")


def profiler(**options: Any) -> Any:
    """Return a profiler of this thread's operators on the CPU."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, **options)


def mark() -> None:
    """Mark the boundary between two steps in an active profiler."""
    import torch

    with torch.profiler.record_function(MARKER):
        pass


class Dispatched:
    """Context manager that calls `_note` after every operator that torch dispatches."""

    def __enter__(self) -> Self:
        from torch.utils._python_dispatch import TorchDispatchMode

        note = self._note

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                note(func, args)
                return result

        self._mode: Any = Watch()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(None, None, None)

    def _note(self, operator: Any, args: Sequence[Any]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class StepEvents:
    """Events of one step in pre-order: parents before children, by start time.

    Attributes:
        names: Operator or annotation of each of the e events.
        start_ns, end_ns: int64 [e], relative to the start of the step, clipped to the step.
        length_ns: Length of the whole step.
    """

    names: tuple[str, ...]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    length_ns: int

    @cached_property
    def parents(self) -> NDArray[np.int64]:
        """Index of the enclosing event of each, int64 [e]; -1 at the top."""
        parents: list[int] = []
        enclosing: list[tuple[int, int]] = []
        spans = zip(self.start_ns.tolist(), self.end_ns.tolist(), strict=True)
        for index, (start, end) in enumerate(spans):
            while enclosing and enclosing[-1][0] <= start:
                enclosing.pop()
            parents.append(enclosing[-1][1] if enclosing else -1)
            enclosing.append((end, index))
        return np.array(parents, np.int64)


def steps_of(events: Iterable[Any]) -> list[StepEvents]:
    """Split Kineto events at the step markers, for the thread of the markers only."""
    # Each field is a call into the profiler and dominates the cost: read none twice.
    rows = [
        (start, end, event.start_thread_id(), name)
        for event in events
        if (name := event.name()) not in _NOT_OPERATORS
        and (end := event.end_ns()) >= (start := event.start_ns())
    ]
    marks = sorted((row for row in rows if row[3] == MARKER), key=lambda row: row[0])
    if len(marks) < 2:
        return []
    thread = marks[0][2]
    own = [row for row in rows if row[2] == thread and row[3] != MARKER]
    start, end = (np.array([row[side] for row in own], np.int64) for side in (0, 1))
    # Parents first among events that start in the same nanosecond.
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    names = [own[i][3] for i in order.tolist()]
    steps = []
    for before, after in itertools.pairwise(marks):
        # The next step starts at the end of the marker.
        low, high = before[1], after[0]
        inside = slice(*np.searchsorted(start, [low, high]))
        steps.append(
            _step(tuple(names[inside]), start[inside] - low, end[inside] - low, high - low)
        )
    return steps


def _step(
    names: tuple[str, ...], start: NDArray[np.int64], end: NDArray[np.int64], length_ns: int
) -> StepEvents:
    # Rounding may end a child a nanosecond after its parent; clamp it, or it would not count as
    # nested. The parent of outermost events is the step: an event still open at the marker (a
    # script's Optimizer.step, whose hook sets it) is cut there.
    clamped: list[int] = []
    open_until = [length_ns]
    for begins, ends in zip(start.tolist(), end.tolist(), strict=True):
        while open_until[-1] <= begins:
            open_until.pop()
        if ends > open_until[-1]:
            ends = open_until[-1]
        open_until.append(ends)
        clamped.append(ends)
    return StepEvents(names, start, np.array(clamped, np.int64), length_ns)


_ABSENT = -1
# Maximum share of other events in a step that has all events of the reference.
_MAX_OTHERS = 0.05
# Minimum share of whole steps to use only these.
_MIN_WHOLE_SHARE = 0.5
# Minimum share of common events of steps.
_MIN_COMMON = 0.5
# Maximum relative difference in the number of events of similar steps, and their minimum share.
_MAX_DIFFERENCE, _MIN_SIMILAR = 0.25, 0.2


@dataclass(frozen=True)
class Aligned:
    """Times of the reference's e events in several steps; NaN if a step lacks one.

    Attributes:
        start_ns, end_ns: float64 [steps, e].
        others: bool [steps, e + 1], whether foreign events precede each event and the end; never
            in steps that have all events.
        length_ns: float64 [steps], lengths of the whole steps.
        unaligned: Share of events without a partner, in either direction; 0 if steps agree.
    """

    start_ns: NDArray[np.float64]
    end_ns: NDArray[np.float64]
    others: NDArray[np.bool_]
    length_ns: NDArray[np.float64]
    unaligned: float


def align(
    reference: Sequence[str], steps: Sequence[StepEvents], parents: NDArray[np.int64] | None = None
) -> Aligned:
    """Find the events of `reference` in those `steps` that have them all, else in similar ones.

    Similar steps have about as many events, if there are enough such steps: the number of closures
    that an optimizer with a line search calls varies.

    Args:
        parents: int64 [e], index of the enclosing event of each of `reference`, -1 at the top;
            None to ignore nesting.

    Raises:
        GraphError: The steps have less than half of their events in common.
    """
    similar = np.flatnonzero([is_near(len(step.names), len(reference)) for step in steps])
    if len(similar) < _MIN_SIMILAR * len(steps):
        similar = np.arange(len(steps))
    chosen = similar.tolist()
    # Few steps differ in their names: compare each path through the model once.
    names_of = {steps[n].names for n in chosen}
    paths = {names: positions(reference, names) for names in names_of}
    places = {n: paths[steps[n].names] for n in chosen}
    if parents is not None:
        places = {n: nested(place, parents, steps[n]) for n, place in places.items()}
    whole = [n for n, place in places.items() if is_complete(place, len(steps[n].names))]
    if len(whole) >= _MIN_WHOLE_SHARE * len(steps):
        return _gathered(reference, [steps[n] for n in whole], [places[n] for n in whole], 0.0)
    # Steps of other lengths are only counted: aligning them takes as long as all others.
    counts = Counter(reference)
    common = np.array(
        [
            (places[n] >= 0).sum() if n in places else (counts & Counter(step.names)).total()
            for n, step in enumerate(steps)
        ]
    )
    events = np.array([(len(reference) + len(step.names)) / 2 for step in steps])
    share = float(common[similar].sum() / max(events[similar].sum(), 1))
    if share < _MIN_COMMON:
        raise GraphError(
            _difference(reference, steps, share),
            remedy="make the step do the same work every time: fixed shapes, no random branch; "
            "or profile one path at a time",
        )
    unaligned = 1 - float(common.sum() / events.sum())
    return _gathered(reference, [steps[n] for n in chosen], [places[n] for n in chosen], unaligned)


def nested(
    found: NDArray[np.int64], parents: NDArray[np.int64], step: StepEvents
) -> NDArray[np.int64]:
    """Match a parent to the event of its name that encloses its children's matches.

    Names alone are ambiguous: at the end of an epoch, an exhausted iterator's ``__next__`` precedes
    the one that loads the batch.

    Args:
        found: int64 [e], index in `step` of each event of the reference, -1 if absent.
        parents: int64 [e], index of the enclosing event in the reference, -1 at the top.
    """
    children = np.flatnonzero((found >= 0) & (parents >= 0))
    matched = found[parents[children]]
    enclosing = step.parents[found[children]]
    wrong = np.flatnonzero((enclosing != matched) & (enclosing >= 0) & (matched >= 0))
    if not len(wrong):
        return found
    corrected = found.copy()
    for at in wrong.tolist():
        if step.names[enclosing[at]] == step.names[matched[at]]:
            corrected[parents[children[at]]] = enclosing[at]
    return corrected


def is_complete(found: NDArray[np.int64], events: int) -> bool:
    """Whether a step of `events` events has all of the reference's, and few others."""
    return bool((found >= 0).all()) and events <= (1 + _MAX_OTHERS) * len(found)


def is_near(events: int, reference: int) -> bool:
    """Whether the numbers of events of a step and the reference are similar."""
    return abs(events - reference) <= _MAX_DIFFERENCE * reference


def is_typical(reference: Sequence[str], steps: Sequence[StepEvents]) -> bool:
    """Whether the path that most of `steps` take has the reference's events.

    Without such a path: whether the median number of events is similar.
    """
    paths = Counter(step.names for step in steps)
    if not paths:
        return True
    names, count = paths.most_common(1)[0]
    if count < _MIN_WHOLE_SHARE * len(steps):
        return is_near(int(np.median([len(step.names) for step in steps])), len(reference))
    return is_complete(positions(reference, names), len(names))


def _gathered(
    reference: Sequence[str],
    steps: Sequence[StepEvents],
    found: Sequence[NDArray[np.int64]],
    unaligned: float,
) -> Aligned:
    start = np.full((len(steps), len(reference)), np.nan)
    end = start.copy()
    others = np.zeros((len(steps), len(reference) + 1), bool)
    for n, (step, places) in enumerate(zip(steps, found, strict=True)):
        present = places >= 0
        start[n, present] = step.start_ns[places[present]]
        end[n, present] = step.end_ns[places[present]]
        if unaligned:
            after = np.concatenate([places, [len(step.names)]])
            others[n] = np.diff(np.concatenate([[-1], after])) != 1
    return Aligned(start, end, others, np.array([float(s.length_ns) for s in steps]), unaligned)


def _difference(reference: Sequence[str], steps: Sequence[StepEvents], common: float) -> str:
    """Describe the first difference between the steps."""
    message = f"the steps have only {100 * common:.0f} % of their operators in common"
    for step in steps:
        for position, (first, second) in enumerate(zip(reference, step.names, strict=False)):
            if first != second:
                return f"{message}; operator {position} is {first} in one and {second} in another"
    return message


def positions(
    reference: Sequence[str], other: Sequence[str], most_differences: int = 2000
) -> NDArray[np.int64]:
    """Return the index in `other` of each event of `reference`, ascending, or -1.

    The common prefix and suffix are matched first, then a longest common subsequence of the rest.
    With more than `most_differences` insertions and deletions, the rest counts as absent.
    """
    places = np.full(len(reference), _ABSENT, np.int64)
    shortest = min(len(reference), len(other))
    head = 0
    while head < shortest and reference[head] == other[head]:
        head += 1
    tail = 0
    while tail < shortest - head and reference[-1 - tail] == other[-1 - tail]:
        tail += 1
    places[:head] = np.arange(head)
    if tail:
        places[len(reference) - tail :] = np.arange(len(other) - tail, len(other))
    names = {name: number for number, name in enumerate({*reference, *other})}
    a = [names[name] for name in reference[head : len(reference) - tail]]
    b = [names[name] for name in other[head : len(other) - tail]]
    for i, j in _common(a, b, most_differences):
        places[head + i] = head + j
    return places


def _common(a: Sequence[int], b: Sequence[int], most_differences: int) -> list[tuple[int, int]]:
    """Return the pairs of a longest common subsequence; empty beyond `most_differences`."""
    if not a or not b or abs(len(a) - len(b)) > most_differences:
        return []
    # By diagonal k = x - y: the furthest x reached with d differences; one table per d.
    furthest = {1: 0}
    tables: list[dict[int, int]] = []
    for d in range(min(len(a) + len(b), most_differences) + 1):
        tables.append(furthest.copy())
        for k in range(-d, d + 1, 2):
            x = _enter(furthest, k, d)
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= len(a) and y >= len(b):
                return _walk_back(tables, len(a), len(b))
    return []


def _enter(furthest: dict[int, int], k: int, d: int) -> int:
    """Return where diagonal `k` is entered: by an insertion from above, or a deletion."""
    if k == -d or (k != d and furthest[k - 1] < furthest[k + 1]):
        return furthest[k + 1]
    return furthest[k - 1] + 1


def _walk_back(tables: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for d in range(len(tables) - 1, -1, -1):
        k = x - y
        begin = _enter(tables[d], k, d)
        while x > max(begin, 0) and y > max(begin - k, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if d == 0:
            break
        # The insertion or deletion that led to this diagonal.
        inserted = k == -d or (k != d and tables[d][k - 1] < tables[d][k + 1])
        x, y = (x, y - 1) if inserted else (x - 1, y)
    return pairs[::-1]
