"""What the demo says at its end, whichever way its measurement went."""

from __future__ import annotations

import math
import re

import pytest

from slipstream.cli import demo
from slipstream.measure import environment
from slipstream.measure.records import Claim, Verdict


def _claim(verdict: Verdict, ratio: float, arm: str = "amp:bf16") -> Claim:
    return Claim("cpu", arm, "as it is", "median", ratio, 0.0, math.inf, 0.95, verdict, 0.1, 5)


def test_what_was_not_decided_is_said_plainly_with_what_to_do() -> None:
    for verdict in (Verdict.INCONCLUSIVE, Verdict.UNTRUSTWORTHY):
        (said,) = demo.outcome(_claim(verdict, 3.457), False)
        assert re.search(r"\b5 blocks\b.*\bnot decide\b", said)
        assert "slipstream demo --budget 3min" in said


def test_what_pays_and_what_does_not_are_told_apart() -> None:
    (said,) = demo.outcome(_claim(Verdict.FASTER, 0.8, "fused_optimizer:fused"), False)
    assert re.search(r"^fused_optimizer:fused\b.*\bfaster\b.*\b1\.25 times\b", said)
    (said,) = demo.outcome(_claim(Verdict.UNBACKED, 0.8), False)
    assert "quality not checked" in said
    (said,) = demo.outcome(_claim(Verdict.EQUIVALENT, 1.0), False)
    assert "no difference" in said


@pytest.mark.parametrize(("bf16", "told"), [(False, True), (True, False), (None, False)])
def test_a_slower_amp_is_explained_by_a_processor_without_its_instructions(
    bf16: bool | None, told: bool
) -> None:
    said = " ".join(demo.outcome(_claim(Verdict.SLOWER, 3.1), bf16))
    assert re.search(r"\bslower\b.*\b3\.10\b", said)
    assert bool(re.search(r"\bprocessor\b.*\bno bfloat16\b", said)) is told
    other = demo.outcome(_claim(Verdict.SLOWER, 1.1, "fused_optimizer:fused"), bf16)
    assert len(other) == 1


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ("avx2 avx512f avx512bw", False),
        ("avx512f avx512_bf16", True),
        ("asimd bf16", True),
        ("", None),
    ],
)
def test_the_processor_s_flags_say_whether_it_computes_in_bf16(
    monkeypatch: pytest.MonkeyPatch, flags: str, known: bool | None
) -> None:
    monkeypatch.setattr(
        "slipstream.measure.facts_machine.read", lambda path: f"model : 1\nflags : {flags}\n\n"
    )
    assert environment.computes_in_bf16() is known
