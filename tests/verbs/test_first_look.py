"""Tests of speed-up bounds before anything is measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.durations import Durations, Timing
from slipstream.graph import PROVENANCES, Graph, replace_tasks
from slipstream.graph.page_faults import page_fault_tasks, with_launches
from slipstream.provenance import Provenance
from slipstream.technique import parse
from slipstream.techniques import threads
from slipstream.techniques.fused_optimizer import FusedOptimizer
from slipstream.techniques.precision import Amp
from slipstream.techniques.threads import Threads
from slipstream.verbs import advising
from slipstream.verbs.advising import advise
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Prediction
from slipstream.verbs.speedup_bounds import SpeedupBound, first_look
from tiny_models import captured


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A recorded step with convolutions."""
    return captured("conv")


class UniformDurations(Durations):
    """Returns one time for every question, and records the questions to measure."""

    def __init__(self, path: Path, nanoseconds: float) -> None:
        super().__init__(1, path)
        self._answer = Timing(nanoseconds, 0.0, Provenance.MICROBENCHMARK)
        self.requested: list[Any] = []
        self.is_cached = False

    def lookup(self, call: Any) -> Timing | None:
        return self._answer if self.is_cached else None

    def missing(self, calls: Any) -> Any:
        return [] if self.is_cached else [(self._key(call), call) for call in calls]

    def measure(
        self, calls: Any, report: Any = lambda line: None, until: Any = None, **how: Any
    ) -> None:
        self.requested += list(calls)
        self.is_cached = True


def test_nothing_is_measured_and_the_bound_holds(graph: Graph, tmp_path: Path) -> None:
    durations = UniformDurations(tmp_path / "none.db", 1.0)
    (bound,) = first_look(graph, parse("amp:bf16"), durations)
    assert durations.requested == []
    assert bound.missing > 0
    assert 0 < bound.share < 1
    # The rest of the step remains in any case.
    assert bound.max_speedup is not None
    assert 1 < bound.max_speedup < math.inf
    # New calls are as fast as old ones, but casts are added, so the gain is below the bound.
    durations.is_cached = True
    (prediction,) = predict(graph, ["amp:bf16"], durations=durations)
    assert prediction.speedup < bound.max_speedup


def test_more_threads_gain_no_more_than_there_are_threads(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    for count in (2, 4):
        (bound,) = first_look(graph, [Threads(count)], UniformDurations(tmp_path / "none.db", 1.0))
        assert bound.missing > 0
        assert bound.max_speedup is not None
        assert 1 < bound.max_speedup <= count
        assert not bound.decided
    # A step on fewer threads has no such bound.
    assert Threads(1).minimum_share(replace(graph, meta={**graph.meta, "threads": 2})) == 0


def test_cached_operators_give_a_final_prediction(graph: Graph, tmp_path: Path) -> None:
    durations = UniformDurations(tmp_path / "none.db", 1000.0)
    durations.is_cached = True
    (bound,) = first_look(graph, parse("amp:bf16"), durations)
    (expected,) = predict(graph, ["amp:bf16"], durations=durations)
    assert bound == SpeedupBound(expected)


def test_reports_techniques_that_do_not_apply(graph: Graph, tmp_path: Path) -> None:
    (bound,) = first_look(graph, parse("conv_bn_fold"), UniformDurations(tmp_path / "none.db", 1.0))
    assert bound.prediction.why_not
    assert not bound.missing


def test_does_not_measure_techniques_that_cannot_be_worth_it(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "single_techniques", lambda: [FusedOptimizer(), Amp()])
    phases = graph.tasks.phase
    # An optimizer that takes hardly any of the step.
    small = graph.tasks.duration_ns.copy()
    gaps = graph.tasks.gap_ns.copy()
    last = phases == phases.max()
    small[last] = 1.0
    gaps[last] = 0.0
    quick = replace(graph, tasks=replace(graph.tasks, duration_ns=small, gap_ns=gaps))
    durations = UniformDurations(tmp_path / "none.db", 1000.0)
    shown: list[SpeedupBound] = []
    found = advise(quick, combinations=False, durations=durations, show=shown.extend)
    fused, amp = shown
    assert fused.decided
    assert not amp.decided
    assert durations.requested
    assert not any("optimizer_step" in str(getattr(q, "op", q)) for q in durations.requested)
    (row,) = (p for p in found.predictions if p.technique.startswith("fused_optimizer"))
    assert row.verdict == "not-worth-it"
    assert Provenance.ASSUMED in row.shares


def test_does_not_measure_layers_that_multiply_more(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "single_techniques", lambda: list(parse("quadratic")))
    durations = UniformDurations(tmp_path / "none.db", 1000.0)
    (row,) = advise(graph, combinations=False, durations=durations).predictions
    assert durations.requested == []
    assert "at most 1.00x" in row.in_words


@pytest.mark.parametrize(("factor", "decided"), [(1.1, True), (0.9, False)])
def test_increased_page_faults_are_no_gain(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, decided: bool
) -> None:
    faulting = with_launches(graph, [0.3 * float(graph.tasks.duration_ns.sum())] * 2)
    fitted = PROVENANCES.index(Provenance.FITTED)

    def predicted(*arguments: Any, **options: Any) -> list[Prediction]:
        (found,) = predict(*arguments, **options)
        assert isinstance(found, Predicted)
        assert found.graph is not None
        tasks = page_fault_tasks(found.graph)
        duration_ns = found.graph.tasks.duration_ns.copy()
        provenance = found.graph.tasks.provenance.copy()
        duration_ns[tasks] *= factor
        provenance[tasks] = fitted
        after = replace_tasks(found.graph, duration_ns=duration_ns, provenance=provenance)
        return [replace(found, graph=after)]

    monkeypatch.setattr("slipstream.verbs.speedup_bounds.predict", predicted)
    (found,) = first_look(faulting, parse("quadratic"), UniformDurations(tmp_path / "none.db", 1.0))
    assert found.decided == decided


def test_shows_no_first_look_if_all_operators_are_cached(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "single_techniques", lambda: [Amp()])
    durations = UniformDurations(tmp_path / "none.db", 1000.0)
    durations.is_cached = True
    shown: list[SpeedupBound] = []
    advise(graph, combinations=False, durations=durations, show=shown.extend)
    assert shown == []
