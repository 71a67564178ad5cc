"""Launches: the variation between processes of one side is part of the interval."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import made_up
import numpy as np
import pytest

from slipstream.cli import prove as prove_command
from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure import _codec as codec
from slipstream.measure import runner, statistics
from slipstream.measure.arms import Arm, ArmEndedError, CommandArm, Home, Sample, WorkerArm
from slipstream.measure.claims import claims, headline
from slipstream.measure.comparison import Comparison, compare
from slipstream.measure.launches import (
    IN_THIS_PROCESS,
    LAUNCH,
    MAX_LAUNCHES,
    LaunchCost,
    first_launch,
    launch_of,
    launch_spreads,
    launch_starts,
    launches_that_fit,
    spread_sentence,
    why_one_process,
)
from slipstream.measure.records import (
    ArmRecord,
    Claim,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    Verdict,
)
from slipstream.measure.render import comparison_table, rows_payload
from slipstream.measure.runner import Progress, RunPlan, run
from slipstream.measure.sequential import nominal_error
from slipstream.measure.statistics import Floats
from slipstream.measure.store import Store
from slipstream.units import format_duration
from slipstream.verbs.proving.summary import summary_table

ENVIRONMENT = Environment({}, "env")
QUICK = RunPlan(minimum_warmup_s=0.0, maximum_warmup_s=0.0, red_factor=1.0)
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}


# The interval.


def launches_of(
    rng: np.random.Generator, count: int, blocks: int, spread: float, noise: float = 0.03
) -> list[Floats]:
    """Return log ratios of two equal sides, whose processes differ by `spread`."""
    between = rng.normal(0, spread, count) - rng.normal(0, spread, count)
    return [mean + rng.normal(0, noise, blocks) for mean in between]


@pytest.mark.parametrize(
    ("count", "widest"),
    # Known to be possible: 1.9 of three, because they are few (see the module `statistics`).
    [(3, 1.9), (4, 1.5), (5, 1.3), (6, 1.3)],
)
def test_intervals_cover_any_variation_between_launches_at_little_cost_without_it(
    count: int, widest: float
) -> None:
    rng, runs, blocks = np.random.default_rng(count), 1000, 20
    today = 1 - nominal_error(
        count * blocks, ExperimentSettings("a").looks, 0.05, at_planned_look=False
    )
    for spread in (0.0, 0.03, 0.1):
        streams = [launches_of(rng, count, blocks, spread) for _ in range(runs)]
        found = [statistics.launches_interval(stream, 0.95) for stream in streams]
        covered = sum(not interval.excludes(0.0) for interval in found)
        # Of a true 95 %, fewer than 93 % come once in 500 times.
        assert covered >= 0.93 * runs, spread
        pooled = [statistics.median_interval(np.concatenate(stream), today) for stream in streams]
        width = np.mean([interval.high - interval.low for interval in found])
        if not spread:
            assert width <= widest * np.mean([interval.high - interval.low for interval in pooled])


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_one_odd_launch_neither_moves_the_estimate_nor_decides_the_verdict(count: int) -> None:
    rng = np.random.default_rng(0)
    launches = launches_of(rng, count, 20, 0.0, noise=0.01)
    launches[1] -= 0.25
    found = statistics.launches_interval(launches, 0.95)
    assert abs(found.estimate) < 0.01 if count != 4 else abs(found.estimate) < 0.02
    assert not found.excludes(0.0)
    assert found.low < -0.1
    assert found.estimator == statistics.BETWEEN_LAUNCHES
    assert statistics.median_interval(launches[1], 0.95).excludes(0.0)


def test_launches_equal_by_chance_are_no_narrower_than_their_blocks_allow() -> None:
    values = np.random.default_rng(0).normal(0, 0.05, 30)
    launches = [values - np.median(values)] * 4
    found = statistics.launches_interval(launches, 0.95)
    pooled = statistics.median_interval(np.concatenate(launches), 0.95)
    assert found.high - found.low >= pooled.high - pooled.low > 0
    assert found.estimator == "median_of_launches"
    assert statistics.launches_excess(launches, 0.95) == 0.0


def test_values_constant_within_a_launch_have_the_spread_between_launches() -> None:
    found = statistics.launches_interval([np.full(6, value) for value in (1.0, 2.0, 3.0)], 0.95)
    # Student's t with two degrees of freedom, at a standard error of 1 / sqrt(3).
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    same = statistics.launches_interval([np.full(6, 2.0)] * 3, 0.95)
    assert (same.low, same.estimate, same.high) == (2.0, 2.0, 2.0)


# Records with launches.


def experiment(
    factors: dict[str, list[float]], blocks: int = 20, noise: float = 0.01, **settings: object
) -> Experiment:
    """Arms whose launches cost `factors` times as much; "a" is the baseline, which has a guard."""
    rng = np.random.default_rng(3)
    count = len(factors["a"])
    machine = rng.lognormal(0, 0.1, count * blocks)
    columns = {
        (arm, "cpu", Phase.MEASURE): made_up.series(
            1e7 * np.repeat(of_launch, blocks) * machine * rng.lognormal(0, noise, len(machine))
        )
        for arm, of_launch in factors.items()
    }
    own = columns["a", "cpu", Phase.MEASURE].values[::5]
    guard = own * rng.lognormal(0, noise, len(own))
    columns["a'", "cpu", Phase.MEASURE] = made_up.series(guard, np.arange(len(machine))[::5])
    starts = [Event(n * blocks, LAUNCH, {"launch": n + 1, "of": count}) for n in range(count)]
    stop = Event(count * blocks, "stop", {"reason": "launches"})
    options: dict[str, object] = {"primary": "cpu", "launches": count, **settings}
    return Experiment(
        title="made up",
        created=made_up.CREATED,
        environment=ENVIRONMENT,
        settings=ExperimentSettings("a", **options),  # type: ignore[arg-type]
        arms=tuple(ArmRecord(arm) for arm in factors),
        series=columns,
        events=(*(starts if count > 1 else ()), stop),
    )


ODD = {"a": [1.28, 1.0, 1.0, 1.0, 1.0], "b": [1.0] * 5, "fast": [0.5] * 5}


def carried(made: Experiment) -> dict[str, Claim]:
    return {claim.arm: claim for claim in headline(claims(made))}


def test_one_odd_process_of_the_baseline_does_not_decide_the_table() -> None:
    found = carried(experiment(ODD))
    assert found["b"].ratio == pytest.approx(1.0, abs=0.01)
    assert found["b"].low < 0.95
    assert found["b"].high > 1.0
    assert (found["b"].verdict, found["b"].further_blocks) == (Verdict.INCONCLUSIVE, None)
    assert found["fast"].verdict is Verdict.FASTER
    assert {claim.launches for claim in found.values()} == {5}
    # That process alone makes everything faster, and its own guard does not detect it.
    alone = claims(experiment({arm: of_launch[:1] for arm, of_launch in ODD.items()}))
    assert {claim.verdict for claim in headline(alone)} == {Verdict.FASTER}
    assert {claim.verdict for claim in alone if claim.arm == "a'"} <= {
        Verdict.EQUIVALENT, Verdict.INCONCLUSIVE,
    }  # fmt: skip


def test_the_guard_compares_one_process_with_itself() -> None:
    spread = experiment({"a": [1.0, 1.3, 0.8, 1.1], "b": [1.0, 0.9, 1.2, 1.0]})
    level = experiment({"a": [1.0] * 4, "b": [1.0] * 4})
    first, second = (
        next(claim for claim in claims(made) if claim.arm == "a'") for made in (spread, level)
    )
    assert (first.low, first.high) == pytest.approx((second.low, second.high), rel=1e-12)
    assert first.verdict is not Verdict.UNTRUSTWORTHY


def test_a_statistic_of_blocks_gets_the_variation_of_launches() -> None:
    pair = {"a": ODD["a"], "b": ODD["b"]}
    made = replace(experiment(pair, derived=("throughput", "cpu_p90")))
    series = {
        (arm, metric, phase): values
        for (arm, _, phase), values in made.series.items()
        for metric in ("cpu", "wall")
    }
    made = replace(made, series=series)
    apart = {claim.metric: claim for claim in claims(made) if claim.arm == "b"}
    together = {
        claim.metric: claim
        for claim in claims(replace(made, events=made.events[-1:]))
        if claim.arm == "b"
    }
    for metric in ("throughput", "cpu_p90"):
        assert apart[metric].ratio == together[metric].ratio
        assert apart[metric].low < together[metric].low
        assert apart[metric].high > together[metric].high


def test_the_side_whose_processes_differ_is_reported() -> None:
    made = experiment(ODD)
    spreads = {spread.arm: spread for spread in launch_spreads(made, "cpu")}
    assert len(spreads["a"].medians) == 5
    assert spreads["a"].range == pytest.approx(0.28, abs=0.1)
    comparison = Comparison.of(made)
    sentence = spread_sentence(made, "cpu")
    assert sentence.startswith("a ")
    for median in (min(spreads["a"].medians), max(spreads["a"].medians)):
        assert format_duration(median) in sentence
    assert sentence in comparison_table(made, comparison.claims).notes
    summary = summary_table(comparison)
    assert sentence in summary.notes
    assert any("in 5 processes a side" in note for note in summary.notes)
    payload = rows_payload(made, (), ())
    assert not any(event["kind"] == LAUNCH for event in payload["warnings"])


def test_processes_that_do_not_differ_are_not_mentioned() -> None:
    rng = np.random.default_rng(1)
    mentions = 0
    for seed in range(40):
        made = experiment({"a": [1.0] * 5, "b": [1.0] * 5}, noise=0.02)
        series = {
            key: made_up.series(1e7 * rng.lognormal(0, 0.02, 100))
            for key in made.series
            if key[0] != "a'"
        }
        mentions += bool(spread_sentence(replace(made, series=series), "cpu"))
        assert seed == 0 or mentions <= 8  # two sides, about one in twenty each


def test_records_without_launches_are_one_launch() -> None:
    made = made_up.experiment()
    assert launch_starts(made.events) == ()
    assert set(launch_of(np.arange(60, dtype=np.int32), ())) == {0}
    (claim,) = headline(claims(made))
    assert (claim.launches, claim.estimator) == (1, "median_order_statistic")
    stored = asdict(ExperimentSettings("a"))
    del stored["launches"]
    assert codec.from_json(ExperimentSettings, json.dumps(stored)).launches == 1
    of_claim = asdict(made_up.claim())
    del of_claim["launches"]
    assert codec.from_json(Claim, codec.to_json(of_claim)) == made_up.claim()


# The number of launches.


def cost(left_s: float = 60.0, opening_s: float = 1.0, **more: float) -> LaunchCost:
    times = {"warming_s": 0.5, "longest_warming_s": 12.0, "block_s": 0.1, **more}
    return LaunchCost(left_s, opening_s, **times)


@pytest.mark.parametrize(
    ("of_cost", "expected"),
    [
        (cost(), MAX_LAUNCHES),
        (cost(opening_s=7.0), 5),
        (cost(opening_s=14.0), 3),
        (cost(opening_s=15.0), 1),
        # Too few blocks in each, or too long a warm-up.
        (cost(block_s=3.0), 3),
        (cost(block_s=4.0), 1),
        (cost(warming_s=40.0, longest_warming_s=40.0), 3),
    ],
)
def test_launches_are_limited_so_that_opening_takes_half_the_time(
    of_cost: LaunchCost, expected: int
) -> None:
    assert launches_that_fit(MAX_LAUNCHES, of_cost) == expected


def test_a_single_process_is_reported_with_the_budget_for_three() -> None:
    costly = cost(opening_s=20.0)
    assert re.search(r"\b82\.0 s\b.*\b3\b", why_one_process(costly))
    assert launches_that_fit(MAX_LAUNCHES, replace(costly, left_s=82.0)) == 3
    assert launches_that_fit(MAX_LAUNCHES, cost(), blocks=17) == 1
    assert launches_that_fit(MAX_LAUNCHES, cost(), blocks=18) == 3


def test_the_command_offers_as_many_as_the_library() -> None:
    assert inspect.signature(prove_command.command).parameters["launches"].default == MAX_LAUNCHES


# Running.


class Clock:
    """The runner's clock, which advances only while arms open and are measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    state = SimpleNamespace(
        monotonic=clock.monotonic, strftime=time.strftime, gmtime=time.gmtime,
        get_clock_info=time.get_clock_info,
    )  # fmt: skip
    monkeypatch.setattr(runner, "time", state)
    return clock


