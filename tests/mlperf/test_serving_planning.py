"""A run that missed its bound is tried again at lower rates, as often as helps and no further."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.mlperf.serving import ServiceCurve
from slipstream.mlperf.serving.planning import Wishes, measured
from slipstream.mlperf.serving.rules import SCENARIOS, Test
from slipstream.mlperf.serving.session import Run, Session
from slipstream.runtimes import BatchPolicy


class Scripted:
    """A session whose server misses its bound above a rate, or refuses queries."""

    policy, workers = BatchPolicy(), 1

    def __init__(self, fine_below: float, refused: int = 0) -> None:
        self.fine_below, self.refused = fine_below, refused
        self.rates: list[float] = []

    def curve(self) -> ServiceCurve:
        return ServiceCurve.of({1: 1e6})

    served = curve

    def run(self, test: Test, folder: Path | None = None) -> Run:
        self.rates.append(test.rate)
        fine = test.rate < self.fine_below and not self.refused
        return Run(test, Path(), fine, test.rate, 100, {}, (), refused=self.refused)


def run(session: Scripted, **wishes: Any) -> Run:
    return measured(cast(Session, session), SCENARIOS["server"], Wishes(seconds=1.0, **wishes))


def test_a_server_is_tried_at_half_the_rate_until_it_keeps_its_bound() -> None:
    whole = Scripted(1e9)
    assert run(whole).attempts == 1
    (rate,) = whole.rates
    slow = Scripted(0.3 * rate)
    found = run(slow)
    assert found.valid
    assert found.attempts == 3
    assert slow.rates == pytest.approx([rate, rate / 2, rate / 4])
    hopeless = Scripted(0.0)
    assert not run(hopeless).valid
    assert len(hopeless.rates) == 4


def test_what_no_other_rate_would_mend_is_run_once() -> None:
    named = Scripted(0.0)
    assert run(named, rate=100.0).attempts == 1
    assert named.rates == [100.0]
    refusing = Scripted(1e9, refused=3)
    assert run(refusing).attempts == 1
