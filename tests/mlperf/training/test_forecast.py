"""Predictions of time to quality: factors, intervals, and the ledger's records."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import UsageError
from slipstream.measure.store import Store
from slipstream.mlperf.training import time_to_quality
from slipstream.mlperf.training.compare import Factor, Verdict
from slipstream.mlperf.training.forecast import ArmForecast, PredictedRatio, forecast_table
from slipstream.mlperf.training.pilot import samples_ratio
from slipstream.verbs.history import history
from slipstream.verbs.training import METRIC, predict_training


def losses(steps: int, slower: float, seed: int) -> list[float]:
    """A power law with 5 % of noise per batch."""
    at = np.arange(1, steps + 1) / slower
    return (at**-0.4 * np.exp(np.random.default_rng(seed).normal(0, 0.05, steps))).tolist()


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.5])
def test_pilot_predicts_the_ratio_of_samples(slower: float) -> None:
    ratio = samples_ratio(losses(400, 1.0, 1), losses(400, slower, 2))
    assert ratio == pytest.approx(slower, rel=0.06)


def test_pilot_without_a_trend_predicts_nothing() -> None:
    rising = losses(400, 1.0, 1)[::-1]
    assert math.isnan(samples_ratio(losses(400, 1.0, 1), rising))
    assert math.isnan(samples_ratio(losses(8, 1.0, 1), losses(8, 1.0, 2)))
    for wrong in (math.inf, -1.0, 0.0):
        assert math.isnan(samples_ratio([wrong] * 400, losses(400, 1.0, 2)))


def test_variances_of_factors_add_up() -> None:
    sample = PredictedRatio.of(0.8, 0.03, "graph")
    samples = PredictedRatio.of(1.5, 0.04, "pilot")
    whole = sample.times(samples)
    assert whole.ratio == pytest.approx(1.2)
    assert math.log(whole.high / whole.ratio) == pytest.approx(1.645 * 0.05)
    assert sample.over(sample).ratio == pytest.approx(1)
    assert not sample.times(PredictedRatio()).is_predicted
    unsure = sample.times(PredictedRatio.of(1.5, math.nan, "pilot"))
    assert (unsure.ratio, math.isnan(unsure.low)) == (whole.ratio, True)


def test_predictions_are_stored_before_the_first_run(tmp_path: Path) -> None:
    out, name = tmp_path / "out", "lowrank:0.25"
    with history(tmp_path / "results.db") as past:
        predictions = predict_training("digits", [name], past, runs=3, seeds=1)
    with Store(tmp_path / "results.db") as store:
        (record,) = (record for record in store.predictions() if record.metric == METRIC)
    prediction = predictions[name]
    assert prediction.sample.low < prediction.sample.ratio < prediction.sample.high
    assert prediction.samples.ratio != 1
    assert (record.technique, record.workload, record.detail["runs"]) == (name, "digits", 3)
    assert record.ratio == pytest.approx(prediction.sample.ratio * prediction.samples.ratio)

    def report(line: str) -> None:
        if "run 1 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_to_quality(
            "digits", [name], seeds=[1], folder=out, predictions=predictions, report=report
        )
    written = json.loads((out / "result.json").read_text())
    assert (written["arms"], set(written["predictions"])) == ([], {name})

    factor = Factor(0.95, 0.9, 1.0, 0.1, 5)
    verdict = Verdict(name, factor, factor, factor, factor, False, 5, 5, 1.0, 1.0)
    rows = forecast_table(predictions, [verdict]).rows
    assert [row[1] for row in rows] == ["time per sample", "samples", "time of all steps"]


def test_ranks_on_one_machine_have_no_predicted_time(tmp_path: Path) -> None:
    with history(tmp_path / "results.db") as past:
        (prediction,) = predict_training("digits", ["ddp:workers=2"], past, seeds=0).values()
    assert not prediction.sample.is_predicted
    assert "ranks" in prediction.sample.basis
    assert prediction.samples.basis == "no pilot was run"
    assert "time per sample not predicted" in prediction.sentence


def test_arms_that_do_not_apply_are_not_trained(tmp_path: Path) -> None:
    with history(tmp_path / "results.db") as past:
        predictions = predict_training("digits", ["scan:auto"], past, seeds=1)
    assert "no nn.RNN" in predictions["scan:auto"].sentence
    with pytest.raises(UsageError, match="nothing to train: scan:auto"):
        time_to_quality("digits", ["scan:auto"], seeds=[1], predictions=predictions)
    judged = time_to_quality(
        "digits", ["scan:auto", "fused_optimizer:foreach"], seeds=[1], folder=tmp_path / "out",
        most_epochs=0.1, predictions=predictions,
    )  # fmt: skip
    assert [arm.name for arm in judged.arms] == ["as it is", "fused_optimizer:foreach"]


def test_table_marks_measured_factors_inside_the_interval() -> None:
    inside, outside, exact = Factor(0.95, 0.9, 1.0, 0.1, 5), Factor(1.3, 1.2, 1.4, 0.01, 5), Factor(
        1.0, 1.0, 1.0, 1.0, 5
    )  # fmt: skip
    verdict = Verdict("x", inside, exact, outside, outside, False, 5, 5, 1.0, 1.0)
    predicted = ArmForecast(
        "x", PredictedRatio.of(1.0, 0.05, "graph"), PredictedRatio.of(1.0, 0.0, "exact numerics")
    )
    rows = forecast_table({"x": predicted}, [verdict]).rows
    assert [row[4] for row in rows] == ["yes", "yes", "no"]
    assert [row[3] for row in rows] == [
        "1.053x [1.000, 1.111]", "1.000x [1.000, 1.000]", "0.769x [0.714, 0.833]",
    ]  # fmt: skip
    assert rows[0][2] == "1.000x [0.921, 1.086]"
    assert "speed-up: time per sample 1.000x [0.921, 1.086]" in predicted.sentence
    unsure = ArmForecast(
        "x", PredictedRatio(), PredictedRatio.of(1.0, math.nan, "rounding numerics")
    )
    assert {row[4] for row in forecast_table({"x": unsure}, [verdict]).rows} == {"-"}
