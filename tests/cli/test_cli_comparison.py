"""What is said while a comparison runs."""

from __future__ import annotations

import pytest

from slipstream.cli import _comparison
from slipstream.measure.records import Claim, Verdict
from slipstream.measure.runner import Progress


def _claim(arm: str, ratio: float, carries: bool = True) -> Claim:
    return Claim(
        "wall", arm, "as it is", "median", ratio, ratio - 0.05, ratio + 0.05, 0.95,
        Verdict.INCONCLUSIVE, 0.1, 20, carries=carries,
    )  # fmt: skip


def test_the_cheapest_arms_come_first_on_a_short_line() -> None:
    said: list[str] = []
    ratios = {"amp:bf16": 0.9, "threads:2": 0.6, "compile": 1.2, "sgd": 0.8, "fused": 0.97}
    claims = (*(_claim(*one) for one in ratios.items()), _claim("sgd", 0.1, carries=False))
    _comparison.show_progress(said.append)(Progress("measure", 20, 12.4, claims))
    assert said == [
        "block 20, at most 12 s left; threads:2 0.60 [0.55, 0.65]; sgd 0.80 [0.75, 0.85]; "
        "amp:bf16 0.90 [0.85, 0.95]; 2 more"
    ]


def test_in_a_log_a_line_comes_every_five_seconds_and_at_every_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(_comparison.time, "monotonic", lambda: now)
    monkeypatch.setattr(_comparison.sys.stderr, "isatty", lambda: False, raising=False)
    said: list[str] = []
    show = _comparison.show_progress(said.append)
    for second in range(12):
        now = float(second)
        show(Progress("warmup" if second < 1 else "measure", second, 60.0))
    assert said == ["warmup", *(f"block {n}, at most 60 s left" for n in (1, 6, 11))]
