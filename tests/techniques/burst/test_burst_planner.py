"""The planner of bursts against all plans of random chains and branches, and published profiles."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.burst.planner import BurstLayer, pareto, plan

DEVICES = (1, 2, 4, 8)
Choice = tuple[float, float, int]
"""Time, device time and number of devices."""


def random_layer(rng: np.random.Generator, name: str, branches: Any = ()) -> BurstLayer:
    k = len(DEVICES)
    work = rng.uniform(1, 100) * np.array(DEVICES, float) ** -rng.uniform(0, 1, k)
    move = rng.uniform(0, 20, (k, k)) * (1 - np.eye(k))
    return BurstLayer(name, work, move, rng.uniform(0, 30, (k, k)), branches)


def random_chain(rng: np.random.Generator, layers: int) -> list[BurstLayer]:
    return [random_layer(rng, f"layer {n}") for n in range(layers)]


def moved(layer: BurstLayer, apart: bool) -> np.ndarray:
    moves = layer.apart_ns if apart else layer.move_ns
    assert moves is not None
    return moves


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to divide items into groups."""
    if not items:
        yield []
        return
    for groups in partitions(items[1:]):
        yield [[items[0]], *groups]
        for n, group in enumerate(groups):
            yield [*groups[:n], [items[0], *group], *groups[n + 1 :]]


def every_branch(
    fork: BurstLayer, branch: Sequence[BurstLayer], source: int, target: int, apart: bool
) -> list[Choice]:
    """Return all ways to run a branch between options of the layers around it."""
    g = DEVICES[target]
    if not branch:
        return [(fork.move_ns[source, target], fork.move_ns[source, target] * g, 0)]
    found = []
    for first in range(len(DEVICES)):
        enter = moved(fork, apart)[source, first]
        for last, (time, cost, peak) in every_chain(branch, first):
            leave = moved(branch[-1], apart)[last, target]
            found.append((time + enter + leave, cost + enter * DEVICES[first] + leave * g, peak))
    return found


def every_fork(
    fork: BurstLayer, branches: Sequence[Sequence[BurstLayer]], source: int, target: int
) -> Iterator[Choice]:
    """Yield all ways to run branches: which are simultaneous, and where."""
    occupied = max(DEVICES[source], DEVICES[target])
    for groups in partitions(range(len(branches))):
        # One group is near, or none.
        for near in range(-1, len(groups)):
            options = [
                [every_branch(fork, branches[b], source, target, n != near) for b in group]
                for n, group in enumerate(groups)
            ]
            for chosen in itertools.product(*(itertools.product(*group) for group in options)):
                peaks = [max(choice[2] for choice in group) for group in chosen]
                apart = sum(peak for n, peak in enumerate(peaks) if n != near)
                peak = peaks[near] if near >= 0 else 0
                if apart:
                    peak = max(peak, occupied) + apart
                if peak <= DEVICES[-1]:
                    yield (
                        max(sum(choice[0] for choice in group) for group in chosen),
                        sum(choice[1] for group in chosen for choice in group),
                        peak,
                    )


def every_chain(layers: Sequence[BurstLayer], first: int) -> Iterator[tuple[int, Choice]]:
    """Yield last option and choice of all plans whose first layer has the option `first`."""
    *before, layer = layers
    for option, g in enumerate(DEVICES):
        work = float(layer.work_ns[option])
        if not before:
            if option == first:
                yield option, (work, work * g, g)
            continue
        for source, (time, cost, peak) in every_chain(before, first):
            if layer.branches:
                between: Iterator[Choice] | list[Choice] = every_fork(
                    before[-1], layer.branches, source, option
                )
            else:
                move = float(before[-1].move_ns[source, option])
                between = [(move, move * g, 0)]
            for more_time, more_cost, more_peak in between:
                yield option, (
                    time + more_time + work, cost + more_cost + work * g,
                    max(peak, more_peak, g),
                )  # fmt: skip


def every_plan(layers: Sequence[BurstLayer]) -> list[Choice]:
    return [choice for first in range(len(DEVICES)) for _, choice in every_chain(layers, first)]


