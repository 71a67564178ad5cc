"""Host threads of a Kineto trace: flattening of nested events into segments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.io._kineto_columns import Category, Columns, Floats, Ints
from slipstream.graph.values import CLOSURE_RANGE, MODULE_RANGE, StepPhase, StringTable

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_MODULE_FRAME = "nn.Module: "


@dataclass
class Segments:
    """Time intervals of threads with one innermost event, in order within a thread.

    Attributes:
        event: int64 [k], row of the innermost event.
        start, end: float64 [k], ns.
        lane: int32 [k], the thread.
        first: bool [k], whether it is the event's first segment; every event has exactly one.
        scope, module, source: int32 [k], string indices.
        phase: uint8 [k], BACKWARD or OPTIMIZER if the trace shows it, else OTHER.
    """

    event: Ints
    start: Floats
    end: Floats
    lane: NDArray[np.int32]
    first: NDArray[np.bool_]
    scope: NDArray[np.int32]
    module: NDArray[np.int32]
    source: NDArray[np.int32]
    phase: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.event)


def frames(columns: Columns) -> NDArray[np.bool_]:
    """Return whether events only determine where their children belong, bool [n]."""
    named = columns.named_like(
        lambda text: text.startswith((_OPTIMIZER, MODULE_RANGE, CLOSURE_RANGE))
    )
    ranges = named & (columns.category == Category.ANNOTATION)
    chosen: NDArray[np.bool_] = ranges | (columns.category == Category.PYTHON)
    return chosen


def flatten(columns: Columns, rows: Ints, strings: StringTable) -> Segments:
    """Return the segments of the host events `rows`, thread by thread.

    Children are clamped to their parents, because rounding to microseconds makes some end later.
    """
    order = rows[np.lexsort((-columns.end[rows], columns.start[rows], columns.thread[rows]))]
    sweep = _Sweep(columns, strings)
    thread = columns.thread[order]
    cuts = np.flatnonzero(np.diff(thread)) + 1
    for part in np.split(order, cuts) if len(order) else []:
        sweep.run(part)
    return sweep.segments()


class _Sweep:
    """Sweep over the events of each thread, with a stack of open events."""

    def __init__(self, columns: Columns, strings: StringTable) -> None:
        self._columns = columns
        self._strings = strings
        self._backward = {
            code for code, text in enumerate(columns.texts) if text.startswith(_BACKWARD)
        }
        self._scopes: dict[tuple[int, int], int] = {}
        self._texts = {0: ""}
        # Opened events: event, scope, module, source, phase, enclosing node of autograd's engine
        # (-1 for none). The event of a frame is its enclosing event (-1 for none), whose segments
        # within the frame get another module, source or phase.
        self._opened: list[tuple[int, int, int, int, int, int]] = []
        # Per segment: the index of the opened event, start, end.
        self._of: list[int] = []
        self._start: list[float] = []
        self._end: list[float] = []

    def segments(self) -> Segments:
        """Return the segments, without empty ones except the first of each event."""
        values = itertools.chain.from_iterable(self._opened)
        opened = np.fromiter(values, np.int64, 6 * len(self._opened)).reshape(-1, 6)
        opened[:, 2] = self._modules(opened)
        opened = opened[self._of]
        event, start = opened[:, 0], np.array(self._start, np.float64)
        end = np.maximum(np.array(self._end, np.float64), start)
        first = np.zeros(len(event), np.bool_)
        first[np.unique(event, return_index=True)[1]] = True
        chosen = np.flatnonzero(first | (end > start))
        event, opened = event[chosen], opened[chosen]
        return Segments(
            event=event,
            start=start[chosen],
            end=end[chosen],
            lane=self._columns.thread[event],
            first=first[chosen],
            scope=opened[:, 1].astype(np.int32),
            module=opened[:, 2].astype(np.int32),
            source=opened[:, 3].astype(np.int32),
            phase=opened[:, 4].astype(np.uint8),
        )

    def _modules(self, opened: Ints) -> Ints:
        """Return the module of each opened event; for backward operators that of their forward.

        A backward operator has the sequence number of its forward. Operators without a number
        accumulate a gradient immediately after it exists, and so belong to its module.
        """
        event, module, engine = opened[:, 0], opened[:, 2].copy(), opened[:, 5]
        sequence = np.where(event >= 0, self._columns.saved_key[event], -1)
        forward = np.flatnonzero((engine < 0) & (sequence >= 0))
        if not len(forward):
            return module
        # The last of each number, since the innermost operator made the autograd node.
        numbers, last = np.unique(sequence[forward][::-1], return_index=True)
        made_in = module[forward[::-1][last]]
        for thread in np.unique(self._columns.thread[engine[engine >= 0]]).tolist():
            inside = np.flatnonzero((engine >= 0) & (self._columns.thread[engine] == thread))
            number = self._columns.saved_key[engine[inside]]
            at = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
            modules = np.where(numbers[at] == number, made_in[at], 0)
            # For events without a number, use the last event before them that has one.
            before = np.maximum.accumulate(np.where(number >= 0, np.arange(len(inside)), -1))
            from_before = (number < 0) & (before >= 0)
            modules[from_before] = modules[before[from_before]]
            module[inside] = np.where(module[inside] > 0, module[inside], modules)
        return module

    def run(self, rows: Ints) -> None:
        """Add the segments of one thread's events, sorted by start and descending length."""
        columns = self._columns
        texts, names = columns.texts, columns.name[rows].tolist()
        starts, ends = columns.start[rows].tolist(), columns.end[rows].tolist()
        category = columns.category[rows]
        framing = ((category == Category.ANNOTATION) | (category == Category.PYTHON)).tolist()
        scopes, backward = self._scopes, self._backward
        in_backward, other = int(StepPhase.BACKWARD), int(StepPhase.OTHER)
        opened, of, begun, ended = self._opened, self._of, self._start, self._end
        # Open events: (end, index among the opened, is a frame, event or -1, inner scope, module,
        # source, phase, node of autograd's engine).
        stack: list[tuple[float, int, bool, int, int, int, int, int, int]] = []
        cursor = 0.0
        events = zip(rows.tolist(), starts, ends, framing, names, strict=True)
        # A sentinel at the end closes all open events.
        for row, start, end, frame, code in (*events, (-1, np.inf, np.inf, False, -1)):
            while stack and stack[-1][0] <= start:
                until, number, is_frame, *_ = stack.pop()
                if not is_frame:
                    of.append(number)
                    begun.append(cursor)
                    ended.append(until)
                    cursor = max(cursor, until)
            if row < 0:
                break
            if stack:
                until, number, _, event, outer, module, source, phase, engine = stack[-1]
                end = min(end, until)
            else:
                event, outer, module, source, phase, engine = -1, 0, 0, 0, other, -1
            if frame:
                module, source, phase = self._placed(texts[code], module, source, phase)
                # Segments of the enclosing event retain their scope.
                scope = opened[number][1] if stack else 0
                stack.append((end, len(opened), True, event, outer, module, source, phase, engine))
                opened.append((event, scope, module, source, phase, engine))
                continue
            if event >= 0:
                of.append(number)
                begun.append(cursor)
                ended.append(start)
            cursor = start
            if code in backward:
                phase, engine = in_backward, row
            # The scope of its children.
            inner = scopes.get((outer, code))
            if inner is None:
                inner = self._inner(outer, code)
            stack.append((end, len(opened), False, row, inner, module, source, phase, engine))
            opened.append((row, outer, module, source, phase, engine))

    def _inner(self, outer: int, code: int) -> int:
        name = self._columns.texts[code]
        text = f"{self._texts[outer]}/{name}" if outer else name
        scope = self._scopes[outer, code] = self._strings.add(text)
        self._texts[scope] = text
        return scope

    def _placed(self, name: str, module: int, source: int, phase: int) -> tuple[int, int, int]:
        """Return module, source line and phase inside the frame `name`."""
        if name.startswith(_OPTIMIZER):
            return module, source, int(StepPhase.OPTIMIZER)
        if name == CLOSURE_RANGE:
            return module, source, int(StepPhase.OTHER)
        for prefix in (_MODULE_FRAME, MODULE_RANGE):
            if name.startswith(prefix):
                return self._strings.add(name[len(prefix) :]), source, phase
        # "train.py(12): step"; files of libraries are not the user's source lines.
        place, _, _ = name.partition("): ")
        file, bracket, line = place.rpartition("(")
        if bracket and line.isdecimal() and not _is_library(file):
            return module, self._strings.add(f"{file}:{line}"), phase
        return module, source, phase


def _is_library(file: str) -> bool:
    parts = file.replace("\\", "/")
    return parts.startswith(("torch/", "<")) or "site-packages/" in parts or "/lib/python" in parts
