"""Schedulers on the virtual clock: known makespans, valid placements, and forecasts."""

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
    scheduler_by_name,
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


def random_trials(m: int, seed: int, memory: float = 0.0) -> TrialSet:
    rng = np.random.default_rng(seed)
    return TrialSet.of(
        rng.lognormal(5, 0.6, m), rng.uniform(0.03, 0.15, m), rng.uniform(0.3, 0.9, m),
        rng.uniform(0, memory, m) if memory else None,
    )  # fmt: skip


@pytest.mark.parametrize(("m", "n"), [(7, 3), (9, 3), (1, 4), (40, 8)])
def test_fifo_runs_equal_trials_in_rounds(m: int, n: int) -> None:
    trials = TrialSet.of(np.full(m, 11.0), np.full(m, 0.1), np.full(m, 0.5))
    assert makespan(trials, n, scheduler_by_name("fifo")) == pytest.approx(-(-m // n) * 11.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "n"), [(5, 10), (10, 10), (21, 10), (50, 10)])
def test_placements_fit_and_all_work_is_done(name: str, m: int, n: int) -> None:
    trials = random_trials(m, 1, memory=0.6)
    clock = simulate(trials, n, scheduler_by_name(name), record=True)
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
    # Work is conserved: rates times durations of every trial, ignoring pauses.
    done = np.zeros(m)
    for x in clock.intervals:
        for part_start, part_end in cut(x.start_s, x.end_s, [*times, clock.now_s]):
            rate = trials.rates[x.trial, len(x.devices) - 1]
            if x.packed:
                middle = (part_start + part_end) / 2
                sharing = [y.trial for y in clock.intervals
                          if y.packed and y.devices == x.devices
                          and y.start_s <= middle < y.end_s]  # fmt: skip
                rate = 1.0 / max(trials.utilisation[sharing].sum(), 1.0)
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
        makespan(trials, n, scheduler_by_name("level"), restart_s=restart_s)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_single_scaling_trial_gets_all_devices(devices: int) -> None:
    trial = TrialSet.of(np.full(1, 100.0), np.zeros(1), np.ones(1), max_width=devices)
    assert makespan(trial, devices, scheduler_by_name("level")) == pytest.approx(100 / devices)


def test_arriving_trial_gets_a_device_of_a_wide_one() -> None:
    state = empty_state(2, 8, restart_s=5.0, max_pack=4)
    level, rates = scheduler_by_name("level"), rates_of(Cost(1.0, gamma=0.05), 8)
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
    # The restart took 5 s, so the trial computes for 5 s before it is widened again.
    level.decide(state)
    assert state.width[long] == 1
    pass_time(5.0)
    level.decide(state)
    assert state.width[long] == 2
    # If the wide trial is about to end, waiting is cheaper than a restart.
    pass_time(float(state.finishes(state.running)[0]) - 3.0)
    state.arrive(np.array([state.add(5.0, rates, 1.0, 0.0)]))
    level.decide(state)
    assert state.width[long] == 2


def test_equal_seeds_give_equal_events() -> None:
    digests = {
        simulate(random_trials(30, 4), 7, scheduler_by_name("level"), record=True).digest()
        for _ in range(2)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("n", "per"), [(4, 0.5), (4, 1), (4, 5), (10, 0.5), (10, 1), (10, 5)])
def test_level_is_not_worse_than_simpler_rules(n: int, per: float) -> None:
    means = {
        name: np.mean([
            makespan(random_trials(int(per * n), seed), n, scheduler_by_name(name))
            for seed in range(4)
        ])
        for name in NAMES
    }  # fmt: skip
    assert means["level"] <= 1.02 * min(means.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrialSet.of(np.array([1.0, -2.0]), np.zeros(2), np.ones(2)), "trial 1 has work"),
        (lambda: TrialSet.of(np.ones(1), np.array([np.nan]), np.ones(1)), "trial 0 has rate nan"),
        (lambda: TrialSet.of(np.ones(1), np.zeros(1), np.ones(1), max_width=0), "max_width: 0"),
        (lambda: ClusterState(random_trials(2, 0), 0), "devices: 0"),
        (lambda: bound_s(random_trials(2, 0), 0), "devices: 0"),
        (lambda: ClusterState(TrialSet.of(np.ones(1), np.zeros(1), np.ones(1), np.array([0.95]),
                                          names=["big"]), 2), "trial big needs 0.95"),
    ],
)  # fmt: skip
def test_invalid_values_are_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_refuses_an_unknown_scheduler() -> None:
    with pytest.raises(UnknownNameError, match=r"\blevl\b(.|\n)*\blevel\?"):
        scheduler_by_name("levl")


SPACE = Space({"x": Float(1.0, 9.0)})


@estimator({"y": ""}, cost=lambda config: Cost(config["x"], 0.08, 0.5, 0.3))
def costly(config: dict[str, Any]) -> float:
    raise AssertionError("a prediction ran a trial")


