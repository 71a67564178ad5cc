"""Quality from the first steps: noise, losses, and the limits of claims."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import environment, experiment
from scipy import stats

from slipstream import measure
from slipstream.errors import InvalidArgumentError
from slipstream.measure.checks import (
    QualityCheck,
    QualityStatus,
    Trial,
    checks_of,
    format_share,
    judge,
)
from slipstream.measure.claims import claims, headline
from slipstream.measure.page import comparison_html
from slipstream.measure.records import Event, Verdict
from slipstream.measure.render import comparison_rows, comparison_table, quality_rows
from slipstream.measure.render import rows_payload as payload_of
from slipstream.measure.store import Store

# Five seeds of a decreasing loss with their noise; and rounding, a hundredth of it.
NOISE = (0.00, 0.03, -0.02, 0.01, -0.04)
ROUNDING = (1e-4, -2e-4, 2e-4, -1e-4, 0.0)


def trials(*shifts: float, by: tuple[float, ...] = (0.0,) * 5, **changes: object) -> list[Trial]:
    return [
        Trial(seed, 3, (2.0 + s, 1.5 + s + d, 1.2 + s + d), **changes)
        for seed, (s, d) in enumerate(zip(shifts, by, strict=False))
    ]


def check(candidate: list[Trial], kind: str = "rounding", base: list[Trial] | None = None):
    return judge("fast", kind, "a paper", base or trials(*NOISE), candidate)


def test_rounding_below_the_noise_of_seeds_is_within_noise():
    found = check(trials(*NOISE, by=ROUNDING))
    assert found.status is QualityStatus.WITHIN
    # The later half of three steps: the last two.
    assert found.baseline[1] == pytest.approx((1.53 + 1.23) / 2)
    assert found.spread == pytest.approx(np.std(NOISE, ddof=1))
    assert found.difference == pytest.approx(0, abs=1e-9)
    assert (found.steps, found.seeds) == (3, (0, 1, 2, 3, 4))


def test_a_loss_beyond_the_noise_of_seeds_is_worse_and_one_below_is_better():
    worse = check(trials(*NOISE, by=(0.3, 0.31, 0.29, 0.3, 0.3)))
    assert worse.status is QualityStatus.WORSE
    assert worse.lost
    assert worse.difference == pytest.approx(0.3)
    assert "does not make up" in worse.sentence, "the reason must be in the sentence"
    better = check(trials(*NOISE, by=(-0.3, -0.31, -0.29, -0.3, -0.3)))
    assert better.status is QualityStatus.BETTER
    assert not better.lost


def test_a_difference_between_noise_and_worse_is_undecided():
    found = check(trials(*NOISE, by=(0.05, -0.04, 0.06, 0.01, 0.05)))
    assert found.status is QualityStatus.OPEN
    assert found.low < 0 < found.spread < found.high


def test_equal_bits_are_reported_as_equal():
    found = check(trials(*NOISE))
    assert found.status is QualityStatus.SAME
    assert (found.difference, found.baseline) == (0.0, found.candidate)


@pytest.mark.parametrize("kind", ["needs-training", "same-distribution"])
def test_a_few_steps_never_show_that_the_final_quality_is_equal(kind):
    for by in (ROUNDING, (0.0,) * 5):
        found = check(trials(*NOISE, by=by), kind)
        assert found.status is QualityStatus.OPEN
        assert "evidence" in found.sentence
        assert found.reason
        assert found.reason in found.sentence, "the reason must be in the sentence"
        assert found.verdict == f"open: {kind.replace('-', ' ')}"


def test_a_nonfinite_loss_of_the_candidate_alone_is_a_failure():
    broken = trials(*NOISE)
    broken[2] = replace(broken[2], losses=(2.0, math.nan, math.inf))
    found = check(broken, "needs-training")
    assert found.status is QualityStatus.FAILED
    assert re.search(r"step 2\b.*seed 2\b", found.sentence)
    # If the baseline diverges from the same seed, the candidate is not at fault.
    base = trials(*NOISE)
    base[2] = broken[2]
    assert check(broken, base=base).status is not QualityStatus.FAILED
    nowhere = [replace(t, losses=(math.inf,) * 3) for t in base]
    assert check(nowhere, base=nowhere).status is QualityStatus.UNCHECKED


def test_a_metric_takes_precedence_over_the_loss():
    base = [replace(t, metric=m) for t, m in zip(trials(*NOISE), (9, 10, 11, 10, 9), strict=True)]
    found = check([replace(t, metric=t.metric + 30.0) for t in base], base=base)
    assert (found.measure, found.status) == ("metric", QualityStatus.WORSE)
    assert found.difference == 30
    lost = check([replace(t, metric=math.nan) for t in base], base=base)
    assert (lost.measure, lost.status) == ("metric", QualityStatus.FAILED)
    assert lost.reason in lost.sentence


def test_one_seed_and_identical_seeds_give_no_scale():
    alone = check(trials(0.0, by=(1e-4,)), base=trials(0.0))
    assert alone.status is QualityStatus.OPEN
    assert (alone.low, alone.spread) == (None, None)
    fixed = check(trials(0.0, 0.0, by=(1e-4, 1e-4)), base=trials(0.0, 0.0))
    assert fixed.status is QualityStatus.OPEN
    assert (fixed.one_run, len(fixed.seeds)) == (True, 2)
    assert "one run" in fixed.sentence
    assert "[" not in fixed.sentence, "one run has no interval"
    made = experiment(events=(fixed.to_event(),))
    table = comparison_table(made, claims(made)).to_records()
    (row,) = [row for row in table if str(row["what"]).endswith("quality")]
    assert "one run" in row.values()
    assert not check(trials(0.0, 0.01, by=(1e-4, 1e-4)), base=trials(0.0, 0.01)).one_run
    assert not alone.one_run


def test_an_interval_many_times_wider_than_the_loss_is_a_dash():
    wild = check(trials(0.0, 0.01, by=(-6.0, 6.0)), base=trials(0.0, 0.01))
    assert " [–, –]" in wild.sentence
    made = experiment(events=(wild.to_event(),))
    table = comparison_table(made, claims(made)).to_records()
    (row,) = [row for row in table if str(row["what"]).endswith("quality")]
    assert str(row["change [95% CI]"]).endswith("[–, –]")


def test_steps_without_a_number_are_not_checked_which_is_reported():
    nothing = [Trial(seed, 2) for seed in range(3)]
    found = check(nothing, base=nothing)
    assert found.status is QualityStatus.UNCHECKED
    assert "returns no number" in found.reason
    assert found.reason in found.sentence


def outputs(*values: object) -> list[Trial]:
    return [
        Trial(seed, 1, output=np.array(v, float), shape=(len(v),), training=False)
        for seed, v in enumerate(values)
    ]


def test_outputs_are_compared_relative_to_the_largest():
    base = outputs([1.0, -8.0, 0.0], [2.0, 1.0, -np.inf])
    found = check(outputs([1.0, -8.0, 0.2], [2.0, 1.1, -np.inf]), base=base)
    assert found.difference == pytest.approx(0.1 / 2)
    assert found.status is QualityStatus.OPEN
    assert check(base, base=base).status is QualityStatus.SAME
    failed = check(outputs([1.0, np.nan, 0.0], [2.0, 1.0, -np.inf]), base=base)
    assert failed.status is QualityStatus.FAILED
    other = check(outputs([1.0], [2.0]), base=base)
    assert other.status is QualityStatus.UNCHECKED
    assert "shapes differ" in other.reason


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.000213, "+0.021 %"), (-0.013, "-1.3 %"), (0.0, "0 %"), (2e-9, "+2e-07 %"), (3.2, "+320 %")],
)
def test_shares_are_readable_at_any_size(share, text):
    assert format_share(share, signed=True) == text


def with_check(status: QualityStatus, **changes: object):
    made = QualityCheck("fast", "rounding", status, reason="so it is", **changes)
    plain = experiment()
    return replace(plain, events=(*plain.events, made.to_event()))


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (QualityStatus.WITHIN, Verdict.FASTER),
        (QualityStatus.OPEN, Verdict.FASTER),
        (QualityStatus.EXACT, Verdict.FASTER),
        (QualityStatus.UNCHECKED, Verdict.UNBACKED),
        (QualityStatus.WORSE, Verdict.QUALITY_LOST),
        (QualityStatus.FAILED, Verdict.QUALITY_LOST),
    ],
)
def test_a_faster_candidate_wins_only_if_its_quality_allows(status, verdict):
    (claim,) = headline(claims(with_check(status)))
    assert claim.verdict is verdict
    slower = replace(with_check(status), series=experiment(ratio=1.3).series)
    assert headline(claims(slower))[0].verdict is Verdict.SLOWER


def test_a_check_is_stored_exactly_and_shown_everywhere(tmp_path: Path):
    found = check([*trials(*NOISE, by=ROUNDING)])
    made = replace(experiment(), events=(*experiment().events, found.to_event()))
    with Store(tmp_path / "results.db") as store:
        identity = store.save(made, claims(made))
        loaded = store.load(identity)
        store.recompute(identity)
    assert checks_of(loaded.events) == {"fast": found}
    stored = claims(loaded)
    table = comparison_table(loaded, stored)
    (row,) = (r for r in table.to_records() if r["what"] == "fast: quality")
    assert row["verdict"] == "within seed noise"
    assert str(row["change [95% CI]"]).startswith("1.0000 [0.9999,")
    assert row["detectable"] == "±2.0 % seeds"
    assert found.sentence in table.notes
    page = comparison_html(loaded, stored)
    assert "fast: quality" in page
    assert "within seed noise" in page
    payload = payload_of(loaded, comparison_rows(loaded, stored), stored)
    assert payload["numerics"][0]["difference"] == found.difference
    assert payload["numerics"][0]["says"] == found.sentence


def test_outcomes_on_items_are_shown_like_checks_and_leave_old_verdicts_unchanged(clock):
    result = measure.compare(
        {"base": lambda: clock.work(4e5), "fast": lambda: clock.work(1e5)},
        budget="60s",
        environment=environment(),
        changes_numerics=["fast"],
        quality={"base": [True] * 40, "fast": [True] * 20 + [False] * 20},
    )
    assert result.verdict is Verdict.FASTER
    (row,) = (r for r in result.table().to_records() if r["what"] == "fast: accuracy")
    assert (row["verdict"], row["blocks"]) == ("worse", "40 items")
    (accuracy,) = quality_rows(result.experiment)
    assert (accuracy.items, accuracy.lost, accuracy.gained) == (40, 20, 0)
    assert any(re.search(r"\b40\b.*\b20\b.*\b0\b", note) for note in result.table().notes)


def test_a_check_replaces_outcomes_and_without_either_there_is_no_claim(clock):
    arms = {"base": lambda: clock.work(4e5), "fast": lambda: clock.work(1e5)}
    options = {"budget": "60s", "environment": environment(), "changes_numerics": ["fast"]}
    with pytest.raises(InvalidArgumentError, match="changes numerics"):
        measure.compare(arms, **options)
    unchecked = QualityCheck("fast", "rounding", QualityStatus.UNCHECKED)
    result = measure.compare(arms, **options, checks=[unchecked])
    assert result.verdict is Verdict.UNBACKED
    assert result.quality == {"fast": unchecked}


def test_an_event_of_an_older_store_is_not_a_check():
    assert checks_of([Event(0, "quality", {"arm": "fast", "lost": 1})]) == {}


def test_a_classifier_has_a_row_of_changed_answers():
    targets = {"targets": (0, 1, 2, 3)}
    base = trials(*NOISE, answers=(0, 1, 2, 0), **targets)
    found = check(trials(*NOISE, by=ROUNDING, answers=(0, 1, 1, 2), **targets), base=base)
    # The same four items from every seed: a run that repeats itself counts once.
    assert (found.items, found.diverging, found.unstable) == (4, 2, 1)
    assert found.instability is not None
    assert found.instability.estimate == 0.25
    assert re.search(r"\b4\b\D*\b2\b\D*\b1\b", found.sentence), "the same three, to read"
    unknown = check(
        trials(*NOISE, by=ROUNDING, answers=(0, 1, 1, 2)), base=trials(*NOISE, answers=(0, 1, 2, 0))
    )
    assert unknown.unstable is None
    assert unknown.instability is not None
    assert unknown.instability.estimate == 0.5
    assert checks_of([found.to_event()])["fast"] == found
    assert check(trials(*NOISE, by=ROUNDING)).instability is None
    changed = experiment(events=(found.to_event(),))
    rows = comparison_table(changed, claims(changed)).to_records()
    (row,) = [check for check in rows if check["what"] == "fast: instability"]
    assert row["B"] == "25.0 %"


def test_the_interval_over_seeds_is_students_t():
    by = (0.3, 0.31, 0.29, 0.3, 0.33)
    found = check(trials(*NOISE, by=by))
    expected = stats.t.interval(0.95, 4, np.mean(by), stats.sem(by))
    assert (found.low, found.high) == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_spread_of_seeds_is_itself_uncertain(sign):
    # Five seeds of deviation 0.0270: at 95 % chance may be 2.37 times as large, 0.0641.
    at_most = np.std(NOISE, ddof=1) * math.sqrt(4 / stats.chi2.ppf(0.05, 4))
    assert at_most == pytest.approx(0.0641, abs=1e-4)
    beyond = QualityStatus.WORSE if sign > 0 else QualityStatus.BETTER
    for factor, status in ((0.98, QualityStatus.OPEN), (1.02, beyond)):
        shift = sign * factor * at_most
        by = tuple(shift + jitter for jitter in (1e-6, -1e-6, 0.0, 1e-6, -1e-6))
        assert check(trials(*NOISE, by=by)).status is status


def test_a_metric_of_one_side_only_is_not_compared():
    base = [replace(t, metric=9.0) for t in trials(*NOISE)]
    found = check(trials(*NOISE, by=ROUNDING), base=base)
    assert found.measure == "training loss"
    assert found.baseline[0] == pytest.approx((1.5 + 1.2) / 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "targets"),
    [((0, 1, 2), (0, 1), (0, 1, 2)), ((0, 1, 2), (0, 1, 1), (0, 1, 1)), ((), (), (0, 1, 2))],
)
def test_answers_to_other_items_are_not_compared(ours, theirs, targets):
    base = trials(*NOISE, answers=ours, targets=(0, 1, 2))
    found = check(trials(*NOISE, by=ROUNDING, answers=theirs, targets=targets), base=base)
    assert (found.items, found.diverging, found.unstable) == (0, 0, None)
