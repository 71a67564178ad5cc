"""What is said while a comparison runs."""

from __future__ import annotations

import re

import pytest

from slipstream.cli import _output
from slipstream.measure.ledger import Score
from slipstream.measure.records import Claim, PredictionRecord, Verdict
from slipstream.measure.runner import Progress
from slipstream.verbs.proving.proof import shown_before


def _claim(arm: str, ratio: float, carries: bool = True) -> Claim:
    return Claim(
        "wall", arm, "as it is", "median", ratio, ratio - 0.05, ratio + 0.05, 0.95,
        Verdict.INCONCLUSIVE, 0.1, 20, carries=carries,
    )  # fmt: skip


def test_the_cheapest_arms_come_first_on_a_short_line() -> None:
    said: list[str] = []
    ratios = {"amp:bf16": 0.9, "threads:2": 0.6, "compile": 1.2, "sgd": 0.8, "fused": 0.97}
    claims = (*(_claim(*one) for one in ratios.items()), _claim("sgd", 0.1, carries=False))
    _output.show_progress(said.append)(Progress("measure", 20, 12.4, claims))
    assert len(said) == 1
    now, *arms = said[0].split("; ")
    assert re.fullmatch(r"block 20, .*\b12 s\b.*", now)
    assert arms == [
        "threads:2 0.60 [0.55, 0.65]", "sgd 0.80 [0.75, 0.85]", "amp:bf16 0.90 [0.85, 0.95]",
        "2 more",
    ]  # fmt: skip


def test_in_a_log_a_line_comes_every_five_seconds_and_at_every_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(_output.time, "monotonic", lambda: now)
    monkeypatch.setattr(_output.sys.stderr, "isatty", lambda: False, raising=False)
    said: list[str] = []
    show = _output.show_progress(said.append)
    for second in range(12):
        now = float(second)
        show(Progress("warmup" if second < 1 else "measure", second, 60.0))
    blocks = [line.partition(", ")[0] for line in said]
    assert blocks == ["warmup", "block 1", "block 6", "block 11"]
    assert all(" 60 s" in line for line in said[1:])


def test_what_was_shown_before_is_said_with_its_date_and_whether_it_held() -> None:
    shown = PredictionRecord(
        "train.py:step", "fused_optimizer", "cpu", 0.72, 0.68, 0.76, "simulated",
        "2026-01-03T04:05:06Z", "here",
    )  # fmt: skip
    said = shown_before(Score(shown, _claim("fused_optimizer", 0.6), "id", -0.18, 3.2))
    values = [
        "fused_optimizer, cpu: 2026-01-03 04:05 UTC", "0.720 [0.680, 0.760]", "1.39x [1.32, 1.47]",
        "0.600 (1.67x)",
    ]  # fmt: skip
    places = [said.index(value) for value in values]
    assert places == sorted(places)
    held = shown_before(Score(shown, _claim("fused_optimizer", 0.7), "id", -0.03, 0.5))
    assert [word in said for word in ("outside", "inside")] == [True, False]
    assert [word in held for word in ("outside", "inside")] == [False, True]


def test_more_time_than_the_budget_is_explained() -> None:
    said: list[str] = []
    now = Progress("measure", 33, 61.0, widened="1.5 times the budget: the machine is busy")
    _output.show_progress(said.append)(now)
    assert len(said) == 1
    assert re.fullmatch(rf"block 33, .*\b61 s .*\({now.widened}\)", said[0])
