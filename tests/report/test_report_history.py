"""What a report says of past predictions: those that were measured, and what widens the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.measure.environment import from_facts
from slipstream.measure.ledger import Ledger
from slipstream.measure.records import (
    ArmRecord,
    Claim,
    Experiment,
    PredictionRecord,
    Settings,
    Verdict,
)
from slipstream.measure.store import Store
from slipstream.report._history import past_predictions

HERE = from_facts({"cpu.model": "Testor 3000", "torch.threads": 1})
UPDATED = from_facts({"cpu.model": "Testor 3000", "torch.threads": 2})
ELSEWHERE = from_facts({"cpu.model": "Testor 4000", "torch.threads": 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store in which one prediction of 0.5 [0.4, 0.625] was measured as 0.8."""
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
            Experiment("toy", "2026-01-02T03:04:05Z", HERE, Settings("base"), arms, {}), [claim]
        )
    return tmp_path / "results.db"


def test_a_measured_prediction_is_told_with_both_intervals(path: Path) -> None:
    past = past_predictions(path, HERE)
    (score,) = past.scores
    assert (past.state, past.total) == ("ready", 1)
    assert score["predicted"] == [0.5, 0.4, 0.625]
    assert score["measured"] == [0.8, 0.78, 0.82]
    assert not score["within"]


def test_the_next_interval_is_widened_on_the_same_machine_only(path: Path) -> None:
    for environment in (HERE, UPDATED):
        widen = past_predictions(path, environment).widen
        assert widen is not None
        low, high = widen(0.5, 0.4, 0.625)
        assert high == pytest.approx(0.8)
        assert low < 0.4
    assert past_predictions(path, ELSEWHERE).widen is None
    assert past_predictions(path, ELSEWHERE).state == "ready"


def test_no_store_and_a_torn_one_are_states(tmp_path: Path) -> None:
    assert past_predictions(tmp_path / "none.db", HERE).state == "none"
    torn = tmp_path / "torn.db"
    torn.write_bytes(b"not a database at all, but long enough to look like one" * 40)
    past = past_predictions(torn, HERE)
    assert past.state == "failed"
    assert "torn.db" in past.note
    assert not (tmp_path / "none.db").exists()
