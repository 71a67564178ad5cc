"""Time to quality is predicted before the first run: both factors, their interval, the ledger."""

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
from slipstream.mlperf.training.foresight import Expected, Foresight, foresight_table
from slipstream.mlperf.training.pilot import samples_ratio
from slipstream.verbs.history import history
from slipstream.verbs.training import METRIC, foresee


def losses(steps: int, slower: float, seed: int) -> list[float]:
    """A power law of the samples, each batch's 5 % off."""
    at = np.arange(1, steps + 1) / slower
    return (at**-0.4 * np.exp(np.random.default_rng(seed).normal(0, 0.05, steps))).tolist()


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.5])
def test_a_pilot_tells_how_many_times_the_samples(slower: float) -> None:
    ratio = samples_ratio(losses(400, 1.0, 1), losses(400, slower, 2))
    assert ratio == pytest.approx(slower, rel=0.06)


def test_a_pilot_that_shows_no_trend_tells_nothing() -> None:
    rising = losses(400, 1.0, 1)[::-1]
    assert math.isnan(samples_ratio(losses(400, 1.0, 1), rising))
    assert math.isnan(samples_ratio(losses(8, 1.0, 1), losses(8, 1.0, 2)))
    assert math.isnan(samples_ratio([math.inf] * 400, losses(400, 1.0, 2)))


def test_errors_of_factors_add_up_as_squares() -> None:
    sample = Expected.of(0.8, 0.03, "graph")
    samples = Expected.of(1.5, 0.04, "pilot")
    whole = sample.times(samples)
    assert whole.ratio == pytest.approx(1.2)
    assert math.log(whole.high / whole.ratio) == pytest.approx(1.645 * 0.05)
    assert sample.over(sample).ratio == pytest.approx(1)
    assert not sample.times(Expected()).known
    unsure = sample.times(Expected.of(1.5, math.nan, "pilot"))
    assert (unsure.ratio, math.isnan(unsure.low)) == (whole.ratio, True)


def test_what_is_predicted_is_kept_before_anything_is_measured(tmp_path: Path) -> None:
    out, name = tmp_path / "out", "lowrank:0.25"
    with history(tmp_path / "results.db") as past:
        predictions = foresee("digits", [name], past, runs=3, seeds=1)
    with Store(tmp_path / "results.db") as store:
        (kept,) = (one for one in store.predictions() if one.metric == METRIC)
    one = predictions[name]
    assert one.sample.low < one.sample.ratio < one.sample.high
    assert one.samples.ratio != 1
    assert (kept.technique, kept.workload, kept.detail["runs"]) == (name, "digits", 3)
    assert kept.ratio == pytest.approx(one.sample.ratio * one.samples.ratio)

    def say(line: str) -> None:
        if "run 1 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_to_quality("digits", [name], seeds=[1], folder=out, predictions=predictions, say=say)
    written = json.loads((out / "result.json").read_text())
    assert (written["arms"], set(written["predictions"])) == ([], {name})

    factor = Factor(0.95, 0.9, 1.0, 0.1, 5)
    verdict = Verdict(name, factor, factor, factor, factor, False, 5, 5, 1.0, 1.0)
    rows = foresight_table(predictions, [verdict]).rows
    assert [row[1] for row in rows] == ["time of a sample", "samples", "time of all steps"]


def test_ranks_on_this_machine_tell_no_time(tmp_path: Path) -> None:
    with history(tmp_path / "results.db") as past:
        (one,) = foresee("digits", ["ddp:workers=2"], past, seeds=0).values()
    assert not one.sample.known
    assert "ranks" in one.sample.basis
    assert one.samples.basis == "no pilot was run"
    assert "not predicted" in one.sentence


def test_what_does_not_apply_is_not_trained(tmp_path: Path) -> None:
    with history(tmp_path / "results.db") as past:
        predictions = foresee("digits", ["scan:auto"], past, seeds=1)
    assert "no nn.RNN" in predictions["scan:auto"].sentence
    with pytest.raises(UsageError, match="nothing to train: scan:auto"):
        time_to_quality("digits", ["scan:auto"], seeds=[1], predictions=predictions)
    judged = time_to_quality(
        "digits", ["scan:auto", "fused_optimizer:foreach"], seeds=[1], folder=tmp_path / "out",
        most_epochs=0.1, predictions=predictions,
    )  # fmt: skip
    assert [one.name for one in judged.arms] == ["as it is", "fused_optimizer:foreach"]


def test_whether_a_measured_factor_lies_inside() -> None:
    inside, outside, exact = Factor(0.95, 0.9, 1.0, 0.1, 5), Factor(1.3, 1.2, 1.4, 0.01, 5), Factor(
        1.0, 1.0, 1.0, 1.0, 5
    )  # fmt: skip
    verdict = Verdict("x", inside, exact, outside, outside, False, 5, 5, 1.0, 1.0)
    one = Foresight("x", Expected.of(1.0, 0.05, "graph"), Expected.of(1.0, 0.0, "exact numbers"))
    rows = foresight_table({"x": one}, [verdict]).rows
    assert [row[4] for row in rows] == ["yes", "yes", "no"]
    unsure = Foresight("x", Expected(), Expected.of(1.0, math.nan, "rounding numbers"))
    assert {row[4] for row in foresight_table({"x": unsure}, [verdict]).rows} == {"-"}
