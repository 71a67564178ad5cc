"""Host threads of a Kineto trace: nested events become a flat sequence of segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.graph._kineto_columns import Category, Columns, Floats, Ints
from slipstream.graph.graph import StepPhase, StringTable

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_MODULE_FRAME = "nn.Module: "
# Range names slipstream's own hooks open around modules: see `slipstream.capture.modules`.
_MODULE_RANGE = "mod::"


@dataclass
class Segments:
    """Stretches of a thread during which one event is the innermost; in order within a thread.

    Attributes:
        event: int64 [k], row of the trace.
        start, end: float64 [k], ns.
        lane: int32 [k], the thread.
        first: bool [k]; the event's first segment. Every event has exactly one.
        scope, module, source: int32 [k], string indices.
        phase: uint8 [k], BACKWARD or OPTIMIZER where the trace says so, else OTHER.
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
    """bool [n]; events that run nothing themselves but say where their children belong."""
    ours = columns.named_like(lambda text: text.startswith((_OPTIMIZER, _MODULE_RANGE)))
    ranges = ours & (columns.category == Category.ANNOTATION)
    chosen: NDArray[np.bool_] = ranges | (columns.category == Category.PYTHON)
    return chosen


def flatten(columns: Columns, rows: Ints, strings: StringTable) -> Segments:
    """Segments of the host events `rows`, thread by thread.

    Children are clamped to their parents: rounding to microseconds makes some end later.
    """
    order = rows[np.lexsort((-columns.end[rows], columns.start[rows], columns.thread[rows]))]
    sweep = _Sweep(columns, strings)
    thread = columns.thread[order]
    cuts = np.flatnonzero(np.diff(thread)) + 1
    for part in np.split(order, cuts) if len(order) else []:
        sweep.run(part)
    fields = list(zip(*sweep.rows, strict=True)) or [()] * 8
    event = np.array(fields[0], np.int64)
    return Segments(
        event=event,
        start=np.array(fields[1], np.float64),
        end=np.array(fields[2], np.float64),
        lane=columns.thread[event],
        first=np.array(fields[3], np.bool_),
        scope=np.array(fields[4], np.int32),
        module=np.array(fields[5], np.int32),
        source=np.array(fields[6], np.int32),
        phase=np.array(fields[7], np.uint8),
    )


class _Sweep:
    """Goes through the events of one thread after the other, with the stack of open ones."""

    def __init__(self, columns: Columns, strings: StringTable) -> None:
        self._columns = columns
        self._strings = strings
        self._backward = {
            code for code, text in enumerate(columns.texts) if text.startswith(_BACKWARD)
        }
        self._scopes: dict[tuple[int, int], int] = {}
        self._texts = {0: ""}
        # Per segment: event, start, end, first, scope, module, source, phase.
        self.rows: list[tuple[int, float, float, bool, int, int, int, int]] = []

    def run(self, rows: Ints) -> None:
        """Add the segments of one thread's events, sorted by start, the longer first."""
        columns = self._columns
        texts, names = columns.texts, columns.name[rows].tolist()
        starts, ends = columns.start[rows].tolist(), columns.end[rows].tolist()
        categories = columns.category[rows].tolist()
        # Of open events: (end, event or -1, scope, inner scope, module, source, phase); frames
        # carry the event they run in.
        stack: list[tuple[float, int, int, int, int, int, int]] = []
        shown: set[int] = set()
        cursor = 0.0
        frame = (int(Category.ANNOTATION), int(Category.PYTHON))
        backward = int(StepPhase.BACKWARD)
        events = zip(rows.tolist(), starts, ends, categories, names, strict=True)
        for row, start, end, category, code in events:
            while stack and stack[-1][0] <= start:
                cursor = self._close(stack, shown, cursor)
            event, outer, module, source, phase = -1, 0, 0, 0, int(StepPhase.OTHER)
            if stack:
                top = stack[-1]
                event, outer, module, source, phase = top[1], top[3], top[4], top[5], top[6]
                end = min(end, top[0])
            if category in frame:
                module, source, phase = self._placed(texts[code], module, source, phase)
                # Its children are the children of what it runs in.
                scope = stack[-1][2] if stack else 0
                stack.append((end, event, scope, outer, module, source, phase))
                continue
            if event >= 0:
                self._emit(stack[-1], cursor, start, shown)
            cursor = start
            if code in self._backward:
                phase = backward
            # What runs inside it runs in this scope.
            inner = self._scopes.get((outer, code))
            if inner is None:
                inner = self._inner(outer, code)
            stack.append((end, row, outer, inner, module, source, phase))
        while stack:
            cursor = self._close(stack, shown, cursor)

    def _close(
        self,
        stack: list[tuple[float, int, int, int, int, int, int]],
        shown: set[int],
        cursor: float,
    ) -> float:
        top = stack.pop()
        is_frame = bool(stack) and stack[-1][1] == top[1]
        if top[1] < 0 or is_frame:
            return cursor
        self._emit(top, cursor, top[0], shown)
        return max(cursor, top[0])

    def _emit(
        self,
        entry: tuple[float, int, int, int, int, int, int],
        start: float,
        end: float,
        shown: set[int],
    ) -> None:
        event = entry[1]
        first = event not in shown
        if end <= start and not first:
            return
        shown.add(event)
        end = max(end, start)
        self.rows.append((event, start, end, first, entry[2], entry[4], entry[5], entry[6]))

    def _inner(self, outer: int, code: int) -> int:
        name = self._columns.texts[code]
        text = f"{self._texts[outer]}/{name}" if outer else name
        found = self._scopes[outer, code] = self._strings.add(text)
        self._texts[found] = text
        return found

    def _placed(self, name: str, module: int, source: int, phase: int) -> tuple[int, int, int]:
        """Module, source line and phase inside the frame `name`."""
        if name.startswith(_OPTIMIZER):
            return module, source, int(StepPhase.OPTIMIZER)
        for prefix in (_MODULE_FRAME, _MODULE_RANGE):
            if name.startswith(prefix):
                return self._strings.add(name[len(prefix) :]), source, phase
        # "train.py(12): step"; PyTorch's own files are not where a user would look.
        place, _, _ = name.partition("): ")
        file, bracket, line = place.rpartition("(")
        if bracket and line.isdecimal() and not _is_library(file):
            return module, self._strings.add(f"{file}:{line}"), phase
        return module, source, phase


def _is_library(file: str) -> bool:
    parts = file.replace("\\", "/")
    return parts.startswith(("torch/", "<")) or "site-packages/" in parts or "/lib/python" in parts
