"""Comparison of two arms: false positives, power, sentences and scores."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.mlperf.training.compare import Factor, Outcome, Verdict, detectable, power_of
from slipstream.mlperf.training.score import olympic_mean
from slipstream.mlperf.training.tasks import recorded


def runs(samples: list[float], sample_s: float = 1.0, failed: int = 0) -> list[Outcome]:
    return [
        Outcome(
            seed, "aborted" if seed < failed else "success", int(n), n * sample_s, n * sample_s,
            sample_s * (1 + 0.001 * seed), f"{seed} {n} {sample_s}",
        )
        for seed, n in enumerate(samples)
    ]  # fmt: skip


def test_false_positives_are_five_percent() -> None:
    """300 comparisons of 10 pairs resampled from the recorded runs of fashion_cnn: 5 % +- 2.5."""
    reference = recorded("fashion_cnn")
    assert reference is not None
    samples = reference["samples"]["128"]
    generator = np.random.default_rng(0)
    found = sum(
        Factor.of(generator.choice(samples, 10), generator.choice(samples, 10)).significant
        for _ in range(300)
    )
    assert 0.025 <= found / 300 <= 0.075


@pytest.mark.parametrize(("pairs", "spread"), [(5, 0.1), (10, 0.15), (40, 0.2)])
def test_power_is_as_announced(pairs: int, spread: float) -> None:
    effect = detectable(spread, pairs)
    assert power_of(math.log1p(effect), spread, pairs) == pytest.approx(0.8, abs=1e-3)
    generator = np.random.default_rng(1)
    a = np.exp(generator.normal(0, spread, (2000, pairs)))
    b = np.exp(generator.normal(math.log1p(effect), spread, (2000, pairs)))
    found = np.mean([Factor.of(x, y).significant for x, y in zip(a, b, strict=True)])
    assert found == pytest.approx(0.8, abs=0.05)


def test_sentence_contrasts_step_and_training() -> None:
    base = runs([1000, 1100, 900, 1050, 950])
    slower = runs([1400, 1550, 1250, 1480, 1330], 0.78)
    verdict = Verdict.of("topk:0.01", base, slower)
    assert re.fullmatch(
        r"topk:0\.01: .*\b22 % faster\b.*\b40 % more samples\b.*\b9 % slower", verdict.sentence
    )
    assert "bitwise identical" in Verdict.of("x", base, base).sentence
    failed = Verdict.of("x", base, runs([1000] * 5, failed=2))
    assert re.search(r"\b2 of 5 runs\b.*\bnot\b", failed.sentence)
    assert math.isinf(failed.score)
    assert "no run reached" in Verdict.of("x", base, runs([1000] * 5, failed=5)).sentence


def test_training_time_includes_evaluations() -> None:
    """The steps are 28 % slower, and the run with its equal evaluations 14 %."""

    def arm(sample_s: float, whole_s: float, *, wall: bool = False) -> list[Outcome]:
        return [
            Outcome(seed, "success", 1000, whole_s * noise, 9.0 if wall else whole_s * noise,
                    sample_s, f"{sample_s}", wall=wall)
            for seed, noise in enumerate((1.0, 1.01, 0.99, 1.0, 1.02))
        ]  # fmt: skip

    for wall in (False, True):
        verdict = Verdict.of("x", arm(1.0, 2000.0, wall=wall), arm(1.28, 2280.0, wall=wall))
        assert verdict.steps.ratio == pytest.approx(1.28)
        assert verdict.time.ratio == pytest.approx(1.14)
        assert verdict.sentence.endswith("the training is 14 % slower")


def test_scores_drop_the_extreme_runs() -> None:
    assert olympic_mean([5, 1, 3, 2, 9]) == pytest.approx(10 / 3)
    assert olympic_mean([math.inf, 1, 3, 2, 9]) == pytest.approx(14 / 3)
    assert olympic_mean([math.inf, math.inf, 3, 2, 9]) == math.inf
    with pytest.raises(InvalidArgumentError, match="at least 3"):
        olympic_mean([1, 2])
