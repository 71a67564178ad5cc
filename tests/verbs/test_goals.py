"""Tests of goals as written on the command line."""

from __future__ import annotations

import pytest

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.verbs.goals import Goal, parse_goal


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("memory<8GiB", Goal("memory", 8 * 2**30)),
        (" memory <= 100MB ", Goal("memory", 100e6)),
        ("latency<10ms", Goal("latency", 10e6)),
        ("LATENCY < 2s", Goal("latency", 2e9)),
        ("cost", Goal("cost")),
    ],
)
def test_parses_goals(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal


@pytest.mark.parametrize(
    "text", ["memory", "cost<3", "latency<", "latency<10GiB", "memory<0", "memory>8GiB", ""]
)
def test_refuses_an_invalid_goal(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_goal(text)
    assert "--goal" in str(caught.value)


def test_the_nearest_goal_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match="memory"):
        parse_goal("memry<8GiB")


def test_limits_are_strict_and_need_a_recorded_peak() -> None:
    memory = Goal("memory", 100.0)
    assert memory.met(1.0, 99)
    assert not memory.met(1.0, 100)
    assert not memory.met(1.0, 0)
    assert Goal("latency", 10.0).met(9.0, 0)
    assert Goal("cost").met(1e9, 0)
