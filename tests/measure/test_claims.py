"""Claims of an experiment, on made-up experiments with known truth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from slipstream.measure.claims import (
    candidates,
    carrier,
    claims,
    headline,
    paired,
    ranks,
    ratio_between,
)
from slipstream.measure.records import (
    AUTO,
    ArmRecord,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    Series,
    Verdict,
)
from slipstream.measure.render import comparison_table

STOPPED = (Event(40, "stop", {"reason": "budget"}),)


def series(values):
    values = np.asarray(values, np.float64)
    return Series(values, np.arange(len(values), dtype=np.int32))


def experiment(columns, *, events=STOPPED, **settings):
    """Return an experiment of `columns`: (arm, metric) -> values per block; "a" is the baseline."""
    arms = dict.fromkeys(arm for arm, _ in columns if not arm.endswith("'"))
    return Experiment(
        title="made up",
        created="2026-01-01T00:00:00Z",
        environment=Environment({}, "env"),
        settings=ExperimentSettings("a", **{"primary": "wall", **settings}),
        arms=tuple(ArmRecord(arm) for arm in arms),
        series={(*key, Phase.MEASURE): series(values) for key, values in columns.items()},
        events=events,
    )


def noisy(ratio, n=40, spread=0.01, seed=0):
    return 1e7 * ratio * np.random.default_rng(seed).lognormal(0, spread, n)


def only(found):
    (claim,) = headline(found)
    return claim


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(0.9, Verdict.FASTER), (1.1, Verdict.SLOWER), (1.0, Verdict.EQUIVALENT)],
)
def test_the_verdict_depends_on_the_whole_interval(ratio, verdict):
    claim = only(claims(experiment({("a", "wall"): noisy(1), ("b", "wall"): noisy(ratio, seed=1)})))
    assert claim.verdict is verdict
    assert claim.low <= ratio <= claim.high
    assert claim.blocks == 40
    assert claim.further_blocks is None


def test_an_undecided_run_reports_how_many_blocks_would_decide_it():
    columns = {("a", "wall"): noisy(1, 20, 0.1), ("b", "wall"): noisy(1.03, 20, 0.1, seed=1)}
    claim = only(claims(experiment(columns)))
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.further_blocks > 20
    assert claim.detectable > 0.03


def test_too_few_blocks_for_any_interval_are_reported():
    claim = only(claims(experiment({("a", "wall"): [1.0] * 3, ("b", "wall"): [1.0, 2, 3]})))
    assert (claim.low, claim.high) == (0.0, math.inf)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.further_blocks == 3


def test_nothing_is_claimed_if_the_baseline_differs_from_itself():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(0.5, seed=1)}
    columns["a'", "wall"] = noisy(1.2, 10, seed=2)
    found = claims(experiment(columns))
    assert only(found).verdict is Verdict.UNTRUSTWORTHY
    assert "differs from itself" in only(found).reason
    guard = next(claim for claim in found if claim.arm == "a'")
    assert guard.level == 0.99
    assert not guard.carries


def test_a_quiet_guard_changes_nothing():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(0.5, seed=1)}
    columns["a'", "wall"] = noisy(1, 10, seed=2)
    assert only(claims(experiment(columns))).verdict is Verdict.FASTER


def test_several_candidates_are_judged_by_holm():
    # Twelve identical arms, 300 times: a family-wise 5 % flags any of them in about 15 runs.
    rng = np.random.default_rng(0)
    called = 0
    for _ in range(300):
        base = np.ones(40)
        columns = {("a", "wall"): base}
        columns |= {(f"b{i}", "wall"): rng.lognormal(0, 0.1, 40) for i in range(12)}
        found = headline(claims(experiment(columns, looks=(), equivalence=1e-9)))
        called += any(c.verdict in (Verdict.FASTER, Verdict.SLOWER) for c in found)
    assert called <= 25  # a true 5 % exceeds this once in 100 times


def test_one_clear_winner_is_found_among_many_equal_arms():
    columns = {("a", "wall"): noisy(1)}
    columns |= {(f"b{i}", "wall"): noisy(1, seed=i + 1) for i in range(10)}
    columns["fast", "wall"] = noisy(0.8, seed=99)
    verdicts = {c.arm: c.verdict for c in headline(claims(experiment(columns)))}
    assert verdicts["fast"] is Verdict.FASTER


def test_a_run_that_stopped_early_has_wider_intervals_than_one_out_of_budget():
    columns = {("a", "wall"): noisy(1, 40), ("b", "wall"): noisy(1.05, 40, seed=1)}
    budget = only(claims(experiment(columns)))
    for events in ((Event(40, "stop", {"reason": "narrow"}),), ()):
        seen = only(claims(experiment(columns, events=events)))
        assert seen.high - seen.low > budget.high - budget.low


def test_claims_are_reproducible_to_the_last_digit():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(1.02, seed=1)}
    made = experiment(columns, derived=("throughput", "wall_p90"))
    assert repr(claims(made)) == repr(claims(replace(made)))


def test_blocks_are_paired_by_number_and_warm_up_is_excluded():
    made = experiment({("a", "wall"): [1.0, 2, 4, 8], ("b", "wall"): [3.0, 3, 3, 3]})
    shifted = Series(np.array([10.0, 20.0, 40.0]), np.array([1, 2, 7], np.int32))
    made = replace(made, series={**made.series, ("b", "wall", Phase.MEASURE): shifted})
    a, b = paired(made, "wall", "b", "a")
    assert a.tolist() == [10.0, 20.0]
    assert b.tolist() == [2.0, 4.0]


def test_a_failed_candidate_keeps_its_blocks_but_gets_no_verdict():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(0.5, 20, seed=1)}
    failed = Event(20, "failed", {"arm": "b", "what": "it broke"})
    claim = only(claims(experiment(columns, events=(failed, *STOPPED))))
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert "block 20: it broke" in claim.reason
    assert claim.blocks == 20


def test_a_candidate_that_failed_before_measuring_is_a_row_and_affects_no_clock():
    columns = {
        (arm, metric): noisy(ratio, seed=seed)
        for arm, ratio, seed in (("a", 1, 0), ("b", 0.5, 1))
        for metric in ("wall", "cpu")
    }
    failed = Event(0, "failed", {"arm": "c", "what": "it broke"})
    made = experiment(columns, events=(failed, *STOPPED), primary=AUTO)
    without = carrier(made)
    made = replace(made, arms=(*made.arms, ArmRecord("c")))
    assert carrier(made) == without
    table = comparison_table(made, claims(made))
    assert [row[:5:4] for row in table.rows if "c:" in str(row[0])] == [
        ["c: not measured", "failed: it broke"]
    ]


def test_a_p99_from_too_few_blocks_is_refused_with_the_required_number():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(1, seed=1)}
    found = claims(experiment(columns, derived=("wall_p99",)))
    claim = next(c for c in found if c.metric == "wall_p99")
    assert claim.estimator == "refused"
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.further_blocks == 299 - 40  # ceil(log 0.05 / log 0.99)


def test_more_throughput_is_faster():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(0.5, seed=1)}
    found = claims(experiment(columns, derived=("throughput",)))
    claim = next(c for c in found if c.metric == "throughput")
    assert claim.ratio == pytest.approx(2, rel=0.02)
    assert claim.verdict is Verdict.FASTER


def test_nonpositive_metrics_carry_no_claim():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(1, seed=1)}
    columns |= {("a", "bytes"): np.zeros(40), ("b", "bytes"): np.ones(40)}
    assert {claim.metric for claim in claims(experiment(columns))} == {"wall"}


# The choice of the metric that carries the claim.


def times(wall, cpu, delay=None):
    columns = {}
    for arm in ("a", "b"):
        columns |= {(arm, "wall"): wall, (arm, "cpu"): cpu}
        if delay is not None:
            columns[arm, "run_delay"] = delay
    return experiment(columns, primary=AUTO)


def test_cpu_time_decides_for_one_computing_thread():
    metric, reason = carrier(times(noisy(1), noisy(0.995), noisy(0.001)))
    assert metric == "cpu"
    assert "one thread" in reason


def test_cpu_time_decides_if_contention_explains_the_wait():
    metric, reason = carrier(times(np.full(40, 2e7), np.full(40, 1e7), np.full(40, 1e7)))
    assert metric == "cpu"
    assert "50 % of wall" in reason


def test_wall_time_decides_for_waiting_work():
    metric, reason = carrier(times(np.full(40, 2e7), np.full(40, 1e7), np.zeros(40) + 1e3))
    assert metric == "wall"
    assert "waits during 50 %" in reason


def test_wall_time_decides_for_several_threads():
    assert carrier(times(np.full(40, 1e7), np.full(40, 1.9e7), np.ones(40)))[0] == "wall"
    # By CPU time two threads on one contended core look like one, but not by their queueing.
    metric, reason = carrier(times(np.full(40, 2e7), np.full(40, 1.8e7), np.full(40, 1e7)))
    assert metric == "wall"
    assert "several threads" in reason


def test_without_the_queueing_clock_the_least_disturbed_samples_decide():
    contended = np.where(np.arange(40) % 3 == 0, 1e7, 3e7)
    assert carrier(times(contended, np.full(40, 1e7)))[0] == "cpu"
    assert carrier(times(np.full(40, 3e7), np.full(40, 1e7)))[0] == "wall"


def test_wall_time_decides_if_cpu_time_is_missing():
    made = experiment({("a", "wall"): noisy(1), ("b", "wall"): noisy(1)}, primary=AUTO)
    assert carrier(made)[0] == "wall"


def test_a_requested_metric_carries_the_claim():
    made = replace(times(noisy(1), noisy(1)), settings=ExperimentSettings("a", primary="wall"))
    found = claims(made)
    assert {c.metric for c in headline(found)} == {"wall"}
    assert {c.metric for c in found} == {"wall", "cpu"}


def test_two_candidates_can_be_compared_with_each_other():
    columns = {("a", "wall"): noisy(1), ("b", "wall"): noisy(2, seed=1), ("c", "wall"): noisy(4)}
    made = experiment(columns)
    assert candidates(made) == ("b", "c")
    found = ratio_between(made, "wall", "c", "b")
    assert found.low <= 2 <= found.high


def test_a_ranking_has_the_possible_ranks_of_each_arm():
    columns = {("a", "wall"): noisy(2), ("b", "wall"): noisy(1, seed=1)}
    columns |= {("c", "wall"): noisy(2, seed=2), ("d", "wall"): noisy(3, seed=3)}
    places = ranks(experiment(columns))
    assert places == {"a": (2, 3), "b": (1, 1), "c": (2, 3), "d": (4, 4)}


def test_an_interrupt_spends_no_more_error_than_a_look():
    # 50 blocks are not a planned look: only the end of a budget may use all the remaining error.
    columns = {("a", "wall"): noisy(1, 50), ("b", "wall"): noisy(1.05, 50, seed=1)}
    width = {}
    for reason in ("budget", "blocks", "ended", "interrupted", "failed", "narrow"):
        events = (Event(50, "stop", {"reason": reason}),)
        claim = only(claims(experiment(columns, events=events)))
        width[reason] = claim.high - claim.low
    assert width["budget"] == width["blocks"] == width["ended"]
    assert width["interrupted"] == width["failed"] == width["narrow"] > width["budget"]


def test_hypotheses_rejected_by_holm_cost_the_others_nothing():
    # Two of three are clear together: the third is judged, and printed, at the full error.
    columns = {("a", "wall"): noisy(1)}
    columns |= {("x", "wall"): noisy(0.5, seed=1), ("y", "wall"): noisy(2, seed=2)}
    columns["z", "wall"] = noisy(1, seed=3)
    together = {c.arm: c for c in headline(claims(experiment(columns)))}
    for arm, share in (("z", 1), ("x", 3), ("y", 3)):
        pair = {key: columns[key] for key in (("a", "wall"), (arm, "wall"))}
        alone = only(claims(experiment(pair, level=1 - 0.05 / share)))
        assert (together[arm].low, together[arm].high) == (alone.low, alone.high)
