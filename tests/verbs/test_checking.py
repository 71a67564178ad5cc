"""The first choice of advise, measured next to the baseline."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.measure.environment import from_facts
from slipstream.measure.records import (
    Claim,
    Experiment,
    ExperimentSettings,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.render import ComparisonRow, comparison_rows
from slipstream.technique import parse
from slipstream.verbs import checking
from slipstream.verbs.checking import Check, measure_first_choice
from slipstream.verbs.deadline import Schedule
from slipstream.verbs.request import Request
from slipstream.verbs.results import Predicted

_TRAIN = """\
import torch
from torch import nn

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        sums = torch.zeros(2, 4, dtype=x.dtype)
        return sums.index_add(0, torch.arange(8) % 2, self.inner(x))

def make():
    model = Sums()
    batch = torch.randn(8, 8), torch.randn(2, 4)
    optimizer = torch.optim.Adam(model.parameters())
    return model, batch, nn.functional.mse_loss, optimizer
"""


def predicted(name: str = "amp:bf16", speedup: float = 1.3) -> Predicted:
    ratio = 1 / speedup
    return Predicted(
        name, 1e6, 1e6 * ratio, ratio, ratio * 0.95, ratio * 1.05, techniques=parse(name)
    )


def measured(speedup: float, *, verdict: Verdict = Verdict.FASTER, launches: int = 1) -> Any:
    """A measured row of `predicted()`, its interval within 2 %."""
    ratio, shown = 1 / speedup, predicted().to_record("train.py", "")
    claim = Claim(
        "cpu", "amp:bf16", "base", "median", ratio, ratio * 0.98, ratio * 1.02, 0.95, verdict,
        0.01, 200, carries=True, reason="it differs from itself", launches=launches,
    )  # fmt: skip
    made = Experiment(
        "train.py",
        "",
        from_facts({}),
        ExperimentSettings("base"),
        (),
        {},
        predictions={"amp:bf16": shown},
    )
    (row,) = comparison_rows(made, [claim])
    return row


def check(row: ComparisonRow | None = None, **more: Any) -> Check:
    return Check(predicted(), row, alternative=predicted("channels_last", 1.1), **more)


def test_a_gain_is_inside_or_outside_what_was_predicted() -> None:
    assert check(measured(1.32)).sentence == (
        "first choice amp:bf16: predicted 1.30x [1.24, 1.37], measured 1.32x [1.29, 1.35]: inside "
        "the predicted interval (cpu time of 200 paired steps in one launch of each side: other "
        "launches may differ)"
    )
    high = check(measured(1.5, launches=3))
    assert "outside the predicted interval (cpu time of 200 paired steps in 3" in high.sentence
    assert (high.worth_it, high.to_json()["inside"]) == (True, False)
    assert high.to_json()["predicted_speedup"] == pytest.approx(1.3)


def test_no_gain_names_the_next_choice_as_not_measured() -> None:
    found = check(measured(0.95, verdict=Verdict.SLOWER))
    assert "predicted 1.30x [1.24, 1.37], measured 0.95x" in found.sentence
    assert "not worth it here" in found.sentence
    assert "next choice, not measured: channels_last, predicted 1.10x" in found.sentence
    assert found.worth_it is False
    # The interval reaches 1.02x.
    assert "no clear gain" in check(measured(1.01)).sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gate": {"red": 9, "green": 1}}, "the machine is busy"),
        ({"doubt": "there are too few blocks"}, "there are too few blocks"),
    ],
    ids=["busy", "guard too wide"],
)
def test_one_launch_that_cannot_be_checked_does_not_refute(changes: Any, why: str) -> None:
    slower = replace(measured(0.72, verdict=Verdict.SLOWER), **changes)
    found = check(slower)
    assert f"measured 0.72x [0.71, 0.73]: not decided: {why}; `prove` measures longer" in (
        found.sentence
    )
    assert "next choice" not in found.sentence
    assert (found.worth_it, found.to_json()["reason"]) == (None, None)
    assert check(replace(slower, launches=3)).worth_it is False
    assert check(replace(measured(1.5), **changes)).worth_it is True


def test_an_inconclusive_check_that_reaches_the_predicted_interval_does_not_refute() -> None:
    noisy = replace(measured(0.52, verdict=Verdict.INCONCLUSIVE), low=1 / 1.52, high=math.inf)
    found = check(noisy)
    assert "not decided: too noisy to tell" in found.sentence
    assert found.worth_it is None
    # 1.10x at most, where at least 1.24x is predicted.
    assert check(replace(noisy, low=1 / 1.1)).worth_it is False


def test_a_check_too_noisy_to_tell_is_neither_inside_nor_outside() -> None:
    found = check(replace(measured(1.32), inside=None))
    assert "measured 1.32x [1.29, 1.35]: too noisy to tell (cpu time" in found.sentence


def test_a_limit_is_worth_a_slower_step() -> None:
    found = check(measured(0.95), for_limit=True)
    assert found.worth_it is None
    assert "next choice" not in found.sentence


def test_a_choice_for_its_memory_shows_what_it_saves() -> None:
    choice = replace(predicted("scan", 0.99), memory=(100, 76))
    found = Check(choice, measured(0.97), alternative=predicted())
    assert "predicted 0.99x [0.94, 1.04] and -24.0 % memory, measured 0.97x" in found.sentence
    assert "next choice" not in found.sentence
    assert found.worth_it is None


def test_an_untrustworthy_measurement_decides_nothing() -> None:
    found = check(measured(0.5, verdict=Verdict.UNTRUSTWORTHY))
    assert found.worth_it is None
    assert "not trustworthy: it differs from itself" in found.sentence


def test_what_was_not_measured_says_why() -> None:
    found = check(reason="a recording is not run")
    assert found.sentence.endswith("; not measured: a recording is not run")
    assert (found.to_json()["speedup"], found.worth_it) == (None, None)


@pytest.mark.parametrize(
    ("recording_s", "check", "reserved_s"),
    [(5.0, True, 15.0), (20.0, True, 0.0), (5.0, False, 0.0)],
    ids=["time for it", "slow to start", "not requested"],
)
def test_time_for_the_check_is_reserved(recording_s: float, check: bool, reserved_s: float) -> None:
    found = Schedule.of(100.0, 100.0 + recording_s, 60.0, check=check)
    without = Schedule.of(100.0, 100.0 + recording_s, 60.0, check=False)
    assert without.analysis - found.analysis == pytest.approx(reserved_s)
    assert found.without_check == without.analysis
    assert found.analysis < 160
    assert found.analysis + reserved_s < found.check < 160


def test_half_of_the_time_is_left_after_a_slow_recording() -> None:
    assert 165 < Schedule.of(100.0, 150.0, 60.0, check=False).analysis < 180


@pytest.fixture
def measure(forked_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure a technique on the model above, for a second."""
    (tmp_path / "train.py").write_text(_TRAIN)
    monkeypatch.setattr(checking, "CHECK_S", 1.0)

    def run(name: str, left_s: float = 60.0, starting_s: float = 0.0) -> Check:
        first = predicted(name)
        return measure_first_choice(
            Check(first),
            Request(f"{tmp_path}/train.py:make", threads=1),
            Schedule(math.inf, time.monotonic() + left_s, starting_s),
            {name: first.to_record("train.py:make", "")},
        )

    return run


