"""The last lines of the demo for all results of its measurement."""

from __future__ import annotations

import re

import pytest

from slipstream.cli import demo
from slipstream.measure import environment
from slipstream.measure.environment import from_facts
from slipstream.measure.records import (
    UNCHANGED,
    Claim,
    Experiment,
    ExperimentSettings,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.render import ComparisonRow, comparison_rows


def _row(verdict: Verdict, ratio: float, arm: str = "amp:bf16") -> ComparisonRow:
    claim = Claim(
        "cpu", arm, UNCHANGED, "median", ratio, ratio - 0.05, ratio + 0.05, 0.95, verdict, 0.1, 5
    )
    shown = PredictionRecord("", arm, "cpu", 0.82, 0.78, 0.86, "simulated", "", "")
    place = from_facts({})
    made = Experiment(
        "demo", "", place, ExperimentSettings(UNCHANGED), (), {}, predictions={arm: shown}
    )
    return comparison_rows(made, [claim])[0]


def test_an_undecided_result_is_reported_with_what_to_do() -> None:
    for verdict in (Verdict.INCONCLUSIVE, Verdict.UNTRUSTWORTHY):
        (line,) = demo.outcome(_row(verdict, 3.457), False)
        assert re.search(r"\b5 blocks\b.*\bnot decide\b", line)
        assert "slipstream demo --budget 3min" in line


def test_each_technique_is_shown_as_predicted_and_as_measured() -> None:
    (line,) = demo.outcome(_row(Verdict.FASTER, 0.8, "fused_optimizer:fused"), False)
    assert line == (
        "fused_optimizer:fused: predicted 1.22x [1.16, 1.28], measured 1.25x [1.18, 1.33]: "
        "inside; faster"
    )
    (line,) = demo.outcome(_row(Verdict.UNBACKED, 0.7), False)
    assert "outside; faster (quality not checked)" in line
    (line,) = demo.outcome(_row(Verdict.EQUIVALENT, 1.0), False)
    assert "no difference" in line


@pytest.mark.parametrize(("bf16", "explained"), [(False, True), (True, False), (None, False)])
def test_a_slower_amp_is_explained_by_a_cpu_without_bf16_instructions(
    bf16: bool | None, explained: bool
) -> None:
    output = " ".join(demo.outcome(_row(Verdict.SLOWER, 3.1), bf16))
    assert re.search(r"\b0\.32x\b.*\bslower\b", output)
    assert bool(re.search(r"\bprocessor\b.*\bno bfloat16\b", output)) is explained
    other = demo.outcome(_row(Verdict.SLOWER, 1.1, "fused_optimizer:fused"), bf16)
    assert len(other) == 1


@pytest.mark.parametrize(
    ("flags", "supported"),
    [
        ("avx2 avx512f avx512bw", False),
        ("avx512f avx512_bf16", True),
        ("asimd bf16", True),
        ("", None),
    ],
)
def test_cpu_flags_determine_bf16_support(
    monkeypatch: pytest.MonkeyPatch, flags: str, supported: bool | None
) -> None:
    monkeypatch.setattr(
        "slipstream.measure.facts_machine.read", lambda path: f"model : 1\nflags : {flags}\n\n"
    )
    assert environment.computes_in_bf16() is supported
