"""Rung policies promote the trials of an independent, plain computation, in any order of ends."""

from __future__ import annotations

import math
import random

import pytest

from slipstream.search import Asha, Float, Halving, Hyperband, RungPolicy, Space, State, Trial

SPACE = Space({"x": Float(0, 1)})


def run_policy(
    policy: RungPolicy, curves: list[list[float]], workers: int, seed: int
) -> list[Trial]:
    """Yield trials that end in random order; candidate c has the loss curves[c][rung]."""
    rng = random.Random(seed)
    policy.order = lambda trials: sorted(trials, key=lambda t: (t.values["y"], t.number))
    trials: list[Trial] = []
    origin: dict[int, int] = {}
    running: list[Trial] = []
    new = 0
    while True:
        while len(running) < workers and (slot := policy.ask()) is not None:
            number = len(trials)
            parent = None if slot.parent is None else slot.parent.number
            origin[number] = new if parent is None else origin[parent]
            new += parent is None
            made = Trial(number, SPACE.candidate({"x": 0.5}), slot.fidelity, slot.bracket,
                         slot.rung, parent)  # fmt: skip
            trials.append(made)
            running.append(made)
        if not running:
            return [*trials]
        done = running.pop(rng.randrange(len(running)))
        done.values["y"] = curves[origin[done.number] % len(curves)][done.rung]
        done.state = State.COMPLETE
        policy.tell(done)


def candidates(trials: list[Trial], rung: int) -> set[int]:
    def origin(trial: Trial) -> int:
        return trial.number if trial.parent is None else origin(trials[trial.parent])

    return {origin(trial) for trial in trials if trial.rung == rung}


@pytest.mark.parametrize("workers", [1, 4, 27, 100])
def test_halving_promotes_the_best_of_every_rung_in_any_order(workers: int) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        curves = [[rng.random() for _ in range(4)] for _ in range(27)]
        trials = run_policy(Halving(1, 27), curves, workers, seed)
        assert len(trials) == 27 + 9 + 3 + 1
        # Promoted early, but as after waiting for the whole rung. New candidates keep their
        # order, so that candidate c is the c-th trial without a parent.
        first = [trial for trial in trials if trial.parent is None]
        number = {trial.number: c for c, trial in enumerate(first)}
        alive = set(range(27))
        for rung, keep in ((0, 27), (1, 9), (2, 3), (3, 1)):
            assert {number[candidate] for candidate in candidates(trials, rung)} == alive
            assert len(alive) == keep
            alive = set(sorted(alive, key=lambda c: curves[c][rung])[: keep // 3])


@pytest.mark.parametrize("policy", [Halving(1, 9), Asha(1, 9)], ids=str)
def test_new_trials_start_at_their_lowest_fidelity(policy: RungPolicy) -> None:
    first = policy.ask()
    assert first is not None
    assert (first.fidelity, first.rung, first.parent) == (1, 0, None)


def test_asha_promotes_trials_in_the_best_third_at_that_time() -> None:
    rng = random.Random(1)
    curves = [[rng.random() for _ in range(3)] for _ in range(60)]
    policy = Asha(1, 9, n=60)
    trials = run_policy(policy, curves, 4, 2)
    assert policy.done
    # In the end every trial in the top third of its rung has been promoted, once.
    for rung in (0, 1):
        finished = [trial for trial in trials if trial.rung == rung]
        best = sorted(finished, key=lambda trial: (trial.values["y"], trial.number))[
            : len(finished) // 3
        ]
        promoted = [trial.parent for trial in trials if trial.rung == rung + 1]
        assert {trial.number for trial in best} <= set(promoted)
        assert len(promoted) == len(set(promoted))


def test_certain_promotions_of_asha_occur_in_every_order_of_ends() -> None:
    rng = random.Random(5)
    curves = [[rng.random()] * 4 for _ in range(60)]
    runs, certain = [], []
    for workers, seed in ((1, 0), (4, 1), (60, 2), (60, 3)):
        policy = Asha(1, 27, n=60)
        trials = run_policy(policy, curves, workers, seed)
        runs.append({(trial.values["y"], trial.rung) for trial in trials})
        certain.append({(trial.values["y"], trial.rung) for trial in policy.certain(trials)})
    assert len(certain[0]) == 60 + 20 + 6 + 2
    assert certain[1:] == certain[:-1]
    assert certain[0] <= set.intersection(*runs)
    assert len({frozenset(run) for run in runs}) > 1


def test_hyperband_has_the_papers_brackets() -> None:
    trials = run_policy(Hyperband(1, 81, rounds=1), [[0.1 * r for r in range(5)]], 8, 0)
    sizes = {}
    for trial in trials:
        sizes.setdefault(trial.bracket, {}).setdefault(trial.fidelity, 0)
        sizes[trial.bracket][trial.fidelity] += 1
    # Li et al. 2018, table 1 (R = 81, eta = 3), with the ceilings of their algorithm.
    assert sizes[0] == {1: 81, 3: 27, 9: 9, 27: 3, 81: 1}
    assert sizes[1] == {3: 34, 9: 11, 27: 3, 81: 1}
    assert sizes[2] == {9: 15, 27: 5, 81: 1}
    assert sizes[3] == {27: 8, 81: 2}
    assert sizes[4] == {81: 5}


def test_failed_trials_are_not_promoted_and_block_nothing() -> None:
    policy = Halving(1, 9)
    policy.order = lambda trials: sorted(
        trials, key=lambda t: (t.values.get("y", math.inf), t.number)
    )
    count = 0
    while (slot := policy.ask()) is not None:
        trial = Trial(count, SPACE.candidate({"x": 0.5}), slot.fidelity, 0, slot.rung)
        trial.state = State.COMPLETE if count == 3 else State.FAILED
        trial.values = {"y": 1.0} if count == 3 else {}
        count += 1
        policy.tell(trial)
    assert policy.done
    assert count == 10
