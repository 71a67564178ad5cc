"""Phases in user-written loops, and as metrics of a sample."""

from __future__ import annotations

import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.measure import phase, phases
from slipstream.measure.arms import CallableArm


@pytest.fixture(autouse=True)
def _empty():
    phases.drain()
    yield
    phases.drain()


def test_phases_add_up_and_are_drained_once():
    for _ in range(3):
        with phase("forward"):
            sum(range(1000))
    found = phases.drain()
    assert set(found) == {"forward.wall", "forward.cpu"}
    assert found["forward.wall"] > 0
    assert phases.drain() == {}


def test_nested_phases_are_refused_with_both_names_and_take_no_longer():
    with phase("step"), phase("backward"):
        sum(range(1000))
    found = phases.drain()
    assert found["step/backward.wall"] <= found["step.wall"]


def test_a_phase_that_raises_is_recorded_and_closed():
    with pytest.raises(ZeroDivisionError), phase("broken"):
        1 / 0  # noqa: B018
    with phase("next"):
        pass
    assert {"broken.wall", "next.wall"} <= set(phases.drain())


def test_recorded_collects_only_the_phases_of_its_body():
    with phase("outside"):
        pass
    with phases.recorded() as found, phase("inside"):
        pass
    assert set(found) == {"inside.wall", "inside.cpu"}
    assert "outside.wall" in phases.drain()


def test_phases_inside_an_arm_are_metrics_of_its_samples_per_call():
    def step():
        with phase("backward"):
            sum(range(1000))

    arm = CallableArm("a", step)
    arm.open(None)
    sample = arm.sample(10, None)
    arm.close()
    assert sample["backward.wall"] <= sample["wall"]


@pytest.mark.parametrize("name", ["", "a/b", "a.b"])
def test_an_ambiguous_name_is_refused(name):
    with pytest.raises(InvalidArgumentError) as error:
        phase(name)
    assert error.value.argument == "name"
    assert f"'{name}'" in error.value.what
