"""Server runs: predictions, and repeated attempts at lower rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.mlperf.serving import ServiceCurve, ServingResult, threads
from slipstream.mlperf.serving.peaks import _within
from slipstream.mlperf.serving.planning import LoadTestConfig, plan, run_scenario
from slipstream.mlperf.serving.results import ScenarioResult
from slipstream.mlperf.serving.rules import SCENARIOS, Test
from slipstream.mlperf.serving.session import LoadTestRun, Session, _run
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


def run(session: Scripted, **config: Any) -> LoadTestRun:
    return run_scenario(
        cast(Session, session), SCENARIOS["server"], LoadTestConfig(seconds=1.0, **config)
    )


def test_latencies_are_predicted_before_each_run() -> None:
    session = Scripted(150.0)
    p99_ns = ScenarioResult(run(session, rate=100.0)).predicted_ns("p99")
    assert p99_ns is not None
    assert p99_ns > 1e6
    assert "predicted p99" in session.lines[0]
    assert session.lines[1:] == ["run"]


def test_disturbed_calibration_predicts_nothing() -> None:
    # One of ten calls waited for other programs.
    session = Scripted(150.0, times_ns=(1e6,) * 9 + (1e8,))
    row = ScenarioResult(run(session, rate=50.0))
    assert row.predicted_ns("p99") is None
    assert "disturbed" in row.caution


def test_rate_above_capacity_has_no_predicted_latency() -> None:
    row = ScenarioResult(run(Scripted(1e9), rate=2000.0))
    assert row.predicted_ns("p99") is None
    assert "capacity" in row.caution
    about = {"model": "m", "kind": "k", "samples": 1, "sample_bytes": 1}
    (cells,) = ServingResult(about, "", (row,), None).table().rows
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


def test_a_server_is_planned_somewhat_below_its_capacity() -> None:
    session = cast(Session, Scripted(1000.0))
    planned = plan(session, SCENARIOS["server"], LoadTestConfig(seconds=1.0))
    assert 300 < planned.rate < session.served().capacity(BatchPolicy(), 1)


@pytest.mark.parametrize(("test", "queries"), [
    (Test("server", min_duration_s=2.0, rate=50.0), 100),
    (Test("offline", min_duration_s=2.0, rate=50.0), 110),
    (Test("single-stream", min_duration_s=2.0, expected_ns=1e7), 200),
    (Test("multi-stream", min_duration_s=2.0, expected_ns=1e7, samples_per_query=4), 800),
    (Test("single-stream", min_duration_s=0.0, min_queries=7), 7),
], ids=str)  # fmt: skip
def test_queries_for_the_whole_run_are_made_before_it(test: Test, queries: int) -> None:
    assert test.queries_made == pytest.approx(queries)


def test_errors_in_the_log_are_reasons_why_a_run_is_invalid() -> None:
    log: dict[str, Any] = {"values": {"result_validity": "VALID"}, "refused": 0, "answers": 3}
    runs = [_run(Test("server"), Path(), log | {"errors": errors}) for errors in ([], ["lost"])]
    assert [(run.valid, run.reasons) for run in runs] == [(True, ()), (False, ("lost",))]


def test_the_next_rate_is_inside_the_bracket() -> None:
    assert _within(50.0, 0.0, 100.0, 0.03) == 50.0
    assert _within(500.0, 0.0, 100.0, 0.03) < 100.0
    assert _within(70.0, 50.0, 100.0, 0.03) == 70.0
    for rate in (1.0, 50.0, 100.0, 500.0):
        assert 50.0 < _within(rate, 50.0, 100.0, 0.03) < 100.0
        assert 50.0 < _within(rate, 50.0, float("inf"), 0.03) < 100.0


def test_threads_never_make_a_query_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Opened(Scripted):
        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def lightly_served(self) -> tuple[list[float], float]:
            return [9e5, 9e5], 5.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(threads, "Session", lambda *_, **__: Opened(1000.0))
    assert threads.thread_costs() == threads.ThreadCosts(0.0, 5.0, known=True)
