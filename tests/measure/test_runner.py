"""Running an experiment: order, looks, warm-up, failures, interruption, resumption."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError, MeasurementError, StoreError
from slipstream.measure import runner
from slipstream.measure.arms import Arm, ArmEndedError, CallableArm, WorkerArm
from slipstream.measure.claims import claims
from slipstream.measure.gate import Gate, Level, Reading
from slipstream.measure.records import AFTERWARDS, Environment, ExperimentSettings, Phase, Verdict
from slipstream.measure.render import rows_payload
from slipstream.measure.runner import ArmFailedError, RunPlan, run
from slipstream.measure.store import Store

ENVIRONMENT = Environment({}, "env")
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
QUICK = RunPlan(minimum_warmup_s=0.0, maximum_warmup_s=0.2, red_factor=1.0)


class FakeArm(Arm):
    """An arm with made-up samples that logs its turns."""

    def __init__(self, name, values, log=None):
        super().__init__(name)
        self.values = iter(values)
        self.log = log if log is not None else []
        self.open_now = False

    def open(self, timeout_s):
        self.open_now = True

    def sample(self, inner, timeout_s):
        self.log.append(self.name)
        wall = next(self.values)
        if isinstance(wall, BaseException):
            raise wall
        return {"wall": wall, "cpu": wall}

    def close(self):
        self.open_now = False


def lognormal(scale, seed=0, spread=0.01):
    rng = np.random.default_rng(seed)
    return (float(scale * rng.lognormal(0, spread)) for _ in itertools.count())


def measure(arms, *, plan=QUICK, **settings):
    # Made-up samples take no time; analysing them does, on a busy machine.
    options = {"primary": "wall", "budget_s": 60.0, **settings}
    return run(arms, ExperimentSettings("a", **options), environment=ENVIRONMENT, plan=plan)


def stop_reason(experiment):
    return next(e.detail["reason"] for e in experiment.events if e.kind == "stop")


def test_every_block_runs_every_arm_once_and_orders_are_balanced():
    log = []
    arms = [FakeArm(name, lognormal(1e7, seed), log) for seed, name in enumerate("abc")]
    plan = RunPlan(maximum_blocks=60, maximum_warmup_s=0, minimum_warmup_s=0, guard=False)
    experiment = measure(arms, plan=plan, target_rel_width=1e-9)
    turns = log[-180:]
    blocks = [turns[i : i + 3] for i in range(0, 180, 3)]
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert all(order == other[::-1] for order, other in zip(blocks[::2], blocks[1::2], strict=True))
    firsts = Counter(block[0] for block in blocks)
    assert min(firsts.values()) >= 10
    assert stop_reason(experiment) == "blocks"


def test_two_arms_alternate_abba_or_baab():
    orders = runner._orders(["a", "b"], random.Random(0))
    pairs = {"".join(next(orders) + next(orders)) for _ in range(50)}
    assert pairs == {"abba", "baab"}


def test_the_baseline_runs_against_itself_in_a_tenth_of_the_blocks_and_at_least_eight():
    arms = [FakeArm(name, lognormal(1e7, seed)) for seed, name in enumerate("ab")]
    for blocks, expected in ((10, 8), (200, 8 + 19)):
        plan = RunPlan(maximum_blocks=blocks, maximum_warmup_s=0)
        experiment = measure(arms, plan=plan, target_rel_width=1e-9)
        guard = experiment.series["a'", "wall", Phase.MEASURE]
        assert len(guard.values) == expected


def test_it_stops_at_the_first_look_with_a_narrow_interval():
    arms = [FakeArm(name, lognormal(1e7, seed, 0.03)) for seed, name in enumerate("ab")]
    experiment = measure(arms)
    blocks = len(experiment.series["a", "wall", Phase.MEASURE].values)
    assert stop_reason(experiment) == "narrow"
    assert blocks in ExperimentSettings("a").looks
    claim = next(c for c in claims(experiment) if c.carries)
    assert claim.high - claim.low < 0.02 * claim.ratio


def test_it_may_stop_once_the_verdict_is_decided():
    arms = [FakeArm("a", lognormal(1e7, 0, 0.1)), FakeArm("b", lognormal(3e7, 1, 0.1))]
    experiment = measure(arms, stop_when_decided=True, target_rel_width=1e-4)
    assert stop_reason(experiment) == "decided"
    assert len(experiment.series["a", "wall", Phase.MEASURE].values) == 10


def test_the_budget_ends_a_run_that_never_gets_narrow():
    arms = [FakeArm(name, lognormal(1e7, seed, 1.0)) for seed, name in enumerate("ab")]
    experiment = measure(arms, budget_s=0.3, target_rel_width=1e-6)
    assert stop_reason(experiment) == "budget"


def test_an_exhausted_budget_is_enough_for_one_block():
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", lognormal(2e7))]
    experiment = measure(arms, plan=RunPlan(red_factor=1.0), budget_s=1e-9)
    assert stop_reason(experiment) == "budget"
    assert len(experiment.series["b", "wall", Phase.WARMUP].values) == 1
    assert len(experiment.series["b", "wall", Phase.MEASURE].values) == 1
    (claim,) = [c for c in claims(experiment) if c.carries]
    assert 1.8 < claim.ratio < 2.2
    assert claim.verdict is Verdict.INCONCLUSIVE


def test_warm_up_lasts_until_stationary_and_is_stored():
    falling = [3e8 / (i + 1) for i in range(30)] + [1e7] * 10_000
    arms = [FakeArm("a", falling), FakeArm("b", lognormal(1e7))]
    plan = RunPlan(minimum_warmup_s=0, maximum_warmup_s=10, maximum_blocks=12)
    experiment = measure(arms, plan=plan)
    warmup = experiment.series["a", "wall", Phase.WARMUP].values
    assert len(warmup) > 25
    assert warmup.tolist() == falling[: len(warmup)]
    # The last five and the previous five agree within 2 % as soon as the arm has settled.
    assert len(experiment.series["b", "wall", Phase.WARMUP].values) < len(warmup)


def test_short_functions_are_repeated_equally_often_until_a_sample_is_long(clock):
    experiment = measure(
        [CallableArm("a", lambda: clock.work(5e3)), CallableArm("b", lambda: clock.work(1e4))],
        plan=RunPlan(minimum_warmup_s=0, maximum_warmup_s=0.2, maximum_blocks=10, red_factor=1.0),
    )
    (inner,) = {arm.inner for arm in experiment.arms}
    wall = experiment.series["a", "wall", Phase.MEASURE].values
    # Per call, microseconds; per sample, milliseconds.
    assert np.median(wall) < 1e6
    assert np.median(wall) * inner > 2e6


def test_long_functions_are_one_sample_each(clock):
    arms = [CallableArm(name, lambda: clock.wait(6e6)) for name in "ab"]
    experiment = measure(arms)
    assert {arm.inner for arm in experiment.arms} == {1}


def test_the_gate_colour_is_known_for_every_block():
    arms = [FakeArm(name, lognormal(1e7)) for name in "ab"]
    gates = [event for event in measure(arms).events if event.kind == "gate"]
    assert gates[0].block == 0
    assert gates[0].detail["state"] in ("green", "amber", "red")


# Failures.


def test_a_failing_candidate_leaves_and_the_others_continue():
    broken = [1e7] * 30 + [MeasurementError("no memory left")]
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", broken), FakeArm("c", lognormal(1e7, 1))]
    experiment = measure(arms, plan=RunPlan(maximum_warmup_s=0, maximum_blocks=60))
    failed = next(event for event in experiment.events if event.kind == "failed")
    assert failed.detail["arm"] == "b"
    assert "no memory left" in failed.detail["what"]
    assert len(experiment.series["c", "wall", Phase.MEASURE].values) >= 40
    assert 0 < len(experiment.series["b", "wall", Phase.MEASURE].values) < 40
    verdicts = {c.arm: c for c in claims(experiment) if c.carries}
    assert "no memory left" in verdicts["b"].reason


def kept_run(path, arms, **plan):
    """Run `arms` into a store at `path`."""
    settings = ExperimentSettings("a", primary="wall", target_rel_width=1e-9)
    with Store(path) as store:
        return run(
            arms,
            settings,
            environment=ENVIRONMENT,
            plan=RunPlan(maximum_warmup_s=0, **plan),
            sink=store.sink(),
        )


def test_an_arm_that_ends_stops_the_run_and_its_blocks_count(tmp_path):
    end = ArmEndedError("train.py ended", remedy="more epochs")
    arms = [FakeArm("a", [*[1e7] * 40, end]), FakeArm("b", lognormal(8e6))]
    experiment = kept_run(tmp_path / "r.db", arms)
    assert (stop_reason(experiment), experiment.status) == ("ended", "ended early")
    (claim,) = [c for c in claims(experiment) if c.carries]
    assert (claim.verdict, claim.metric) == (Verdict.FASTER, "wall")
    (note,) = [e.detail["what"] for e in experiment.events if e.kind == "note"]
    assert str(note).startswith(end.what)
    assert re.search(rf"\b{claim.blocks}\b.*{end.remedy}$", str(note))
    with Store(tmp_path / "r.db") as store:
        assert store.load("last").status == "ended early"
        assert store.recompute("last")
    assert not any(arm.open_now for arm in arms)


@pytest.mark.parametrize(
    ("samples", "what"),
    [(5, r"\bended: .*\bblocks\b.*\(4\)"), (0, r"\bended, before\b")],
)
def test_an_arm_that_ends_too_early_is_an_error_recorded_in_the_store(tmp_path, samples, what):
    end = ArmEndedError("train.py ended", remedy="more epochs")
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", [*[8e6] * samples, end])]
    with pytest.raises(ArmFailedError, match=what) as error:
        kept_run(tmp_path / "r.db", arms)
    assert error.value.remedy == end.remedy
    with Store(tmp_path / "r.db") as store:
        assert store.load("last").status == store.list()[0].status == "failed"


def test_an_arms_facts_about_its_numbers_are_stored():
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", lognormal(1e7, 1))]
    arms[1].notes = ("twice the samples",)
    experiment = measure(arms, plan=RunPlan(maximum_warmup_s=0, maximum_blocks=8))
    notes = [event.detail for event in experiment.events if event.kind == "note"]
    assert notes == [{"arm": "b", "what": "twice the samples"}]


def test_failure_of_the_last_candidate_names_it_and_keeps_the_blocks():
    broken = [1e7] * 20 + [MeasurementError("no memory left")]
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", broken)]
    with pytest.raises(ArmFailedError, match=r"'b'.*no memory left") as error:
        measure(arms, target_rel_width=1e-9)
    assert error.value.arm == "b"
    assert error.value.block > 0
    assert error.value.phase == "measure"
    partial = error.value.experiment
    assert len(partial.series["a", "wall", Phase.MEASURE].values) == error.value.block + 1
    assert not any(arm.open_now for arm in arms)


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        ("workers:raises_at", "the loss is not a number"),
        ("workers:hangs_at", r"\b2 s\b"),
        ("workers:ends_at", "code 3"),
        ("workers:changes_shape_at", r"\bextra\b"),
    ],
)
def test_a_failing_worker_is_named_with_block_and_phase(sample, what):
    fatal = 16

    class Patient(WorkerArm):
        """A busy machine may delay answers."""

        calls = 0

        def open(self, timeout_s):
            super().open(600.0)

        def sample(self, inner, timeout_s):
            self.calls += 1
            hangs = self.name == "b" and self.calls == fatal
            return super().sample(inner, timeout_s if hangs else 600.0)

    good = Patient("a", "workers:setup", "workers:sample", environment=HERE)
    bad = Patient("b", "workers:setup", sample, sample_arguments={"call": fatal}, environment=HERE)
    plan = RunPlan(timeout_s=2.0, maximum_warmup_s=0, minimum_warmup_s=0, red_factor=1.0)
    with pytest.raises(ArmFailedError, match=what) as error:
        measure([good, bad], plan=plan, target_rel_width=1e-9)
    assert (error.value.arm, error.value.phase) == ("b", "measure")
    assert error.value.block == 14
    stored = error.value.experiment
    assert len(stored.series["b", "wall", Phase.MEASURE].values) == 14
    assert len(stored.series["a", "wall", Phase.MEASURE].values) == 15


def test_a_function_that_caches_its_first_result_is_detected():
    class Cached(FakeArm):
        repeatable = True

        def sample(self, inner, timeout_s):
            # Fifty calls take no longer than one.
            return {"wall": 1e5 / inner, "cpu": 1e5 / inner}

    arms = [Cached("a", []), Cached("b", [])]
    with pytest.raises(ArmFailedError, match=r"'[ab]'") as error:
        measure(arms, plan=RunPlan(minimum_warmup_s=0, maximum_warmup_s=0))
    assert error.value.phase == "calibrate"
    calls, fewer = map(int, re.findall(r"\b\d+\b", error.value.what))
    assert fewer == calls // 4
    assert re.search(r"\bfunction caches its result\b", error.value.remedy or "")


@pytest.mark.parametrize("repeatable", [(True, True), (True, False), (False, False)])
def test_samples_are_repeated_only_if_every_arm_allows(repeatable):
    arms = [FakeArm(name, lognormal(1e5)) for name in "ab"]
    for arm, can in zip(arms, repeatable, strict=True):
        arm.repeatable = can
    experiment = measure(arms, plan=replace(QUICK, maximum_blocks=10), target_rel_width=1e-9)
    calibrated = [
        event.detail["inner"] > 1 for event in experiment.events if event.kind == "calibrated"
    ]
    assert calibrated == [True] * all(repeatable)


@pytest.mark.parametrize(
    ("names", "options", "what"),
    [
        (["a"], {}, "^arms: "),
        (["a", "a"], {}, "^arms: 'a'"),
        (["b", "c"], {}, "^baseline: .*'a'"),
        (["a", "a'"], {}, "^arms: .*'a''"),
        (["a", "b"], {"budget_s": 0.0}, "^budget: "),
        (["a", "b"], {"target_rel_width": 0.0}, "^target: "),
    ],
)
def test_an_invalid_request_is_refused_before_anything_runs(names, options, what):
    arms = [FakeArm(name, []) for name in names]
    with pytest.raises(InvalidArgumentError, match=what):
        measure(arms, **options)


def test_ctrl_c_keeps_measured_blocks_and_closes_the_arms(tmp_path):
    values = itertools.chain([1e7] * 25, [KeyboardInterrupt()])
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", values)]
    with Store(tmp_path / "r.db") as store:
        with pytest.raises(KeyboardInterrupt) as error:
            run(
                arms,
                ExperimentSettings("a", primary="wall", target_rel_width=1e-9),
                environment=ENVIRONMENT,
                plan=RunPlan(maximum_warmup_s=0),
                sink=store.sink(),
            )
        stored = store.load("last")
        with pytest.raises(StoreError, match="cannot be resumed"):
            store.resume("last")
    assert (stop_reason(stored), stored.status) == ("interrupted", "interrupted")
    blocks = len(stored.series["b", "wall", Phase.MEASURE].values)
    raised: Any = error.value
    assert blocks == len(raised.experiment.series["b", "wall", Phase.MEASURE].values) > 10
    assert not any(arm.open_now for arm in arms)


def test_a_stored_claim_is_recomputed_to_the_last_digit(tmp_path):
    arms = [FakeArm(name, lognormal(1e7, seed, 0.05)) for seed, name in enumerate("abc")]
    with Store(tmp_path / "r.db") as store:
        run(
            arms,
            ExperimentSettings(
                "a", primary="wall", budget_s=0.5, derived=("throughput", "wall_p90")
            ),
            environment=ENVIRONMENT,
            plan=QUICK,
            sink=store.sink(),
        )
        assert store.recompute("last") == store.claims("last")


_KILLED = """
import sys, time
from slipstream.measure.arms import CallableArm
from slipstream.measure.records import AFTERWARDS, Environment, ExperimentSettings
from slipstream.measure.runner import RunPlan, run
from slipstream.measure.store import Store

