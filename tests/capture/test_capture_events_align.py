"""Alignment of the events of one step with those of another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.capture.events import StepEvents, align, positions
from slipstream.errors import GraphError

WORDS = st.lists(st.sampled_from("abcd"), max_size=12)


def longest(a: list[str], b: list[str]) -> int:
    """Return the length of a longest common subsequence, by the textbook table."""
    row = [0] * (len(b) + 1)
    for item in a:
        before = row.copy()
        for j, other in enumerate(b, 1):
            row[j] = before[j - 1] + 1 if item == other else max(before[j], row[j - 1])
    return row[-1]


@settings(max_examples=300, deadline=None)
@given(WORDS, WORDS)
def test_the_largest_number_of_events_is_matched(a: list[str], b: list[str]) -> None:
    found = positions(a, b)
    matched = np.flatnonzero(found >= 0)
    assert len(matched) == longest(a, b)
    assert (np.diff(found[matched]) > 0).all()
    assert [a[i] for i in matched] == [b[j] for j in found[matched]]


def test_equal_steps_are_equal() -> None:
    events = [f"op{i % 7}" for i in range(1000)]
    assert positions(events, events).tolist() == list(range(1000))


def test_a_branch_taken_in_one_step_only_is_absent_in_the_other() -> None:
    plain = ["a", "b", "c", "d", "e"]
    branch = ["a", "b", "x", "y", "c", "d", "e"]
    assert positions(branch, plain).tolist() == [0, 1, -1, -1, 2, 3, 4]
    assert positions(plain, branch).tolist() == [0, 1, 4, 5, 6]


def test_a_long_step_with_scattered_differences() -> None:
    rng = random.Random(0)
    events = [f"op{rng.randrange(20)}" for _ in range(4000)]
    other = list(events)
    for _ in range(40):
        other.insert(rng.randrange(len(other)), f"op{rng.randrange(20)}")
        del other[rng.randrange(len(other))]
    found = positions(events, other)
    matcher = SequenceMatcher(None, events[:500], other[:500], autojunk=False)
    assert (found >= 0).sum() >= len(events) - 40
    assert (found[:500] >= 0).sum() >= sum(m.size for m in matcher.get_matching_blocks()) - 45


def test_steps_with_nothing_in_common() -> None:
    assert positions(["a"] * 50, ["b"] * 50, most_differences=20).tolist() == [-1] * 50
    assert positions([], ["b"]).tolist() == []


def step(names: str, length: int = 10) -> StepEvents:
    """Return consecutive events of `length` ns each."""
    starts = np.arange(len(names), dtype=np.int64) * length
    return StepEvents(tuple(names), starts, starts + length // 2, len(names) * length)


def test_operators_that_raised_are_left_out() -> None:
    reference = "abcdefghijklmnopqrstuvwxyz"
    found = align(reference, [step(reference[:5] + "!" + reference[5:])])
    assert found.unaligned == 0
    assert not found.others.any()
    assert found.start_ns[0].tolist() == [*range(0, 50, 10), *range(60, 270, 10)]


def test_whole_steps_suffice_if_most_are_whole() -> None:
    found = align("abcd", [step("abcd", 10), step("abcd", 20), step("abxd")])
    assert found.unaligned == 0
    assert found.length_ns.tolist() == [40, 80]


def test_parts_of_steps_count_if_few_are_whole() -> None:
    found = align("abcd", [step("abcd"), step("abxcd"), step("abd"), step("abd")])
    assert len(found.length_ns) == 4
    assert np.isnan(found.start_ns[2:, 2]).all()
    assert np.isfinite(found.start_ns[:, [0, 1, 3]]).all()
    # The second step has an x between b and c; in the third, b and d are adjacent.
    assert found.others[1].tolist() == [False, False, True, False, False]
    assert 0 < found.unaligned < 0.2


def test_each_path_through_the_model_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, ...]] = []

    def counted(reference: Sequence[str], other: Sequence[str]) -> NDArray[np.int64]:
        compared.append(tuple(other))
        return positions(reference, other)

    monkeypatch.setattr("slipstream.capture.events.positions", counted)
    # The last one is too short to be compared at all.
    ways = [*["abcde", "abde"] * 4, "ab"]
    found = align("abcde", [step(names) for names in ways])
    assert sorted(compared) == [tuple("abcde"), tuple("abde")]
    assert len(found.length_ns) == 8


def test_steps_with_little_in_common_are_refused_with_the_position() -> None:
    with pytest.raises(GraphError, match=r"\boperator 1\b.*\bb\b.*\bx\b") as caught:
        align("abcd", [step("axyz"), step("axyz")])
    assert " 25 %" in caught.value.what
    assert caught.value.remedy


def test_an_exhausted_iterator_does_not_count_as_the_loader() -> None:
    names = ("next", "next", "stack", "mm")
    start = np.array([0, 10, 12, 40], np.int64)
    epoch_end = StepEvents(names, start, np.array([5, 30, 20, 50], np.int64), 60)
    found = align(names[1:], [epoch_end], np.array([-1, 0, -1]))
    assert found.start_ns[0].tolist() == [10, 12, 40]
    assert found.end_ns[0].tolist() == [30, 20, 50]


def test_only_steps_of_similar_length_are_compared() -> None:
    lengths = [20, 21, 22, 60, 90, 120, 150]
    found = align("ab" * 10, [step("ab" * (n // 2)) for n in lengths])
    assert len(found.length_ns) == 3
    assert found.unaligned > 0.4