def test_a_dtype_that_the_users_code_derives_shows_only_there(measure: Any) -> None:
    found = measure("amp:bf16")
    assert found.failed
    assert found.worth_it is False
    assert "but it fails here: RuntimeError: " in found.sentence
    assert "BFloat16" in found.reason
    assert "train.py:11" in found.reason
    assert "\n" not in found.reason


def test_the_first_choice_is_measured_with_the_prediction_that_was_shown(measure: Any) -> None:
    found = measure("fused_optimizer:fused")
    assert isinstance(found.row.predicted, PredictionRecord)
    assert found.row.predicted.ratio == found.predicted.ratio
    assert found.to_json()["speedup"] > 0


def test_too_few_steps_for_an_interval_are_no_measurement(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "CHECK_S", 1e-9)
    found = measure("fused_optimizer:fused")
    assert found.row is None
    assert "only 1 paired step fitted" in found.sentence
    assert found.to_json()["speedup"] is found.to_json()["inside"] is None


def test_without_time_nothing_is_started(measure: Any) -> None:
    found = measure("fused_optimizer:fused", left_s=1.0)
    assert (found.row, found.reason) == (None, "there was no time left")
    found = measure("fused_optimizer:fused", starting_s=58.0)
    assert "starting it twice takes longer" in found.reason


def test_an_edit_without_a_place_in_the_script_is_not_measured(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from elsewhere import train\ntrain()\n")
    first = predicted("accumulation:4")
    schedule = Schedule(math.inf, time.monotonic() + 60.0, 0.0)
    found = measure_first_choice(Check(first), Request(str(script)), schedule, {})
    assert found.row is None
    assert "no place" in found.reason
