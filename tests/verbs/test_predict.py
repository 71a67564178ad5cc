"""Tests of `predict`: ratios, intervals, shares, verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from known_durations import KnownDurations
from slipstream.durations import Durations, Timing
from slipstream.errors import UnknownNameError
from slipstream.graph import Call, Editor, Graph, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context, Quality, QualityKind, Stage, TechniqueSettings, Traits
from slipstream.techniques.precision import Amp
from slipstream.verbs.predicting import Folded, predict, prediction_of
from slipstream.verbs.profiling import profile, summary
from slipstream.verbs.results import (
    WORTH_IT,
    Predicted,
    Prediction,
    prediction_table,
    recorded_step,
)
from tiny_models import captured, workload


@dataclass(frozen=True)
class Faster(TechniqueSettings):
    """Scales every task: a technique of known effect."""

    factor: float = 0.5
    provenance: Provenance = Provenance.MICROBENCHMARK
    reason: str | None = None
    spread: float = 0.0
    samples: int = 0
    kind: QualityKind = QualityKind.EXACT

    name: ClassVar[str] = "faster"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)

    def why_not(self, graph: Graph, workload: Any = None) -> str | None:
        return self.reason

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        return []

    def predict(self, graph: Graph, context: Context) -> Graph:
        edit = Editor(graph, str(self))
        for t in range(len(graph)):
            now = float(graph.tasks.duration_ns[t]) * self.factor
            edit.set_duration(t, now, self.provenance, spread=self.spread)
        edited = edit.apply(f"times {self.factor}")
        return replace(edited, samples=self.samples or graph.samples)

    def apply(self, built: Any) -> None:
        pass

    def quality(self, graph: Graph | None = None) -> Quality:
        return Quality(self.kind, "made up")

    def code(self, workload: Any) -> None:
        return None


def test_refuses_to_predict_from_unstable_timings() -> None:
    graph = captured("mlp")
    stable, unstable, assumed = (
        predict(graph, [Faster(4.0, kind, spread=spread)], durations=NoDurations())[0]
        for kind, spread in (
            (Provenance.MICROBENCHMARK, 0.3),
            (Provenance.MICROBENCHMARK, 40.0),
            (Provenance.ASSUMED, 40.0),
        )
    )
    assert stable.why_not is None
    assert "busy" in (unstable.why_not or "")
    assert "--threads 1" not in (unstable.why_not or ""), "it was recorded on predict_one"
    # It may apply, but its time is unknown.
    assert unstable.verdict == "not-predictable"
    notes = " ".join(prediction_table(graph, [unstable]).notes)
    assert f"{unstable.technique} {unstable.verdict.text}: {unstable.why_not}"[:60] in notes
    several = replace(graph, meta={**graph.meta, "threads": 2})
    (unstable,) = predict(
        several, [Faster(4.0, Provenance.MICROBENCHMARK, spread=40.0)], durations=NoDurations()
    )
    assert "--threads 1" in (unstable.why_not or "")
    assert unstable.verdict == "not-predictable"
    assert math.isnan(unstable.ratio)
    assert unstable.memory == (replay(graph).peak_bytes, 0)
    # Assumed durations have no timings that could be disturbed.
    assert assumed.why_not is None


class NoDurations(KnownDurations):
    """Durations that fail on any query."""

    def measure(
        self, calls: Sequence[Call], report: Any = None, until: Any = None, **how: Any
    ) -> None:
        assert not list(calls)

    def lookup(self, call: Call) -> Timing | None:
        raise AssertionError(call)


def predict_one(graph: Graph, *techniques: Any, **options: Any) -> Prediction:
    (found,) = predict(graph, [techniques], durations=NoDurations(), **options)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("mlp")


def test_the_baseline_is_unchanged(graph: Graph) -> None:
    found = predict_one(graph)
    assert found.ratio == found.speedup == 1.0
    assert found.technique == "as it is"
    assert found.step_ns == found.baseline_ns == replay(graph).step_ns
    assert found.shares == {Provenance.MEASURED: pytest.approx(1.0)}
    assert found.edits == ()


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 3.0])
def test_the_interval_contains_the_ratio_and_shares_sum_to_one(graph: Graph, factor: float) -> None:
    found = predict_one(graph, Faster(factor))
    assert found.low < found.ratio < found.high
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.ratio == pytest.approx(found.step_ns / found.baseline_ns)
    assert found.speedup == pytest.approx(1 / found.ratio)


def test_the_ratio_is_the_gaps_plus_the_scaled_tasks(graph: Graph) -> None:
    gaps, tasks = graph.tasks.gap_ns.sum(), graph.tasks.duration_ns.sum()
    expected = (gaps + 0.5 * tasks) / (gaps + tasks)
    assert predict_one(graph, Faster(0.5)).ratio == pytest.approx(expected, rel=1e-5)


def test_the_ratio_is_per_sample(graph: Graph) -> None:
    found = predict_one(graph, Faster(1.0, samples=2 * graph.samples))
    assert found.ratio == pytest.approx(0.5)
    assert found.samples == (graph.samples, 2 * graph.samples)


def test_uncertain_tasks_widen_the_interval(graph: Graph) -> None:
    def width(technique: Faster) -> float:
        found = predict_one(graph, technique)
        return math.log(found.high / found.low)

    assert width(Faster(0.5, spread=0.5)) > width(Faster(0.5)) > width(Faster(0.01))
    assert width(Faster(0.5)) > math.log(predict_one(graph).high / predict_one(graph).low)


def test_the_provenance_is_the_weakest_one(graph: Graph) -> None:
    assert predict_one(graph, Faster(0.5)).provenance is Provenance.MICROBENCHMARK
    assert predict_one(graph, Faster(0.5, Provenance.ASSUMED)).provenance is Provenance.ASSUMED
    assert predict_one(graph).provenance is Provenance.MEASURED


def test_copies_of_a_task_share_their_error(graph: Graph) -> None:
    total = replay(graph).step_ns

    def width(copies: int) -> float:
        edit = Editor(graph, "more")
        for _ in range(copies):
            edit.insert(
                len(graph) - 1, "more", total / copies, Provenance.MICROBENCHMARK, spread=0.1
            )
        found = prediction_of("more", "cpu", replay(graph), edit.apply("more"))
        return found.high / found.low

    assert width(4) == pytest.approx(width(1), rel=1e-9)


def test_rooflines_share_the_error_of_the_machine_s_limits(graph: Graph) -> None:
    total = replay(graph).step_ns

    def width(provenance: Provenance) -> float:
        edit = Editor(graph, "more")
        for number in range(4):
            edit.insert(len(graph) - 1, f"operator {number}", total / 4, provenance, spread=0.1)
        found = prediction_of("more", "cpu", replay(graph), edit.apply("more"))
        return math.log(found.high / found.low)

    assert width(Provenance.ROOFLINE) > 1.5 * width(Provenance.MICROBENCHMARK)


def test_a_technique_s_note_appears_once() -> None:
    graph = captured("mlp")
    alone, together = (
        Predicted(name, 1.0, 0.5, 0.5, 0.4, 0.6, notes={"noted": "another is cheaper"})
        for name in ("noted", "noted+allocator")
    )
    notes = prediction_table(graph, [alone, together]).notes
    assert notes.count("noted: another is cheaper") == 1
    assert alone.to_json()["notes"] == {"noted": "another is cheaper"}
    assert "another is cheaper" in alone._repr_html_()


def test_a_history_of_errors_widens_the_interval(graph: Graph) -> None:
    intervals: list[tuple[float, float, float]] = []

    def widen(ratio: float, low: float, high: float) -> tuple[float, float]:
        intervals.append((ratio, low, high))
        return low / 2, high * 2

    plain, wide = predict_one(graph, Faster()), predict_one(graph, Faster(), widen=widen)
    assert intervals == [(plain.ratio, plain.low, plain.high)]
    assert (wide.low, wide.high) == (plain.low / 2, plain.high * 2)


def test_a_refusal_has_a_reason_and_no_numbers(graph: Graph) -> None:
    found = predict_one(graph, Faster(reason="not on a Tuesday"))
    assert found.why_not == "not on a Tuesday"
    assert found.verdict == "not-applicable"
    assert math.isnan(found.ratio)
    assert found.graph is None


def test_a_refused_combination_names_the_part(graph: Graph) -> None:
    found = predict_one(graph, Faster(0.5), Faster(reason="not on a Tuesday"))
    assert found.why_not == "faster: not on a Tuesday"


@dataclass(frozen=True)
class Declining(Faster):
    """Looks at the step and leaves it unchanged."""

    name: ClassVar[str] = "declining"

    def predict(self, graph: Graph, context: Context) -> Graph:
        return Editor(graph, str(self)).apply("no pair is faster")


def test_an_edit_without_changes_is_a_refusal(graph: Graph) -> None:
    prediction = predict_one(graph, Declining())
    assert math.isnan(prediction.ratio)
    assert prediction.why_not is not None
    assert prediction.why_not.endswith(": no pair is faster")
    both = predict_one(graph, Faster(0.5), Declining())
    assert both.why_not is not None
    assert both.why_not.startswith("declining: ")


def test_a_combination_folds_its_parts(graph: Graph) -> None:
    both = predict_one(graph, Faster(0.5), Faster(0.5))
    assert both.step_ns == pytest.approx(predict_one(graph, Faster(0.25)).step_ns, rel=1e-6)
    assert len(both.edits) == 2


def test_reuses_edits_of_earlier_calls(graph: Graph) -> None:
    first, second = Faster(0.5), Faster(0.25)
    folded: Folded = {}
    (alone,) = predict(graph, [[first]], durations=NoDurations(), folded=folded)
    cached = folded[(first,)]
    both, again = predict(graph, [[first, second], [first]], durations=NoDurations(), folded=folded)
    assert folded[(first,)] is cached
    assert (again.ratio, both.ratio) == (alone.ratio, predict_one(graph, first, second).ratio)


def test_the_quality_is_that_of_the_worst_part(graph: Graph) -> None:
    rounding, training = QualityKind.ROUNDING, QualityKind.NEEDS_TRAINING
    found = predict_one(graph, Faster(kind=training), Faster(kind=rounding))
    assert found.quality is not None
    assert found.quality.kind is training
    assert predict_one(graph).quality is None


def test_alternatives_keep_their_order(graph: Graph) -> None:
    alternatives = [Faster(0.5), Faster(0.25), (Faster(0.5), Faster(0.1))]
    found = predict(graph, alternatives, durations=NoDurations())  # type: ignore[arg-type]
    assert [prediction.technique for prediction in found] == [
        str(Faster(0.5)), str(Faster(0.25)), f"{Faster(0.5)}+{Faster(0.1)}",
    ]  # fmt: skip


def test_an_unknown_name_is_refused(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="amp"):
        predict(graph, ["amq"], durations=NoDurations())  # type: ignore[arg-type]


def verdict(low: float, high: float) -> str:
    ratio = math.sqrt(low * high)
    return Predicted("t", 1.0, ratio, ratio, low, high).verdict


JUST = 1e-9


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 0.6, "worth-it"),
        (0.5, 1 / WORTH_IT - JUST, "worth-it"),
        (0.5, 1 / WORTH_IT + JUST, "inconclusive"),
        (0.9, 1.1, "inconclusive"),
        (1 / WORTH_IT - JUST, 1.1, "inconclusive"),
        (1 / WORTH_IT + JUST, 1.1, "not-worth-it"),
        (1.0, 1.1, "not-worth-it"),
        (1.0 + JUST, 1.1, "slower"),
        (1.5, 2.0, "slower"),
    ],
)
def test_verdict_thresholds(low: float, high: float, expected: str) -> None:
    assert verdict(low, high) == expected


@given(st.floats(0.1, 10), st.floats(1, 2))
def test_every_interval_has_a_verdict(low: float, factor: float) -> None:
    found = verdict(low, low * factor)
    assert found
    assert ("slower" in found) <= (low > 1)


def test_the_record_holds_what_was_shown(graph: Graph) -> None:
    found = predict_one(graph, Faster(0.5))
    assert isinstance(found, Predicted)
    record = found.to_record("train.py", "e1")
    assert (record.workload, record.technique, record.env_id) == ("train.py", found.technique, "e1")
    assert (record.ratio, record.low, record.high) == (found.ratio, found.low, found.high)
    assert record.detail["shares"] == {
        str(kind): share for kind, share in found.shares.items()
    }  # fmt: skip


def test_amp_from_end_to_end(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs real micro-benchmarks, without the user's code; the second call uses the cache."""
    # Accept any spread on a busy machine.
    monkeypatch.setattr("slipstream.verbs.predicting._MAX_ERROR", math.inf)
    path = tmp_path / "durations.db"
    lines: list[str] = []
    (first,) = predict(graph, ["amp:bf16"], durations=Durations(1, path), report=lines.append)
    assert any("measuring" in line for line in lines)
    assert set(first.shares) == {Provenance.MEASURED, Provenance.MICROBENCHMARK}
    assert first.low < first.ratio < first.high
    assert first.quality == Amp().quality()
    again: list[str] = []
    (second,) = predict(graph, [Amp()], durations=Durations(1, path), report=again.append)
    assert not any("measuring" in line for line in again)
    assert second == first
    assert first.graph is not None
    assert np.isclose(replay(first.graph).step_ns, first.step_ns)