def frontier(choices: Sequence[Choice]) -> list[tuple[float, float]]:
    best, found = math.inf, []
    for time, cost, _ in sorted(choices):
        if cost < best * (1 - 1e-9):
            best = cost
            found.append((time, cost))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_chains_are_planned_as_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = random_chain(rng, 5)
    choices = every_plan(layers)
    time, cost, _ = min(choices)
    found = plan(layers, DEVICES)
    assert (found.time_ns, found.device_ns) == pytest.approx((time, cost))
    expected = frontier(choices)
    plans = pareto(layers, DEVICES)
    assert [(p.time_ns, p.device_ns) for p in plans] == [pytest.approx(row) for row in expected]
    for limit in rng.uniform(expected[0][0], expected[-1][0], 3):
        within = min(cost for time, cost, _ in choices if time <= limit)
        assert plan(layers, DEVICES, deadline_ns=limit).device_ns == pytest.approx(within)
    for limit in rng.uniform(expected[-1][1], expected[0][1], 3):
        within = min(time for time, cost, _ in choices if cost <= limit)
        assert plan(layers, DEVICES, device_ns=limit).time_ns == pytest.approx(within)


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0, 4.0])
def test_the_amplification_of_each_layer_is_limited_exactly(limit: float) -> None:
    for seed in range(4):
        layers = random_chain(np.random.default_rng(seed), 5)
        allowed = [
            BurstLayer(
                layer.name,
                np.where(layer.work_ns * DEVICES <= limit * layer.work_ns[0], layer.work_ns, 1e9),
                layer.move_ns,
            )
            for layer in layers
        ]
        assert plan(layers, DEVICES, amplification=limit).time_ns == pytest.approx(
            min(every_plan(allowed))[0]
        )


def forked(rng: np.random.Generator, shape: int) -> list[BurstLayer]:
    """Return chains with two branches, three, a skip connection, or a fork within a branch."""
    first, second = random_chain(rng, 2), random_chain(rng, 1)
    inner = (second[0], random_layer(rng, "inner join", ((), (random_chain(rng, 1)[0],))))
    branches = (
        (tuple(first), tuple(second)),
        (tuple(second), (first[0],), (first[1],)),
        ((), tuple(first)),
        (inner, (first[0],)),
    )[shape]
    return [random_layer(rng, "stem"), random_layer(rng, "join", branches)]


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("seed", range(2))
def test_branches_are_planned_as_by_brute_force(
    shape: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.DEVICES", (1, 2, 6) if shape != 3 else (1, 3))
    layers = forked(np.random.default_rng(seed), shape)
    choices = every_plan(layers)
    assert plan(layers, DEVICES).time_ns == pytest.approx(min(choices)[0])
    found = [(p.time_ns, p.device_ns) for p in pareto(layers, DEVICES)]
    assert found == [pytest.approx(row) for row in frontier(choices)]


def test_simultaneous_branches_run_on_disjoint_devices() -> None:
    free, slow = np.zeros((2, 2)), np.array([10.0, 10.0])
    branches = tuple((BurstLayer(name, slow, free, free),) for name in ("left", "right"))
    stem = BurstLayer("stem", np.ones(2), free, free)
    join = BurstLayer("join", np.ones(2), free, free, branches)
    found = plan([stem, join], (1, 2))
    assert (found.layers, found.time_ns) == (("stem", "left", "right", "join"), 12.0)
    assert sorted(found.first[1:3]) == [0, 1]
    with pytest.raises(InvalidArgumentError, match="simultaneously"):
        found.placement(4)
    with pytest.raises(InvalidArgumentError, match="0 is less than 1"):
        plan([stem], (1, 2)).placement(0)


@pytest.mark.parametrize(
    ("times", "settings", "message"),
    [
        ((np.nan, 1.0), {}, "'layer' has a negative time or NaN"),
        ((1.0, -1.0), {}, "'layer' has a negative time or NaN"),
        ((np.inf, np.inf), {}, "every plan takes infinitely long"),
        ((1.0, 1.0), {"devices": (1, 2.5)}, "2.5 is not an integer"),
        ((1.0, 1.0), {"deadline_ns": np.nan}, "nan is not a time"),
    ],
)
def test_impossible_times_are_refused(
    times: tuple[float, float], settings: dict[str, Any], message: str
) -> None:
    layer = BurstLayer("layer", np.array(times), np.zeros((2, 2)))
    with pytest.raises(InvalidArgumentError, match=message):
        plan([layer], **{"devices": (1, 2), **settings})


def test_a_layer_may_take_no_time() -> None:
    with warnings.catch_warnings(action="error"):
        assert plan([BurstLayer("layer", np.zeros(2), np.zeros((2, 2)))], (1, 2)).time_ns == 0.0