@pytest.mark.parametrize("rungs", [Halving(1, 27), Asha(1, 27, n=40)])
def test_prediction_runs_the_policy_on_a_virtual_clock(rungs: Any) -> None:
    made = study("s", SPACE, "y", estimator=costly, rungs=rungs)
    found = predict(made, [1, 4, 16, 256], record=True)
    takes = [forecast.makespan_s for forecast in found]
    assert takes == sorted(takes, reverse=True)
    assert all(forecast.makespan_s >= forecast.bound_s for forecast in found)
    assert knee(found) in (1, 4, 16)
    again = predict(study("s", SPACE, "y", estimator=costly, rungs=rungs), [4])
    assert again[0].makespan_s == found[1].makespan_s
    # The trace has one slice per interval and device; slices of a row do not overlap.
    trace = perfetto(found[1].intervals, found[1].rows, "p")["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert len(slices) == sum(len(interval.devices) for interval in found[1].intervals)
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in slices:
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans))


def test_trial_has_full_utilisation_by_default() -> None:
    whole = estimator({"y": ""}, cost=lambda config: Cost(2.0))(lambda config: 0.0)
    made = study("s", SPACE, "y", estimator=whole, budget=Budget(trials=3))
    assert predict(made, [1])[0].makespan_s == pytest.approx(6.0)


def test_refuses_to_predict_without_costs_or_an_end() -> None:
    plain = study("s", SPACE, "y", estimator=lambda c: c["x"], budget=Budget(trials=5))
    with pytest.raises(SlipstreamError, match="0 trials are recorded"):
        predict(plain, [4])
    with pytest.raises(SlipstreamError, match="no end"):
        predict(study("s", SPACE, "y", estimator=costly), [4])
    # Recorded times are costs, too.
    plain.run()
    assert predict(plain, [1, 5])[1].makespan_s < 1.0


@pytest.mark.parametrize("seed", [3, 4, 9])
@pytest.mark.parametrize(
    ("rungs", "budget"), [(Asha(1, 27, n=30), None), (Asha(1, 27), 40), (Hyperband(1, 9), 40)]
)
def test_bound_of_a_schedule_holds_for_all_others(seed: int, rungs: Any, budget: Any) -> None:
    """Schedules of one asynchronous study promote different trials."""
    for devices in (2, 16):
        found = [
            predict(
                study("s", SPACE, "y", estimator=costly, rungs=rungs, seed=seed,
                      budget=Budget(trials=budget)), [devices], scheduler=name, max_width=width,
            )[0]
            for name, width in itertools.product(NAMES, (1, 8))
        ]  # fmt: skip
        wide = [forecast.bound_s for forecast in found[1::2]]
        assert 0 < max(wide) <= min(forecast.makespan_s for forecast in found) * (1 + 1e-9)


def test_skewed_recorded_times_give_an_interval_and_a_bound() -> None:
    made = study("s", SPACE, "y", estimator=lambda c: c["x"], budget=Budget(trials=40)).run()
    times = np.random.default_rng(2).lognormal(0.0, 1.4, 40)
    for trial, device_s in zip(made.trials, times, strict=True):
        trial.device_s = float(device_s)
    (found,) = predict(made, [2])
    low, high = found.interval_s or (0.0, 0.0)
    real = makespan(
        TrialSet.of(times, np.ones(40), np.ones(40), max_width=1), 2, scheduler_by_name("fifo")
    )
    assert low < real < high
    assert low < found.makespan_s < high
    assert 0 < found.bound_s <= max(times.sum() / 2, times.max())
    # The few long trials, which medians ignore, take most of the time.
    assert found.makespan_s > 1.5 * 20 * np.median(times)
    assert predict(made, [2])[0] == found


def test_promoted_trial_costs_its_added_fidelity() -> None:
    made = study("s", SPACE, "y", estimator=lambda c: c["x"], rungs=Halving(1, 9)).run()
    for trial in made.trials:
        before = 0.0 if trial.parent is None else made.trials[trial.parent].fidelity
        trial.device_s = 2.0 * (trial.fidelity - before)
    (found,) = predict(made, [1])
    assert found.makespan_s == pytest.approx(2.0 * (9 * 1 + 3 * 2 + 1 * 6))


@pytest.mark.parametrize("seed", range(5))
def test_trials_of_full_utilisation_never_share_a_device(seed: int) -> None:
    """Sharing would gain little, and hold the memory of both."""
    work = np.random.default_rng(seed).uniform(0.3, 0.8, 9)
    full = TrialSet.of(work, np.full(9, 0.1), np.ones(9), max_width=1)
    clock = simulate(full, 2, scheduler_by_name("level"), record=True)
    for interval in clock.intervals:
        overlapping = [
            other for other in clock.intervals
            if set(interval.devices) & set(other.devices)
            and other.start_s < interval.end_s and interval.start_s < other.end_s
        ]  # fmt: skip
        assert overlapping == [interval]