arms = [CallableArm(name, lambda: time.sleep(0.005)) for name in "ab"]
said = lambda now: print(now.block, flush=True) if now.phase == "measure" else None
run(arms, ExperimentSettings("a", target_rel_width=1e-9), environment=Environment({}, "env"),
    plan=RunPlan(maximum_warmup_s=0), sink=Store(sys.argv[1]).sink(), progress=said)
"""


def test_a_killed_run_loses_at_most_its_running_block_and_can_resume(tmp_path):
    path = tmp_path / "r.db"
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    done = 0
    while done < 15:
        done = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    done = max([done, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    with Store(path) as store:
        stored = store.load("last")
        assert stored.status == "interrupted"
        blocks = len(stored.series["a", "wall", Phase.MEASURE].values)
        assert done <= blocks <= done + 1
        arms = [CallableArm(name, lambda: time.sleep(0.005)) for name in "ab"]
        elsewhere = Environment({"cpu.model": "another"}, "other")
        with pytest.raises(InvalidArgumentError, match="differs in"):
            runner.resume(arms, store, stored.experiment_id, environment=elsewhere)
        plan = RunPlan(maximum_warmup_s=0, maximum_blocks=blocks + 5)
        runner.resume(arms, store, stored.experiment_id, environment=ENVIRONMENT, plan=plan)
        whole = store.load(stored.experiment_id)
        assert whole.status == "complete"
        numbers = whole.series["a", "wall", Phase.MEASURE].blocks
        assert numbers.tolist() == list(range(blocks + 5))


def test_progress_includes_the_claims_of_the_last_look():
    progress = []
    arms = [FakeArm(name, lognormal(1e7, seed, 0.1)) for seed, name in enumerate("ab")]
    run(
        arms,
        ExperimentSettings("a", primary="wall", budget_s=60.0, target_rel_width=1e-9),
        environment=ENVIRONMENT,
        plan=RunPlan(maximum_warmup_s=0, maximum_blocks=25),
        progress=progress.append,
    )
    phases = [now.phase for now in progress]
    assert phases[0] == "setup"
    assert phases[-1] == "measure"
    assert [len(now.claims) > 0 for now in progress if now.phase == "measure"][9:] == [True] * 16
    assert all(now.seconds_left >= 0 for now in progress)


@pytest.mark.parametrize("level", [Level.RED, Level.GREEN])
def test_time_beyond_the_budget_needs_a_reported_reason(monkeypatch, level):
    monkeypatch.setattr(Gate, "read", lambda self: Reading(level))
    seen = []
    plan = RunPlan(maximum_warmup_s=0, minimum_warmup_s=0, maximum_blocks=3, red_factor=1.5)
    arms = [FakeArm("a", lognormal(1e7)), FakeArm("b", lognormal(1e7, 1))]
    run(arms, ExperimentSettings("a", primary="wall", budget_s=5.0), environment=ENVIRONMENT,
        plan=plan, progress=seen.append)  # fmt: skip
    left = [now for now in seen if now.phase == "measure"]
    assert len(left) == 3
    for now in left:
        assert (now.seconds_left > 5.0) == bool(now.widened) == (level is Level.RED)


class Showing(FakeArm):
    """An arm with a result, or a failure, after all timing."""

    def __init__(self, name, values, shown):
        super().__init__(name, values)
        self.shown = shown

    def afterwards(self, timeout_s):
        assert self.open_now
        if isinstance(self.shown, BaseException):
            raise self.shown
        return self.shown


def test_results_shown_afterwards_are_stored_and_their_failure_costs_nothing(tmp_path):
    arms = [
        FakeArm("a", lognormal(1e6)),
        Showing("b", lognormal(1e6, 1), {"found": [1.5, None]}),
        Showing("c", lognormal(1e6, 2), MeasurementError("it could not be seen")),
    ]
    settings = ExperimentSettings(baseline="a", budget_s=20.0)
    with Store(tmp_path / "results.db") as store:
        found = run(
            arms, settings, environment=ENVIRONMENT, plan=replace(QUICK, maximum_blocks=4),
            sink=store.sink(),
        )  # fmt: skip
        stored = store.load("last")
    for experiment in (found, stored):
        (shown,) = [event for event in experiment.events if event.kind == AFTERWARDS]
        assert dict(shown.detail) == {"arm": "b", "found": [1.5, None]}
        (note,) = [event.detail for event in experiment.events if event.kind == "note"]
        assert note["arm"] == "c"
        assert re.fullmatch(r"c\b.*\bcould not\b.*", str(note["what"]))
        assert experiment.status == "complete"
    assert not any(arm.open_now for arm in arms)
    payload = rows_payload(found, (), ())
    assert not any(warning["kind"] == AFTERWARDS for warning in payload["warnings"])


def test_a_time_limit_ends_the_run_before_its_budget() -> None:
    arms = [FakeArm("a", lognormal(1e6)), Showing("b", lognormal(1e6, 1), {"shown": 1})]
    found = run(
        arms, ExperimentSettings(baseline="a", budget_s=1e6), environment=ENVIRONMENT,
        plan=replace(QUICK, until=time.monotonic()),
    )  # fmt: skip
    assert stop_reason(found) == "budget"
    assert not [event for event in found.events if event.kind == AFTERWARDS]


def test_ctrl_c_after_the_last_block_leaves_a_complete_run(tmp_path):
    arms = [
        FakeArm("a", lognormal(1e6)),
        Showing("b", lognormal(1e6, 1), {"found": 1}),
        Showing("c", lognormal(1e6, 2), KeyboardInterrupt()),
    ]
    settings = ExperimentSettings(baseline="a", budget_s=20.0)
    with Store(tmp_path / "results.db") as store:
        with pytest.raises(KeyboardInterrupt) as error:
            run(
                arms, settings, environment=ENVIRONMENT, plan=replace(QUICK, maximum_blocks=4),
                sink=store.sink(),
            )  # fmt: skip
        experiment, stored = store.load("last"), store.claims("last")
    raised: Any = error.value
    assert raised.experiment.status == experiment.status == "complete"
    assert (stop_reason(experiment), len(stored) > 0) == ("blocks", True)
    assert [event.detail["arm"] for event in experiment.events if event.kind == AFTERWARDS] == ["b"]
    assert any(
        "interrupted" in str(e.detail["what"]) for e in experiment.events if e.kind == "note"
    )
    assert not any(
        e.detail["reason"] == "interrupted" for e in experiment.events if e.kind == "stop"
    )
    assert not any(arm.open_now for arm in arms)
