"""Past predictions in a report: the measured ones, and the widening of the next interval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.measure.comparison import Comparison
from slipstream.measure.environment import from_facts
from slipstream.measure.ledger import Ledger
from slipstream.measure.records import (
    UNCHANGED,
    ArmRecord,
    Claim,
    Experiment,
    ExperimentSettings,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.store import Store
from slipstream.report.document import prediction_document
from slipstream.report.history import past_predictions
from slipstream.verbs.results import Predicted

HERE = from_facts({"cpu.model": "Testor 3000", "torch.threads": 1})
UPDATED = from_facts({"cpu.model": "Testor 3000", "torch.threads": 2})
ELSEWHERE = from_facts({"cpu.model": "Testor 4000", "torch.threads": 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store in which one prediction of 0.5 [0.4, 0.625] was measured as 0.8."""
    predicted = PredictionRecord(
        "train.py:step", "amp:bf16", "cpu", 0.5, 0.4, 0.625, "microbenchmark",
        "2026-01-01T00:00:00Z", HERE.env_id,
    )  # fmt: skip
    arms = (
        ArmRecord("base", workload="train.py:step"),
        ArmRecord("fast", workload="train.py:step", technique="amp:bf16"),
    )
    claim = Claim(
        "cpu", "fast", "base", "median", 0.8, 0.78, 0.82, 0.95, Verdict.FASTER, 0.01, 60,
        carries=True,
    )  # fmt: skip
    with Store(tmp_path / "results.db") as store:
        Ledger(store).record(predicted, HERE)
        store.save(
            Experiment("toy", "2026-01-02T03:04:05Z", HERE, ExperimentSettings("base"), arms, {}),
            [claim],
        )
    return tmp_path / "results.db"


def test_a_measured_prediction_is_shown_with_both_intervals(path: Path) -> None:
    past = past_predictions(path, HERE)
    (score,) = past.scores
    assert (past.state, past.total) == ("ready", 1)
    assert score["predicted"] == (2.0, 1.6, 2.5)
    assert score["measured"] == pytest.approx((1.25, 1 / 0.82, 1 / 0.78))
    assert not score["inside"]


def test_the_next_interval_is_widened_on_the_same_machine_only(path: Path) -> None:
    for environment in (HERE, UPDATED):
        widen = past_predictions(path, environment).widen
        assert widen is not None
        low, high = widen(0.5, 0.4, 0.625)
        assert high == pytest.approx(0.8)
        assert low < 0.4
    assert past_predictions(path, ELSEWHERE).widen is None
    assert past_predictions(path, ELSEWHERE).state == "ready"


def test_measurements_are_shown_next_to_predictions(path: Path) -> None:
    past = past_predictions(path, UPDATED, "train.py:step")
    assert set(past.measured) == {("amp:bf16", "cpu")}
    found = past.measured["amp:bf16", "cpu"]
    assert found.to_json() == {
        "speedup": 1.25, "speedup_interval": [1 / 0.82, 1 / 0.78], "level": 0.95, "metric": "cpu",
        "blocks": 60, "verdict": "faster", "created": "2026-01-02T03:04:05Z", "inside": None,
    }  # fmt: skip
    assert past_predictions(path, HERE, "other.py:step").measured == {}
    assert past_predictions(path, ELSEWHERE, "train.py:step").measured == {}


def test_an_explicit_comparison_counts_as_the_latest(path: Path, tmp_path: Path) -> None:
    arms = (ArmRecord(UNCHANGED), ArmRecord("amp:bf16"))
    claim = Claim(
        "cpu", "amp:bf16", UNCHANGED, "median", 0.9, 0.88, 0.92, 0.95, Verdict.UNTRUSTWORTHY,
        0.01, 60, carries=True,
    )  # fmt: skip
    experiment = Experiment(
        "train.py:step", "2026-01-03T00:00:00Z", ELSEWHERE, ExperimentSettings(UNCHANGED), arms, {}
    )
    comparisons = [Comparison(experiment, (claim,))]
    for store in (path, tmp_path / "none.db"):
        found = past_predictions(store, HERE, "train.py:step", comparisons).measured[
            "amp:bf16", "cpu"
        ]
        assert found.claim.ratio == 0.9
    with pytest.raises(InvalidArgumentError, match="measured no technique"):
        past_predictions(path, HERE, "other.py:step", comparisons)


def test_a_proved_prediction_appears_once(path: Path) -> None:
    shown = PredictionRecord(
        "train.py:step", "fused", "cpu", 0.72, 0.68, 0.76, "simulated", "2026-01-03T00:00:00Z",
        HERE.env_id,
    )  # fmt: skip
    claim = Claim(
        "cpu", "fused", UNCHANGED, "median", 0.6, 0.58, 0.62, 0.95, Verdict.FASTER, 0.01, 60,
        carries=True,
    )  # fmt: skip
    arms = (ArmRecord(UNCHANGED), ArmRecord("fused"))
    with Store(path) as store:
        Ledger(store).record(shown, HERE)
        proved = Experiment(
            "train.py:step", "2026-01-04T00:00:01Z", UPDATED, ExperimentSettings(UNCHANGED), arms,
            {}, predictions={"fused": shown},
        )  # fmt: skip
        store.save(proved, [claim])
    past = past_predictions(path, HERE, "train.py:step")
    (score,) = (entry for entry in past.scores if entry["technique"] == "fused")
    assert (score["created"], score["inside"]) == (shown.created, False)
    # The what-ifs show the same prediction as elsewhere on the page.
    again = Predicted("fused", 1e6, 6e5, 0.6, 0.5, 0.7)
    found = prediction_document(again, past)
    assert found["speedup"] == found["measured"]["predicted_speedup"] == score["predicted"][0]
    assert found["measured"]["inside"] is False
    alone = prediction_document(replace(again, technique="amp:bf16", ratio=0.8), past)
    assert (alone["speedup"], alone["measured"]["inside"]) == (1.25, False)


def test_a_missing_and_a_damaged_store_are_states(tmp_path: Path) -> None:
    assert past_predictions(tmp_path / "none.db", HERE).state == "none"
    torn = tmp_path / "torn.db"
    torn.write_bytes(b"not a database at all, but long enough to look like one" * 40)
    past = past_predictions(torn, HERE)
    assert past.state == "failed"
    assert "torn.db" in past.note
    assert not (tmp_path / "none.db").exists()
