"""``predict``: ratios, intervals, shares, verdicts."""

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
from slipstream.durations import Answer, Durations
from slipstream.errors import UnknownNameError
from slipstream.graph import Call, Editor, Graph, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques.precision import Amp
from slipstream.verbs.predicting import Folded, predict, prediction_of
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import WORTH_IT, Predicted, Prediction, prediction_table
from tiny_models import captured, workload


@dataclass(frozen=True)
class Faster(Settings):
    """Scales every task; stands for a technique of known effect."""

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


def test_timings_that_differ_too_much_are_no_prediction() -> None:
    graph = captured("mlp")
    known, unknown, assumed = (
        predict(graph, [Faster(4.0, kind, spread=spread)], durations=Nothing())[0]
        for kind, spread in (
            (Provenance.MICROBENCHMARK, 0.3),
            (Provenance.MICROBENCHMARK, 40.0),
            (Provenance.ASSUMED, 40.0),
        )
    )
    assert known.why_not is None
    assert "busy" in (unknown.why_not or "")
    assert "--threads 1" not in (unknown.why_not or ""), "it was recorded on one"
    # It may well apply: that is not what is not known.
    assert unknown.verdict == "not-predictable"
    notes = " ".join(prediction_table(graph, [unknown]).notes)
    assert f"{unknown.technique} {unknown.verdict.text}: {unknown.why_not}"[:60] in notes
    several = replace(graph, meta={**graph.meta, "threads": 2})
    (unknown,) = predict(
        several, [Faster(4.0, Provenance.MICROBENCHMARK, spread=40.0)], durations=Nothing()
    )
    assert "--threads 1" in (unknown.why_not or "")
    assert unknown.verdict == "not-predictable"
    assert math.isnan(unknown.ratio)
    assert unknown.memory == (replay(graph).peak_bytes, 0)
    # Nothing was timed that could have been disturbed.
    assert assumed.why_not is None


class Nothing(KnownDurations):
    """Durations that must not be asked for anything."""

    def measure(
        self, calls: Sequence[Call], report: Any = None, until: Any = None, **how: Any
    ) -> None:
        assert not list(calls)

    def lookup(self, call: Call) -> Answer | None:
        raise AssertionError(call)


def one(graph: Graph, *techniques: Any, **options: Any) -> Prediction:
    (found,) = predict(graph, [techniques], durations=Nothing(), **options)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("mlp")


def test_no_technique_changes_nothing(graph: Graph) -> None:
    found = one(graph)
    assert found.ratio == found.speedup == 1.0
    assert found.technique == "as it is"
    assert found.step_ns == found.baseline_ns == replay(graph).step_ns
    assert found.shares == {Provenance.MEASURED: pytest.approx(1.0)}
    assert found.edits == ()


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 3.0])
def test_the_interval_contains_the_ratio_and_shares_sum_to_one(graph: Graph, factor: float) -> None:
    found = one(graph, Faster(factor))
    assert found.low < found.ratio < found.high
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.ratio == pytest.approx(found.step_ns / found.baseline_ns)
    assert found.speedup == pytest.approx(1 / found.ratio)


def test_the_ratio_is_the_gaps_plus_the_scaled_tasks(graph: Graph) -> None:
    gaps, tasks = graph.tasks.gap_ns.sum(), graph.tasks.duration_ns.sum()
    expected = (gaps + 0.5 * tasks) / (gaps + tasks)
    assert one(graph, Faster(0.5)).ratio == pytest.approx(expected, rel=1e-5)


def test_twice_the_samples_count_half(graph: Graph) -> None:
    found = one(graph, Faster(1.0, samples=2 * graph.samples))
    assert found.ratio == pytest.approx(0.5)
    assert found.samples == (graph.samples, 2 * graph.samples)


def test_uncertain_tasks_widen_the_interval(graph: Graph) -> None:
    def width(technique: Faster) -> float:
        found = one(graph, technique)
        return math.log(found.high / found.low)

    assert width(Faster(0.5, spread=0.5)) > width(Faster(0.5)) > width(Faster(0.01))
    assert width(Faster(0.5)) > math.log(one(graph).high / one(graph).low)


