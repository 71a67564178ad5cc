"""Schedulers on the virtual clock: exact where that is known, and never against the rules."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from slipstream.engines.trials import (
    ClusterState,
    TrialSet,
    bound_s,
    makespan,
    scheduler_named,
    simulate,
)
from slipstream.engines.trials.forecast import empty_state, knee, predict, rates_of
from slipstream.engines.trials.timeline import perfetto
from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.search import (
    Asha,
    Budget,
    Cost,
    Float,
    Halving,
    Hyperband,
    Space,
    estimator,
    study,
)

NAMES = ["fifo", "uniform", "fluid", "level"]


def drawn(m: int, seed: int, memory: float = 0.0) -> TrialSet:
    rng = np.random.default_rng(seed)
    return TrialSet.of(
        rng.lognormal(5, 0.6, m), rng.uniform(0.03, 0.15, m), rng.uniform(0.3, 0.9, m),
        rng.uniform(0, memory, m) if memory else None,
    )  # fmt: skip


@pytest.mark.parametrize(("m", "n"), [(7, 3), (9, 3), (1, 4), (40, 8)])
def test_equal_trials_first_come_first_served_take_whole_rounds(m: int, n: int) -> None:
    trials = TrialSet.of(np.full(m, 11.0), np.full(m, 0.1), np.full(m, 0.5))
    assert makespan(trials, n, scheduler_named("fifo")) == pytest.approx(-(-m // n) * 11.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "n"), [(5, 10), (10, 10), (21, 10), (50, 10)])
def test_what_runs_fits_and_all_work_is_done(name: str, m: int, n: int) -> None:
    trials = drawn(m, 1, memory=0.6)
    clock = simulate(trials, n, scheduler_named(name), record=True)
    times = sorted({t for x in clock.intervals for t in (x.start_s, x.end_s)})
    for now in times:
        at = [x for x in clock.intervals if x.start_s <= now + 1e-12 < x.end_s]
        whole = [d for x in at if not x.packed for d in x.devices]
        shared: dict[int, list[int]] = defaultdict(list)
        for x in at:
            if x.packed:
                shared[x.devices[0]].append(x.trial)
        assert len(whole) == len(set(whole))
        assert not set(whole) & set(shared)
        assert len(set(whole) | set(shared)) <= n
        for members in shared.values():
            assert len(members) <= 4
            assert trials.memory[members].sum() <= 0.92
    # Work conserved: of every trial, its rates times their durations, pauses left aside.
    done = np.zeros(m)
    for x in clock.intervals:
        for part_start, part_end in cut(x.start_s, x.end_s, [*times, clock.now_s]):
            rate = trials.rates[x.trial, len(x.devices) - 1]
            if x.packed:
                middle = (part_start + part_end) / 2
                beside = [y.trial for y in clock.intervals
                          if y.packed and y.devices == x.devices
                          and y.start_s <= middle < y.end_s]  # fmt: skip
                rate = 1.0 / max(trials.utilisation[beside].sum(), 1.0)
            done[x.trial] += rate * (part_end - part_start)
    pieces = np.bincount([x.trial for x in clock.intervals], minlength=m)
    once = pieces == 1
    np.testing.assert_allclose(done[once], trials.work_s[once], rtol=1e-9)
    assert (done[~once] >= trials.work_s[~once] * (1 - 1e-9)).all()
    assert clock.now_s >= bound_s(trials, n) * (1 - 1e-9)


def cut(start: float, end: float, times: list[float]) -> list[tuple[float, float]]:
    inside = [start, *sorted(t for t in set(times) if start < t < end), end]
    return list(itertools.pairwise(inside))


@pytest.mark.parametrize("restart_s", [0.0, 15.0])
def test_equal_trials_are_not_resized_forever(
    restart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread, calls = ClusterState.spread, [0]

    def counted(state: ClusterState, i: int, width: int) -> None:
        calls[0] += 1
        assert calls[0] < 1000
        spread(state, i, width)

    monkeypatch.setattr(ClusterState, "spread", counted)
    for m, n, work_s in itertools.product((2, 3, 5, 9), (3, 4, 8, 16), (0.0, 10.0, 60.0)):
        calls[0] = 0
        trials = TrialSet.of(np.full(m, work_s), np.full(m, 0.1), np.ones(m))
        makespan(trials, n, scheduler_named("level"), restart_s=restart_s)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_lone_trial_that_scales_gets_every_device(devices: int) -> None:
    trial = TrialSet.of(np.full(1, 100.0), np.zeros(1), np.ones(1), max_width=devices)
    assert makespan(trial, devices, scheduler_named("level")) == pytest.approx(100 / devices)


def test_an_arrival_gets_a_device_of_a_wide_trial() -> None:
    state = empty_state(2, 8, restart_s=5.0, max_pack=4)
    level, rates = scheduler_named("level"), rates_of(Cost(1.0, gamma=0.05), 8)
    long, short = (state.add(work_s, rates, 1.0, 0.0) for work_s in (300.0, 5.0))

    def pass_time(seconds: float) -> None:
        state.begun[state.running] = True
        state.elapse(seconds)

    state.arrive(np.array([long]))
    level.decide(state)
    assert state.width.tolist()[:2] == [2, 0]
    pass_time(20.0)
    state.arrive(np.array([short]))
    level.decide(state)
    assert state.width.tolist()[:2] == [1, 1]
    pass_time(5.0)
    state.leave(short)
    # The restart has taken 5 s so far; 5 s of computing come before the next one.
    level.decide(state)
    assert state.width[long] == 1
    pass_time(5.0)
    level.decide(state)
    assert state.width[long] == 2
    # Where the wide trial is about to end, waiting is cheaper than a restart.
    pass_time(float(state.finishes(state.running)[0]) - 3.0)
    state.arrive(np.array([state.add(5.0, rates, 1.0, 0.0)]))
    level.decide(state)
    assert state.width[long] == 2


def test_the_same_seed_gives_the_same_events() -> None:
    digests = {
        simulate(drawn(30, 4), 7, scheduler_named("level"), record=True).digest() for _ in range(2)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("n", "per"), [(4, 0.5), (4, 1), (4, 5), (10, 0.5), (10, 1), (10, 5)])
def test_the_level_rule_is_no_worse_than_simpler_ones(n: int, per: float) -> None:
    means = {
        name: np.mean([
            makespan(drawn(int(per * n), seed), n, scheduler_named(name)) for seed in range(4)
        ])
        for name in NAMES
    }  # fmt: skip
    assert means["level"] <= 1.02 * min(means.values())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrialSet.of(np.array([1.0, -2.0]), np.zeros(2), np.ones(2)), "trial 1 has work"),
        (lambda: TrialSet.of(np.ones(1), np.array([np.nan]), np.ones(1)), "trial 0 has rate nan"),
        (lambda: TrialSet.of(np.ones(1), np.zeros(1), np.ones(1), max_width=0), "max_width: 0"),
        (lambda: ClusterState(drawn(2, 0), 0), "0 devices"),
        (lambda: bound_s(drawn(2, 0), 0), "0 devices"),
        (lambda: ClusterState(TrialSet.of(np.ones(1), np.zeros(1), np.ones(1), np.array([0.95]),
                                          names=["big"]), 2), "trial big needs 0.95"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_names_the_trial_and_the_number(make: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        make()


def test_an_unknown_scheduler_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"\blevl\b(.|\n)*\blevel\?"):
        scheduler_named("levl")


SPACE = Space({"x": Float(1.0, 9.0)})


@estimator({"y": ""}, cost=lambda config: Cost(config["x"], 0.08, 0.5, 0.3))
def costly(config: dict[str, Any]) -> float:
    raise AssertionError("a prediction ran a trial")


@pytest.mark.parametrize("rungs", [Halving(1, 27), Asha(1, 27, n=40)])
def test_a_prediction_runs_the_policy_on_a_virtual_clock(rungs: Any) -> None:
    made = study("s", SPACE, "y", estimator=costly, rungs=rungs)
    found = predict(made, [1, 4, 16, 256], record=True)
    takes = [one.makespan_s for one in found]
    assert takes == sorted(takes, reverse=True)
    assert all(one.makespan_s >= one.bound_s for one in found)
    assert knee(found) in (1, 4, 16)
    again = predict(study("s", SPACE, "y", estimator=costly, rungs=rungs), [4])
    assert again[0].makespan_s == found[1].makespan_s
    # The picture has one slice an interval and device, and no two overlap in a row.
    trace = perfetto(found[1].intervals, found[1].rows, "p")["traceEvents"]
    slices = [one for one in trace if one["ph"] == "X"]
    assert len(slices) == sum(len(one.devices) for one in found[1].intervals)
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in slices:
        rows[one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans))


def test_a_trial_fills_its_device_unless_its_cost_says_otherwise() -> None:
    whole = estimator({"y": ""}, cost=lambda config: Cost(2.0))(lambda config: 0.0)
    made = study("s", SPACE, "y", estimator=whole, budget=Budget(trials=3))
    assert predict(made, [1])[0].makespan_s == pytest.approx(6.0)


def test_without_costs_or_an_end_there_is_no_prediction() -> None:
    plain = study("s", SPACE, "y", estimator=lambda c: c["x"], budget=Budget(trials=5))
    with pytest.raises(SlipstreamError, match="0 trials are recorded"):
        predict(plain, [4])
    with pytest.raises(SlipstreamError, match="no end"):
        predict(study("s", SPACE, "y", estimator=costly), [4])
    # What trials took is a cost, too.
    plain.run()
    assert predict(plain, [1, 5])[1].makespan_s < 1.0


@pytest.mark.parametrize("seed", [3, 4, 9])
@pytest.mark.parametrize(
    ("rungs", "budget"), [(Asha(1, 27, n=30), None), (Asha(1, 27), 40), (Hyperband(1, 9), 40)]
)
def test_no_schedule_ends_before_the_bound_of_another(seed: int, rungs: Any, budget: Any) -> None:
    """Schedules of one asynchronous study promote different trials."""
    for devices in (2, 16):
        found = [
            predict(
                study("s", SPACE, "y", estimator=costly, rungs=rungs, seed=seed,
                      budget=Budget(trials=budget)), [devices], scheduler=name, max_width=width,
            )[0]
            for name, width in itertools.product(NAMES, (1, 8))
        ]  # fmt: skip
        wide = [one.bound_s for one in found[1::2]]
        assert 0 < max(wide) <= min(one.makespan_s for one in found) * (1 + 1e-9)


def test_skewed_recorded_times_give_an_interval_and_a_bound() -> None:
    made = study("s", SPACE, "y", estimator=lambda c: c["x"], budget=Budget(trials=40)).run()
    times = np.random.default_rng(2).lognormal(0.0, 1.4, 40)
    for trial, device_s in zip(made.trials, times, strict=True):
        trial.device_s = float(device_s)
    (found,) = predict(made, [2])
    low, high = found.interval_s or (0.0, 0.0)
    real = makespan(
        TrialSet.of(times, np.ones(40), np.ones(40), max_width=1), 2, scheduler_named("fifo")
    )
    assert low < real < high
    assert low < found.makespan_s < high
    assert 0 < found.bound_s <= max(times.sum() / 2, times.max())
    # Medians know nothing of the few long trials, which make most of the time.
    assert found.makespan_s > 1.5 * 20 * np.median(times)
    assert predict(made, [2])[0] == found


def test_a_promoted_trial_costs_the_fidelity_that_it_adds() -> None:
    made = study("s", SPACE, "y", estimator=lambda c: c["x"], rungs=Halving(1, 9)).run()
    for trial in made.trials:
        before = 0.0 if trial.parent is None else made.trials[trial.parent].fidelity
        trial.device_s = 2.0 * (trial.fidelity - before)
    (found,) = predict(made, [1])
    assert found.makespan_s == pytest.approx(2.0 * (9 * 1 + 3 * 2 + 1 * 6))


@pytest.mark.parametrize("seed", range(5))
def test_trials_that_fill_a_device_never_share_one(seed: int) -> None:
    """Side by side they would end hardly earlier, and load and hold their memory at once."""
    work = np.random.default_rng(seed).uniform(0.3, 0.8, 9)
    full = TrialSet.of(work, np.full(9, 0.1), np.ones(9), max_width=1)
    clock = simulate(full, 2, scheduler_named("level"), record=True)
    for one in clock.intervals:
        beside = [
            other for other in clock.intervals
            if set(one.devices) & set(other.devices)
            and other.start_s < one.end_s and one.start_s < other.end_s
        ]  # fmt: skip
        assert beside == [one]
