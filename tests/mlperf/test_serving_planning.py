"""Server runs: predictions, and repeated attempts at lower rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.mlperf.serving import Served, ServiceCurve
from slipstream.mlperf.serving.planning import Wishes, measured
from slipstream.mlperf.serving.results import Row
from slipstream.mlperf.serving.rules import SCENARIOS, Test
from slipstream.mlperf.serving.session import LoadTestRun, Session
from slipstream.runtimes import BatchPolicy


class Scripted:
    """A session whose server misses its bound from a rate on, or refuses queries."""

    policy, workers = BatchPolicy(), 1

    def __init__(
        self, valid_below: float, refused: int = 0, times_ns: tuple[float, ...] = (1e6,)
    ) -> None:
        self.valid_below, self.refused, self.times_ns = valid_below, refused, times_ns
        self.rates: list[float] = []
        self.lines: list[str] = []

    def curve(self) -> ServiceCurve:
        return ServiceCurve.of({1: 1e6})

    def served(self) -> ServiceCurve:
        return ServiceCurve({1: self.times_ns})

    def report(self, line: str) -> None:
        self.lines.append(line)

    def run(self, test: Test, folder: Path | None = None) -> LoadTestRun:
        self.rates.append(test.rate)
        self.lines.append("run")
        valid = test.rate < self.valid_below and not self.refused
        return LoadTestRun(test, Path(), valid, test.rate, 100, {}, (), refused=self.refused)


def run(session: Scripted, **wishes: Any) -> LoadTestRun:
    return measured(cast(Session, session), SCENARIOS["server"], Wishes(seconds=1.0, **wishes))


def test_latencies_are_predicted_before_each_run() -> None:
    session = Scripted(150.0)
    p99_ns = Row(run(session, rate=100.0)).predicted_ns("p99")
    assert p99_ns is not None
    assert p99_ns > 1e6
    assert "predicted p99" in session.lines[0]
    assert session.lines[1:] == ["run"]


def test_disturbed_calibration_predicts_nothing() -> None:
    # One of ten calls waited for other programs.
    session = Scripted(150.0, times_ns=(1e6,) * 9 + (1e8,))
    row = Row(run(session, rate=50.0))
    assert row.predicted_ns("p99") is None
    assert "disturbed" in row.caution


def test_rate_above_capacity_has_no_predicted_latency() -> None:
    row = Row(run(Scripted(1e9), rate=2000.0))
    assert row.predicted_ns("p99") is None
    assert "capacity" in row.caution
    about = {"model": "m", "kind": "k", "samples": 1, "sample_bytes": 1}
    (cells,) = Served(about, "", (row,), None).table().rows
    assert "grows" in cells


def test_rate_is_halved_until_the_bound_is_met() -> None:
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


def test_chosen_rates_and_refusals_are_not_retried() -> None:
    chosen = Scripted(0.0)
    assert run(chosen, rate=100.0).attempts == 1
    assert chosen.rates == [100.0]
    refusing = Scripted(1e9, refused=3)
    assert run(refusing).attempts == 1