def test_the_weakest_provenance_speaks_for_the_whole(graph: Graph) -> None:
    assert one(graph, Faster(0.5)).provenance is Provenance.MICROBENCHMARK
    assert one(graph, Faster(0.5, Provenance.ASSUMED)).provenance is Provenance.ASSUMED
    assert one(graph).provenance is Provenance.MEASURED


def test_copies_of_a_task_that_is_no_operator_are_off_alike(graph: Graph) -> None:
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


def test_a_note_of_a_technique_stands_below_the_table_once() -> None:
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
    asked: list[tuple[float, float, float]] = []

    def widen(ratio: float, low: float, high: float) -> tuple[float, float]:
        asked.append((ratio, low, high))
        return low / 2, high * 2

    plain, wide = one(graph, Faster()), one(graph, Faster(), widen=widen)
    assert asked == [(plain.ratio, plain.low, plain.high)]
    assert (wide.low, wide.high) == (plain.low / 2, plain.high * 2)


def test_a_technique_that_does_not_apply_says_why_and_predicts_nothing(graph: Graph) -> None:
    found = one(graph, Faster(reason="not on a Tuesday"))
    assert found.why_not == "not on a Tuesday"
    assert found.verdict == "not-applicable"
    assert math.isnan(found.ratio)
    assert found.graph is None


def test_of_a_combination_the_part_that_does_not_apply_is_named(graph: Graph) -> None:
    found = one(graph, Faster(0.5), Faster(reason="not on a Tuesday"))
    assert found.why_not == "faster: not on a Tuesday"


@dataclass(frozen=True)
class Declining(Faster):
    """Looks at the step and leaves it as it is."""

    name: ClassVar[str] = "declining"

    def predict(self, graph: Graph, context: Context) -> Graph:
        return Editor(graph, str(self)).apply("no pair pays")


def test_an_edit_that_touches_nothing_is_a_refusal_with_its_reason(graph: Graph) -> None:
    prediction = one(graph, Declining())
    assert math.isnan(prediction.ratio)
    assert prediction.why_not is not None
    assert prediction.why_not.endswith(": no pair pays")
    both = one(graph, Faster(0.5), Declining())
    assert both.why_not is not None
    assert both.why_not.startswith("declining: ")


def test_a_combination_folds_its_parts(graph: Graph) -> None:
    both = one(graph, Faster(0.5), Faster(0.5))
    assert both.step_ns == pytest.approx(one(graph, Faster(0.25)).step_ns, rel=1e-6)
    assert len(both.edits) == 2


def test_what_an_earlier_call_made_is_not_made_again(graph: Graph) -> None:
    first, second = Faster(0.5), Faster(0.25)
    folded: Folded = {}
    (alone,) = predict(graph, [[first]], durations=Nothing(), folded=folded)
    kept = folded[(first,)]
    both, again = predict(graph, [[first, second], [first]], durations=Nothing(), folded=folded)
    assert folded[(first,)] is kept
    assert (again.ratio, both.ratio) == (alone.ratio, one(graph, first, second).ratio)


def test_the_quality_is_the_most_consequential(graph: Graph) -> None:
    rounding, training = QualityKind.ROUNDING, QualityKind.NEEDS_TRAINING
    found = one(graph, Faster(kind=training), Faster(kind=rounding))
    assert found.quality is not None
    assert found.quality.kind is training
    assert one(graph).quality is None


def test_alternatives_keep_their_order(graph: Graph) -> None:
    asked = [Faster(0.5), Faster(0.25), (Faster(0.5), Faster(0.1))]
    found = predict(graph, asked, durations=Nothing())  # type: ignore[arg-type]
    assert [prediction.technique for prediction in found] == [
        str(Faster(0.5)), str(Faster(0.25)), f"{Faster(0.5)}+{Faster(0.1)}",
    ]  # fmt: skip


def test_an_unknown_name_is_refused(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="amp"):
        predict(graph, ["amq"], durations=Nothing())  # type: ignore[arg-type]


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
def test_the_verdict_turns_at_its_thresholds(low: float, high: float, expected: str) -> None:
    assert verdict(low, high) == expected


