"""Splitting the profiler's events at the step markers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.capture.events import MARKER, steps_of


@dataclass
class Event:
    """The attributes that are read from a Kineto event."""

    label: str
    begin: int
    length: int
    thread: int = 1

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.begin + self.length

    def duration_ns(self) -> int:
        return self.length

    def start_thread_id(self) -> int:
        return self.thread


def test_a_step_is_between_two_markers() -> None:
    events = [
        Event(MARKER, 0, 5),
        Event("a", 10, 20),
        Event("b", 40, 10),
        Event(MARKER, 100, 5),
        Event("a", 110, 21),
        Event(MARKER, 205, 5),
    ]
    first, second = steps_of(events)
    assert first.names == ("a", "b")
    # Relative to the end of the marker, whose recording is not part of the step.
    assert first.start_ns.tolist() == [5, 35]
    assert first.end_ns.tolist() == [25, 45]
    assert first.length_ns == 95
    assert second.names == ("a",)
    assert second.length_ns == 100


def test_the_order_of_events_does_not_matter() -> None:
    events = [Event(MARKER, 0, 1), Event("a", 2, 3), Event("b", 6, 1), Event(MARKER, 9, 1)]
    original, other = steps_of(events)[0], steps_of(events[::-1])[0]
    assert original.names == other.names
    assert original.start_ns.tolist() == other.start_ns.tolist()


def test_parents_precede_children_that_start_at_the_same_time() -> None:
    events = [Event(MARKER, 0, 1), Event("in", 2, 3), Event("out", 2, 9), Event(MARKER, 20, 1)]
    assert steps_of(events)[0].names == ("out", "in")


def test_other_threads_and_memory_events_are_left_out() -> None:
    events = [
        Event(MARKER, 0, 1),
        Event("elsewhere", 2, 3, thread=2),
        Event("[memory]", 3, 0),
        Event("here", 4, 1),
        Event(MARKER, 9, 1),
    ]
    assert steps_of(events)[0].names == ("here",)


def test_an_event_open_at_the_marker_is_truncated() -> None:
    events = [Event(MARKER, 0, 1), Event("Optimizer.step", 5, 100), Event(MARKER, 50, 1)]
    (step,) = steps_of(events)
    assert step.end_ns.tolist() == [step.length_ns]


def test_a_child_that_ends_after_its_parent_is_clamped() -> None:
    events = [Event(MARKER, 0, 1), Event("out", 2, 10), Event("in", 5, 8), Event(MARKER, 50, 1)]
    assert steps_of(events)[0].end_ns.tolist() == [11, 11]


def test_without_two_markers_there_is_no_step() -> None:
    assert steps_of([]) == []
    assert steps_of([Event("a", 0, 1), Event(MARKER, 5, 1)]) == []


intervals = st.lists(st.tuples(st.integers(10, 90), st.integers(0, 60)), max_size=12)


@given(intervals)
def test_events_nest_or_are_disjoint(found: list[tuple[int, int]]) -> None:
    events = [Event(f"e{i}", begin, length) for i, (begin, length) in enumerate(found)]
    (step,) = steps_of([Event(MARKER, 0, 1), *events, Event(MARKER, 100, 1)])
    assert (np.diff(step.start_ns) >= 0).all()
    assert (step.end_ns <= step.length_ns).all()
    for i in range(len(step.names)):
        for j in range(i + 1, len(step.names)):
            apart = step.end_ns[i] <= step.start_ns[j]
            assert apart or step.end_ns[j] <= step.end_ns[i]


@given(intervals)
def test_an_event_ends_no_later_than_its_parent(found: list[tuple[int, int]]) -> None:
    """Compare with the definition, applied event by event."""
    events = [Event(f"e{i}", begin, length) for i, (begin, length) in enumerate(found)]
    (step,) = steps_of([Event(MARKER, 0, 0), *events, Event(MARKER, 100, 1)])
    ends: list[int] = []
    rows = sorted(events, key=lambda event: (event.begin, -event.end_ns()))
    for row in rows:
        around = [end for end in ends if end > row.begin]
        ends.append(min([row.end_ns(), step.length_ns, *around]))
    assert step.names == tuple(row.label for row in rows)
    assert step.start_ns.tolist() == [row.begin for row in rows]
    assert step.end_ns.tolist() == ends


class Counted(Event):
    """Count how often each of its fields is read, which is what reading real events costs."""

    def __getattribute__(self, field: str) -> Any:
        if field in ("name", "start_ns", "end_ns", "start_thread_id"):
            reads[field] += 1
        return super().__getattribute__(field)


reads: Counter[str] = Counter()


def test_no_field_of_an_event_is_read_twice() -> None:
    reads.clear()
    labels = [MARKER, "a", "b", MARKER, "a", MARKER]
    steps_of([Counted(label, 10 * i, 5) for i, label in enumerate(labels)])
    assert reads == dict.fromkeys(("name", "start_ns", "end_ns", "start_thread_id"), len(labels))