class Process(Arm):
    """An arm each of whose processes has a random cost."""

    process: Home = "own"

    def __init__(
        self, name: str, factors: Iterator[float], clock: Clock, *, opening_s: float = 1.0,
        steps: float = math.inf, step_s: float = 0.01, noise: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self.factors, self.clock = factors, clock
        self.opening_s, self.steps, self.step_s = opening_s, steps, step_s
        self.noise, self.random = noise, random.Random(name)
        self.opened = 0
        self.is_open = False
        self.fails_at = 0

    def open(self, timeout_s: float | None) -> None:
        assert not self.is_open
        self.opened += 1
        self.clock.now += self.opening_s
        if self.opened == self.fails_at:
            raise MeasurementError("no memory for another")
        self.is_open, self.factor, self.left = True, next(self.factors), self.steps
        self.notes = ("of eight samples",)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        assert self.is_open
        if not self.left:
            raise ArmEndedError("train.py ended", remedy="let it run longer")
        self.left -= 1
        self.clock.now += self.step_s
        elapsed_ns = 1e9 * self.step_s * self.factor * math.exp(self.random.gauss(0, self.noise))
        return {"wall": elapsed_ns, "cpu": elapsed_ns}

    def close(self) -> None:
        self.is_open = False


def pair(clock: Clock, **more: float) -> list[Process]:
    return [
        Process("a", itertools.cycle([1.0, 1.2, 0.9]), clock, **more),
        Process("b", itertools.cycle([1.1, 0.95]), clock, **more),
    ]


def measured(arms: list[Process], *, plan: RunPlan = QUICK, **settings: object) -> Experiment:
    options: dict[str, object] = {"primary": "wall", "launches": MAX_LAUNCHES, **settings}
    return run(
        arms,
        ExperimentSettings("a", **options),
        environment=ENVIRONMENT,
        plan=plan,  # type: ignore[arg-type]
    )


def stop_reason(made: Experiment) -> str:
    return next(str(e.detail["reason"]) for e in made.events if e.kind == "stop")


def test_arms_are_reopened_within_the_budget_and_every_block_has_its_launch(
    passing: Clock,
) -> None:
    arms = pair(passing)
    made = measured(arms, target_rel_width=1e-9)
    assert [arm.opened for arm in arms] == [6, 6]
    assert not any(arm.is_open for arm in arms)
    # The first opening is in addition to the budget.
    assert passing.now == pytest.approx(62.0, abs=0.5)
    assert stop_reason(made) == "launches"
    assert [e.detail for e in made.events if e.kind == LAUNCH] == [
        {"launch": n, "of": 6} for n in range(1, 7)
    ]
    for arm, expected in (("a", [1.0, 1.2, 0.9] * 2), ("b", [1.1, 0.95] * 3)):
        series = made.series[arm, "wall", Phase.MEASURE]
        launch = launch_of(series.blocks, launch_starts(made.events))
        medians = [float(np.median(series.values[launch == n])) / 1e7 for n in range(6)]
        assert medians == pytest.approx(expected, rel=0.01)
        sizes = np.bincount(launch)
        assert sizes.min() > 0.9 * sizes.max()
    (claim,) = headline(claims(made))
    assert claim.launches == 6
    assert claim.low < 1 < claim.high
    notes = [event.detail["what"] for event in made.events if event.kind == "note"]
    assert notes == ["of eight samples"] * 2


def test_a_look_ends_a_launch_and_the_last_launch_ends_the_run(passing: Clock) -> None:
    arms = pair(passing, noise=0.002)
    progress: list[Progress] = []
    made = run(
        arms, ExperimentSettings("a", primary="wall", launches=6), environment=ENVIRONMENT,
        plan=QUICK, progress=progress.append,
    )  # fmt: skip
    assert launch_starts(made.events) == (0, 10, 20, 30, 40, 50)
    assert stop_reason(made) == "launches"
    assert passing.now < 20
    assert [now.launch for now in progress if now.phase == "setup"][2:] == sorted(
        [*range(2, 7)] * 2
    )
    assert {now.launches for now in progress if now.phase == "measure"} == {6}


def test_costly_opening_leaves_one_launch_which_is_reported(passing: Clock) -> None:
    arms = pair(passing, opening_s=10.0)
    made = measured(arms)
    assert [arm.opened for arm in arms] == [1, 1]
    assert launch_starts(made.events) == ()
    notes = [str(event.detail["what"]) for event in made.events if event.kind == "note"]
    assert any("one process" in note for note in notes)
    # As many as requested: a single one needs no note.
    plain = measured(pair(passing, opening_s=10.0), launches=1)
    assert not any("one process" in str(event.detail) for event in plain.events)


@pytest.mark.parametrize(("until", "launches"), [(math.inf, 3), (45.0, 2)])
def test_at_least_three_launches_are_made_even_if_opening_gets_slower(
    passing: Clock, until: float, launches: int
) -> None:
    arms = pair(passing, opening_s=3.0)

    class Slower(Process):
        def open(self, timeout_s: float | None) -> None:
            super().open(timeout_s)
            self.clock.now += 30.0 * (self.opened > 1)

    arms[1] = Slower("b", itertools.repeat(1.0), passing, opening_s=3.0)
    made = measured(arms, plan=replace(QUICK, until=until), target_rel_width=1e-9)
    # An explicit time limit is respected.
    assert len(launch_starts(made.events)) == launches
    assert stop_reason(made) == "budget"


def test_warm_up_time_counts_all_its_samples(passing: Clock) -> None:
    plan = replace(QUICK, minimum_warmup_s=4.0, maximum_warmup_s=4.0)
    # Four seconds each for two sides leave time for three of the six launches.
    made = measured(pair(passing), plan=plan, target_rel_width=1e-9, budget_s=30.0)
    assert len(launch_starts(made.events)) == 3


def test_blocks_are_divided_among_launches(passing: Clock) -> None:
    plan = replace(QUICK, maximum_blocks=40)
    made = measured(pair(passing), plan=plan, target_rel_width=1e-9, launches=3)
    assert launch_starts(made.events) == (0, 13, 26)
    assert len(made.series["a", "wall", Phase.MEASURE].values) == 40


def test_a_candidate_that_cannot_be_reopened_leaves_and_the_others_continue(
    passing: Clock,
) -> None:
    arms = [*pair(passing), Process("c", itertools.repeat(1.0), passing)]
    arms[2].fails_at = 3
    made = measured(arms, target_rel_width=1e-9)
    (failed,) = [event for event in made.events if event.kind == "failed"]
    assert (failed.detail["arm"], failed.detail["phase"]) == ("c", "setup")
    assert arms[1].opened == len(launch_starts(made.events)) > 3
    assert {claim.arm: claim.launches for claim in headline(claims(made))}["c"] == 2


def test_a_script_that_ends_is_restarted_and_the_run_ended_early(passing: Clock) -> None:
    arms = pair(passing, steps=30)
    made = measured(arms, target_rel_width=1e-9)
    assert [arm.opened for arm in arms] == [6, 6]
    assert (stop_reason(made), made.status) == ("ended", "ended early")
    sizes = np.diff(launch_starts(made.events))
    assert 15 <= sizes.min() <= sizes.max() <= 30


def test_launches_are_stored_and_an_interrupted_run_continues_with_new_ones(
    passing: Clock, tmp_path: Path
) -> None:
    settings = ExperimentSettings("a", primary="wall", launches=3, target_rel_width=1e-9)
    with Store(tmp_path / "r.db") as store:
        arms = pair(passing)
        made = run(arms, settings, environment=ENVIRONMENT, plan=QUICK, sink=store.sink())
        assert launch_starts(store.load("last").events) == launch_starts(made.events)
        assert store.recompute("last") == store.claims("last")
        # Killed: two launches were recorded, without an end.
        cut = replace(made, events=tuple(e for e in made.events if e.kind != "stop"))
        running = runner._Run({arm.name: arm for arm in pair(passing)}, settings, "", ENVIRONMENT,
                              QUICK, None, None, [], {})  # fmt: skip
        running.resume(cut)
        whole = running.run()
    numbers = [event.detail["launch"] for event in whole.events if event.kind == LAUNCH]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert {claim.launches for claim in headline(claims(whole))} == {6}


def test_functions_of_this_process_are_one_launch_which_is_reported() -> None:
    plan = replace(QUICK, maximum_blocks=8)
    functions = {"a": lambda: None, "b": lambda: None}
    found = compare(functions, budget=0.2, plan=plan, environment=ENVIRONMENT)
    assert any(IN_THIS_PROCESS in note for note in found.table().notes)
    commands = [CommandArm(name, "true") for name in "ab"]
    found = compare(
        commands, budget=5.0, plan=replace(QUICK, maximum_blocks=2), environment=ENVIRONMENT
    )
    assert not any("process" in note and "interval" in note for note in found.table().notes)


def test_two_launches_are_refused(passing: Clock) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\b2\b") as caught:
        measured(pair(passing), launches=2)
    assert caught.value.argument == "launches"
    assert re.search(r"\b3\b.*\b1\b", caught.value.remedy or "")


@pytest.mark.full
def test_equal_sides_with_varying_processes_have_a_ratio_of_one(
    forked_children: None, tmp_path: Path
) -> None:
    """Real processes; each draws its cost, with a standard deviation of 10 %."""
    started = str(tmp_path / "started")
    held, alone = 0, 0
    for seed in range(20):
        arms = [
            WorkerArm(name, "workers:draw_luck", "workers:sample_with_luck",
                      arguments={"spread": 0.1, "started": started}, environment=HERE)
            for name in ("as it is", "no-op")
        ]  # fmt: skip
        found = compare(
            arms, budget=600.0, launches=4, seed=seed, environment=ENVIRONMENT,
            plan=replace(QUICK, maximum_blocks=40),
        )  # fmt: skip
        claim = found.ratio("no-op")
        assert claim.launches == 4
        held += claim.low <= 1 <= claim.high
        (only,) = headline(claims(first_launch(found.experiment)))
        alone += only.low <= 1 <= only.high
    # Fewer than 17 of 20 would be significantly below 95 % (one-sided, at 5 %).
    assert held >= 17
    # With one process per side, as before launches, most runs claim a difference of equal sides.
    assert alone <= 10
