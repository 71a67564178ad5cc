"""What can be said before anything is micro-benchmarked, and what then need not be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.durations import Answer, Durations
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


class Told(Durations):
    """Answers every question with the same time, and counts what was asked to be measured."""

    def __init__(self, path: Path, nanoseconds: float) -> None:
        super().__init__(1, path)
        self._answer = Answer(nanoseconds, 0.0, Provenance.MICROBENCHMARK)
        self.asked: list[Any] = []
        self.told = False

    def lookup(self, call: Any) -> Answer | None:
        return self._answer if self.told else None

    def missing(self, calls: Any) -> Any:
        return [] if self.told else [(self._key(call), call) for call in calls]

    def measure(
        self, calls: Any, report: Any = lambda line: None, until: Any = None, **how: Any
    ) -> None:
        self.asked += list(calls)
        self.told = True


def test_nothing_is_measured_and_the_bound_holds(graph: Graph, tmp_path: Path) -> None:
    durations = Told(tmp_path / "none.db", 1.0)
    (one,) = first_look(graph, parse("amp:bf16"), durations)
    assert durations.asked == []
    assert one.missing > 0
    assert 0 < one.share < 1
    # At the very least the rest of the step remains.
    assert one.max_speedup is not None
    assert 1 < one.max_speedup < math.inf
    # New forms as fast as old ones: casts come on top, so that the gain is below the bound.
    durations.told = True
    (told,) = predict(graph, ["amp:bf16"], durations=durations)
    assert told.speedup < one.max_speedup


def test_more_threads_gain_no_more_than_there_are_threads(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    for count in (2, 4):
        (one,) = first_look(graph, [Threads(count)], Told(tmp_path / "none.db", 1.0))
        assert one.missing > 0
        assert one.max_speedup is not None
        assert 1 < one.max_speedup <= count
        assert not one.decided
    # Back to fewer threads: how many times faster that is has no such bound.
    assert Threads(1).minimum_share(replace(graph, meta={**graph.meta, "threads": 2})) == 0


def test_what_is_known_is_final(graph: Graph, tmp_path: Path) -> None:
    durations = Told(tmp_path / "none.db", 1000.0)
    durations.told = True
    (one,) = first_look(graph, parse("amp:bf16"), durations)
    (expected,) = predict(graph, ["amp:bf16"], durations=durations)
    assert one == SpeedupBound(expected)


def test_what_does_not_apply_says_so(graph: Graph, tmp_path: Path) -> None:
    (one,) = first_look(graph, parse("conv_bn_fold"), Told(tmp_path / "none.db", 1.0))
    assert one.prediction.why_not
    assert not one.missing


def test_what_cannot_pay_is_not_measured(
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
    durations = Told(tmp_path / "none.db", 1000.0)
    shown: list[SpeedupBound] = []
    found = advise(quick, combinations=False, durations=durations, show=shown.extend)
    fused, amp = shown
    assert fused.decided
    assert not amp.decided
    assert durations.asked
    assert not any("optimizer_step" in str(getattr(q, "op", q)) for q in durations.asked)
    (row,) = (p for p in found.predictions if p.technique.startswith("fused_optimizer"))
    assert row.verdict == "not-worth-it"
    assert Provenance.ASSUMED in row.shares


def test_layers_that_multiply_more_are_not_measured(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "single_techniques", lambda: list(parse("quadratic")))
    durations = Told(tmp_path / "none.db", 1000.0)
    (row,) = advise(graph, combinations=False, durations=durations).predictions
    assert durations.asked == []
    assert "at most 1.00x" in row.in_words


@pytest.mark.parametrize(("factor", "decided"), [(1.1, True), (0.9, False)])
def test_page_faults_that_grow_are_no_gain(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, decided: bool
) -> None:
    faulting = with_launches(graph, [0.3 * float(graph.tasks.duration_ns.sum())] * 2)
    fitted = PROVENANCES.index(Provenance.FITTED)

    def predicted(*arguments: Any, **options: Any) -> list[Prediction]:
        (one,) = predict(*arguments, **options)
        assert isinstance(one, Predicted)
        assert one.graph is not None
        tasks = page_fault_tasks(one.graph)
        duration_ns = one.graph.tasks.duration_ns.copy()
        provenance = one.graph.tasks.provenance.copy()
        duration_ns[tasks] *= factor
        provenance[tasks] = fitted
        after = replace_tasks(one.graph, duration_ns=duration_ns, provenance=provenance)
        return [replace(one, graph=after)]

    monkeypatch.setattr("slipstream.verbs.speedup_bounds.predict", predicted)
    (one,) = first_look(faulting, parse("quadratic"), Told(tmp_path / "none.db", 1.0))
    assert one.decided == decided


def test_it_is_shown_only_while_something_is_missing(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "single_techniques", lambda: [Amp()])
    durations = Told(tmp_path / "none.db", 1000.0)
    durations.told = True
    shown: list[SpeedupBound] = []
    advise(graph, combinations=False, durations=durations, show=shown.extend)
    assert shown == []
