"""Reference convergence points: the rules' example, and the official checker's verdicts."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from slipstream.mlperf.training import compare
from slipstream.mlperf.training.curve import BatchCurve
from slipstream.mlperf.training.rcp import Outcome, Point, Reference
from slipstream.mlperf.training.tasks import load
from slipstream_bench.systems.train import official_json

RULES = {
    128: [16, 14, 16, 17, 16, 16, 15, 16, 15, 16],
    256: [20, 21, 21, 20, 22, 22, 21, 21, 20, 20],
}


@pytest.mark.parametrize(
    ("as_checker", "batch", "mean", "deviation", "speedup", "smallest"),
    [
        (False, 128, 15.75, 0.433, 3.53, 15.21), (False, 256, 20.75, 0.661, 4.12, 19.93),
        (True, 128, 15.75, 0.781, 6.56, 14.78), (True, 256, 20.75, 0.748, 4.69, 19.82),
    ],
)  # fmt: skip
def test_smallest_mean_of_the_rules_example(
    as_checker: bool, batch: int, mean: float, deviation: float, speedup: float, smallest: float
) -> None:
    point = Point.of(batch, RULES[batch], as_checker=as_checker)
    found = point.smallest(5)
    assert point.mean == mean
    assert point.deviation == pytest.approx(deviation, abs=5e-4)
    assert found == pytest.approx(smallest, abs=6e-3)
    assert 100 * (mean / found - 1) == pytest.approx(speedup, abs=6e-3)


def test_reference_chooses_or_interpolates_points() -> None:
    reference = Reference.of(RULES)
    at = {batch: reference.at(batch)[1] for batch in (64, 128, 192, 512)}
    assert list(at.values()) == [
        Outcome.SMALLER, Outcome.FOUND, Outcome.INTERPOLATED, Outcome.MISSING
    ]  # fmt: skip
    assert reference.at(192)[0] is not None
    assert reference.check(128, [15.9] * 5).passed
    assert reference.check(128, [15.5] * 5).scale == pytest.approx(15.75 / 15.5)
    assert not reference.check(128, [15.0] * 5).passed
    assert not reference.check(128, [math.inf, math.inf, 17, 17, 17]).passed
    assert reference.check(128, [math.inf, 17, 17, 17, 17]).passed


def test_slow_points_are_pruned() -> None:
    runs = {64: [20.0] * 10, 128: [15.0] * 10, 256: [19.0] * 10, 512: [18.0] * 10}
    assert [point.batch for point in Reference.of(runs).points] == [128, 512]


def test_verdicts_equal_the_official_checkers() -> None:
    """100 random results."""
    checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
    checker.submission_runs["training"]["digits"] = 5
    generator = np.random.default_rng(0)
    verdicts = []
    for _ in range(100):
        runs = {
            batch: (generator.normal(mean, 0.05 * mean, 10)).round(3).tolist()
            for batch, mean in zip(
                (64, 128, 256), np.sort(generator.uniform(8, 20, 3)), strict=True
            )
        }
        points = io.StringIO(json.dumps(official_json("digits", runs)))
        official = checker.RCP_Checker("training", "6.0.0", "digits", False, points)
        batch = int(generator.choice([64, 128, 256]))
        epochs = generator.normal(
            np.mean(runs[batch]) * generator.uniform(0.85, 1.05), 0.3, 5
        ).round(3)
        record = official._find_rcp(batch, "full_rcps")
        theirs, scale = official._eval_submission_record(record, sorted(epochs.tolist()), "")
        ours = Reference.of(runs, as_checker=True, pruned=False).check(batch, epochs.tolist())
        verdicts.append((ours.passed, bool(theirs)))
        assert ours.scale == pytest.approx(scale, rel=1e-3)
    assert all(ours == theirs for ours, theirs in verdicts)
    assert len({ours for ours, _ in verdicts}) == 2


def test_curve_omits_batch_sizes_with_two_failed_runs() -> None:
    epochs = {
        64: [1.0, 1.1, 0.9, 1.0], 128: [1.6, 1.5, 1.7, 1.6], 256: [1.5, 1.6, 1.5, 1.4],
        512: [2.5, 2.6, 2.4, math.inf], 1024: [3.0, math.inf, math.inf, 3.0],
    }  # fmt: skip
    task = load("fashion_cnn")
    curve = BatchCurve(task, {
        batch: [_outcome(seed, count * task.train_samples, 1e-3 / batch)
                for seed, count in enumerate(counts)]
        for batch, counts in epochs.items()
    })  # fmt: skip
    assert [point.batch for point in curve.points] == [64, 128, 256, 512]
    assert [point.batch for point in curve.reference.points] == [64, 256, 512]
    # From 1 at 64 to 2.55 at 512, nearly on a line: twice the small batch's at about 230.
    assert 200 < curve.reference.critical_batch < 300
    notes = "\n".join(curve.table().notes)
    assert "1024" in notes
    assert "critical" in notes
    # A sample takes an eighth of the time, and 2.5 times as many are needed.
    assert (curve.fastest, curve.sentence) == (512, "")


def test_curve_is_pruned_until_it_is_convex() -> None:
    # Measured on fashion_cnn: 512 is below the line from 256 to 1024, until 1024 is pruned.
    means = {64: 1.65, 128: 2.10, 256: 2.06, 512: 2.87, 1024: 4.56, 2048: 5.99}
    task = load("fashion_cnn")
    curve = BatchCurve(task, {
        batch: [_outcome(seed, mean * task.train_samples, 1e-3) for seed in range(4)]
        for batch, mean in means.items()
    })  # fmt: skip
    assert [point.batch for point in Reference.of(curve.epochs).points] == [64, 256, 512, 2048]
    assert [point.batch for point in curve.reference.points] == [64, 256, 2048]


def test_faster_samples_may_make_a_slower_training() -> None:
    task = load("fashion_cnn")
    curve = BatchCurve(task, {
        batch: [_outcome(seed, 1000 * scale, sample_s * (1 + seed / 1000)) for seed in range(4)]
        for batch, scale, sample_s in ((64, 1, 1e-3), (256, 2, 0.4e-3), (1024, 8, 0.3e-3))
    })  # fmt: skip
    assert curve.fastest == 256
    assert curve.steps_s(256) == pytest.approx(0.8, rel=0.01)
    assert curve.sentence == (
        "batch size 256 reaches the target first; at 1024 a sample is 25 % faster, but the "
        "training is 200 % slower"
    )


def _outcome(seed: int, samples: float, sample_s: float) -> compare.Outcome:
    done = math.isfinite(samples)
    whole_s = samples * sample_s if done else 1.0
    return compare.Outcome(
        seed, "success" if done else "aborted", round(samples) if done else 0, whole_s, whole_s,
        sample_s, f"{seed} {samples} {sample_s}",
    )  # fmt: skip