@given(st.floats(0.1, 10), st.floats(1, 2))
def test_every_interval_has_a_verdict(low: float, factor: float) -> None:
    found = verdict(low, low * factor)
    assert found
    assert ("slower" in found) <= (low > 1)


def test_the_record_holds_what_was_shown(graph: Graph) -> None:
    found = one(graph, Faster(0.5))
    assert isinstance(found, Predicted)
    record = found.to_record("train.py", "e1")
    assert (record.workload, record.technique, record.env_id) == ("train.py", found.technique, "e1")
    assert (record.ratio, record.low, record.high) == (found.ratio, found.low, found.high)
    assert record.detail["shares"] == {
        str(kind): share for kind, share in found.shares.items()
    }  # fmt: skip


def test_amp_from_end_to_end(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real micro-benchmarks, without the user's code; the second time from the cache alone."""
    # However much they differ, on a machine that is busy.
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


class Asked(Nothing):
    """Remembers what was measured, call by call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def measure(
        self, calls: Sequence[Any], report: Any = None, until: Any = None, **how: Any
    ) -> None:
        self.calls.append(list(calls))


@dataclass(frozen=True)
class Later(Faster):
    """Comes after `Faster`, asks about the step that leaves, and refuses one of many samples."""

    name: ClassVar[str] = "later"
    traits: ClassVar[Traits] = Traits(stage=Stage.PRECISION)

    def why_not(self, graph: Graph, workload: Any = None) -> str | None:
        return "too many samples" if graph.samples > 7 else None

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        return [f"a step of {graph.samples} samples"]


def test_a_technique_is_asked_about_the_step_that_earlier_ones_leave() -> None:
    durations: Any = Asked()
    both = (Later(), Faster(samples=5))
    (found,) = predict(captured("mlp"), [both], durations=durations)
    assert durations.calls == [[], ["a step of 5 samples"]]
    mlp = captured("mlp")
    halved_twice = replay(found.graph).step_ns / replay(mlp).step_ns if found.graph else 0
    assert found.ratio == pytest.approx(halved_twice * mlp.samples / 5)
    assert list(found.edits) == ["times 0.5", "times 0.5"]


def test_a_part_that_no_longer_applies_is_named() -> None:
    durations: Any = Asked()
    both = (Faster(samples=9), Later())
    alone, together = predict(captured("mlp"), [(Later(),), both], durations=durations)
    assert alone.why_not is None
    assert together.why_not == "later: too many samples"


def test_steps_that_differ_widen_the_interval() -> None:
    mlp = captured("mlp")
    differing = replace(mlp, meta={**mlp.meta, "unaligned_share": 0.2})
    plain, wide = one(mlp, Faster()), one(differing, Faster())
    assert wide.high / wide.low > 1.5 * plain.high / plain.low
    assert wide.ratio == plain.ratio


@dataclass(frozen=True)
class Needy(Faster):
    """Needs to know which ids are looked up."""

    name: ClassVar[str] = "needy"
    traits: ClassVar[Traits] = Traits(needs=frozenset({"ids", "grads"}))


def test_a_statistic_that_was_not_recorded_is_asked_for_with_the_command() -> None:
    (found,) = predict(captured("embedding"), [Needy()])
    assert found.verdict == "not-applicable"
    assert "slipstream advise WORKLOAD --record grads,ids" in (found.why_not or "")
    # Its own reason comes first: recording would not help.
    (found,) = predict(captured("embedding"), [Needy(reason="a reason")])
    assert found.why_not == "a reason"


def test_a_recorded_statistic_lets_it_apply_and_an_empty_one_says_why() -> None:
    graph = profile(workload("embedding"), warmup=1, steps=2, threads=1, needs=Needy.traits.needs)
    (found,) = predict(graph, [Needy()])
    assert found.why_not is None
    assert found.ratio < 1
    graph = profile(workload("mlp"), warmup=1, steps=2, threads=1, needs=Needy.traits.needs)
    (found,) = predict(graph, [Needy()])
    assert "embedding" in (found.why_not or "")
    assert "--record" not in (found.why_not or ""), "it was recorded"
