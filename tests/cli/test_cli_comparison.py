"""Messages while a comparison runs."""

from __future__ import annotations

import re

import pytest

from slipstream.cli import _output
from slipstream.measure.records import UNCHANGED, Claim, Verdict
from slipstream.measure.runner import Progress


def _claim(arm: str, ratio: float, carries: bool = True) -> Claim:
    return Claim(
        "wall", arm, UNCHANGED, "median", ratio, ratio - 0.05, ratio + 0.05, 0.95,
        Verdict.INCONCLUSIVE, 0.1, 20, carries=carries,
    )  # fmt: skip


def test_the_cheapest_arms_come_first_on_a_short_line() -> None:
    messages: list[str] = []
    ratios = {"amp:bf16": 0.9, "threads:2": 0.6, "compile": 1.2, "sgd": 0.8, "fused": 0.97}
    claims = (*(_claim(*item) for item in ratios.items()), _claim("sgd", 0.1, carries=False))
    _output.show_progress(messages.append)(Progress("measure", 20, 12.4, claims))
    assert len(messages) == 1
    now, *arms = messages[0].split("; ")
    assert re.fullmatch(r"block 20, .*\b12 s\b.*", now)
    assert arms == [
        "threads:2 1.67x [1.54, 1.82]", "sgd 1.25x [1.18, 1.33]", "amp:bf16 1.11x [1.05, 1.18]",
        "2 more",
    ]  # fmt: skip


def test_a_log_has_a_line_every_five_seconds_and_at_every_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(_output.time, "monotonic", lambda: now)
    monkeypatch.setattr(_output.sys.stderr, "isatty", lambda: False, raising=False)
    messages: list[str] = []
    show = _output.show_progress(messages.append)
    for second in range(12):
        now = float(second)
        show(Progress("warmup" if second < 1 else "measure", second, 60.0))
    blocks = [line.partition(", ")[0] for line in messages]
    assert blocks == ["warmup", "block 1", "block 6", "block 11"]
    assert all(" 60 s" in line for line in messages[1:])


def test_a_budget_overrun_is_explained() -> None:
    messages: list[str] = []
    now = Progress("measure", 33, 61.0, widened="1.5 times the budget: the machine is busy")
    _output.show_progress(messages.append)(now)
    assert len(messages) == 1
    assert re.fullmatch(rf"block 33, .*\b61 s .*\({now.widened}\)", messages[0])