class RecordedDurations(NoDurations):
    """Records each call of `measure`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def measure(
        self, calls: Sequence[Any], report: Any = None, until: Any = None, **how: Any
    ) -> None:
        self.calls.append(list(calls))


@dataclass(frozen=True)
class Later(Faster):
    """Runs after `Faster`, requests a timing of the edited step, and refuses many samples."""

    name: ClassVar[str] = "later"
    traits: ClassVar[Traits] = Traits(stage=Stage.PRECISION)

    def why_not(self, graph: Graph, workload: Any = None) -> str | None:
        return "too many samples" if graph.samples > 7 else None

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        return [f"a step of {graph.samples} samples"]


def test_a_technique_sees_the_step_edited_by_earlier_ones() -> None:
    durations: Any = RecordedDurations()
    both = (Later(), Faster(samples=5))
    (found,) = predict(captured("mlp"), [both], durations=durations)
    assert durations.calls == [[], ["a step of 5 samples"]]
    mlp = captured("mlp")
    halved_twice = replay(found.graph).step_ns / replay(mlp).step_ns if found.graph else 0
    assert found.ratio == pytest.approx(halved_twice * mlp.samples / 5)
    assert list(found.edits) == ["times 0.5", "times 0.5"]


def test_a_part_that_no_longer_applies_is_named() -> None:
    durations: Any = RecordedDurations()
    both = (Faster(samples=9), Later())
    alone, together = predict(captured("mlp"), [(Later(),), both], durations=durations)
    assert alone.why_not is None
    assert together.why_not == "later: too many samples"


def test_one_sample_is_singular() -> None:
    graph = replace(captured("mlp"), samples=1)
    assert "per step, 1 sample, " in recorded_step(graph, [])
    assert summary(graph).title.endswith(" of 1 sample")


def test_steps_that_differ_widen_the_interval() -> None:
    mlp = captured("mlp")
    differing = replace(mlp, meta={**mlp.meta, "unaligned_share": 0.2})
    plain, wide = predict_one(mlp, Faster()), predict_one(differing, Faster())
    assert wide.high / wide.low > 1.5 * plain.high / plain.low
    assert wide.ratio == plain.ratio


@dataclass(frozen=True)
class Needy(Faster):
    """Requires statistics."""

    name: ClassVar[str] = "needy"
    traits: ClassVar[Traits] = Traits(needs=frozenset({"ids", "grads"}))


def test_a_missing_statistic_is_refused_with_the_command() -> None:
    (found,) = predict(captured("embedding"), [Needy()])
    assert found.verdict == "not-applicable"
    assert "slipstream advise WORKLOAD --record grads,ids" in (found.why_not or "")
    # Its own reason comes first: recording would not help.
    (found,) = predict(captured("embedding"), [Needy(reason="a reason")])
    assert found.why_not == "a reason"


def test_a_recorded_statistic_lets_a_technique_apply() -> None:
    graph = profile(workload("embedding"), warmup=1, steps=2, threads=1, needs=Needy.traits.needs)
    (found,) = predict(graph, [Needy()])
    assert found.why_not is None
    assert found.ratio < 1
    graph = profile(workload("mlp"), warmup=1, steps=2, threads=1, needs=Needy.traits.needs)
    (found,) = predict(graph, [Needy()])
    assert "embedding" in (found.why_not or "")
    assert "--record" not in (found.why_not or ""), "it was recorded"
