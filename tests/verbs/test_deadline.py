"""Tests of measuring before a deadline, and of predictions that rest on guesses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.durations import Durations, Timing, TimingRequest
from slipstream.graph import Graph
from slipstream.provenance import Provenance
from slipstream.technique import parse
from slipstream.verbs import advising
from slipstream.verbs.advising import advise
from slipstream.verbs.deadline import (
    measure_in_time,
    refuse_if_assumed,
    relies_on_guesses,
    unmeasured_note,
)
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Refused
from slipstream.verbs.speedup_bounds import first_look
from tiny_models import captured


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A recorded step with convolutions."""
    return captured("conv")


class SomeDurations(Durations):
    """Measures as many calls as allowed, and records them."""

    def __init__(self, path: Path, most: float = math.inf) -> None:
        super().__init__(1, path)
        self._most = most
        self.carefully: list[TimingRequest] = []
        self.roughly: list[TimingRequest] = []
        self._times: set[Any] = set()

    def lookup(self, call: Any) -> Timing | None:
        measured = self._key(call) in self._times
        return Timing(1000.0, 0.0, Provenance.MICROBENCHMARK) if measured else None

    def missing(self, calls: Iterable[Any]) -> Any:
        keys = {self._key(call): call for call in calls}
        return [(key, call) for key, call in keys.items() if key not in self._times]

    def measure(
        self,
        calls: Iterable[Any],
        report: Any = None,
        until: float = math.inf,
        *,
        roughly: bool = False,
    ) -> None:
        for key, call in self.missing(calls):
            if len(self._times) >= self._most or time.monotonic() >= until:
                return
            (self.roughly if roughly else self.carefully).append(call)
            self._times.add(key)


def measured(graph: Graph, durations: SomeDurations, *names: str) -> int:
    bounds = first_look(graph, [part for name in names for part in parse(name)], durations)
    return measure_in_time(graph, bounds, durations, math.inf)


def test_measures_the_heaviest_calls_with_care(graph: Graph, tmp_path: Path) -> None:
    # One call takes five sixths of the step, another nearly all of the rest.
    names, tasks = [call.name for call in graph.calls], graph.tasks
    times_ns = np.ones(len(tasks.duration_ns))
    times_ns[tasks.call == names.index("aten::native_batch_norm")] = 1e9
    times_ns[tasks.call == names.index("aten::silu")] = 2e8
    heavy = replace(graph, tasks=replace(tasks, duration_ns=times_ns))
    durations = SomeDurations(tmp_path / "none.db")
    assert measured(heavy, durations, "batch_size:x2") == 0
    # The machine's limits, then the call at the current and at the new size.
    assert [call.call.name for call in durations.carefully[3:]] == ["aten::native_batch_norm"] * 2
    assert [call.call.name for call in durations.roughly] == ["aten::silu"] * 2


def test_measures_techniques_with_few_calls_first(graph: Graph, tmp_path: Path) -> None:
    durations = SomeDurations(tmp_path / "none.db")
    measured(graph, durations, "amp:bf16", "fused_optimizer:fused")
    names = [question.call.name for question in durations.carefully]
    update = [i for i, name in enumerate(names) if "optimizer_step" in name]
    limits = 3
    assert update == [limits, limits + 1]


def test_counts_and_refuses_what_was_not_measured(graph: Graph, tmp_path: Path) -> None:
    durations = SomeDurations(tmp_path / "none.db", most=4)
    missing = measured(graph, durations, "amp:bf16")
    assert missing > 0
    assert f"{missing:,} operators" in unmeasured_note(missing)
    (guessed,) = predict(graph, ["amp:bf16"], durations=durations, measuring_s=0.0)
    assert isinstance(guessed, Predicted)
    refusal = refuse_if_assumed(graph, guessed, durations)
    assert isinstance(refusal, Refused)
    assert "cannot be predicted here: there was no time to measure" in refusal.in_words
    assert refusal.techniques == guessed.techniques


def test_keeps_predictions_that_are_fully_measured(graph: Graph, tmp_path: Path) -> None:
    durations = SomeDurations(tmp_path / "none.db")
    assert measured(graph, durations, "amp:bf16") == 0
    (prediction,) = predict(graph, ["amp:bf16"], durations=durations, measuring_s=0.0)
    assert refuse_if_assumed(graph, prediction, durations) is prediction
    assert unmeasured_note(0) == ""
    assert "1 operator was " in unmeasured_note(1)


def test_a_combination_relies_on_no_more_guesses_than_its_parts(
    graph: Graph, tmp_path: Path
) -> None:
    durations = SomeDurations(tmp_path / "none.db")
    parts = ["fused_optimizer:fused", "amp:bf16"]
    assert measured(graph, durations, *parts) == 0
    singles = predict(graph, parts, durations=durations, measuring_s=0.0)
    (joint,) = predict(graph, ["+".join(parts)], durations=durations, measuring_s=0.0)
    alone = [p for p in singles if isinstance(p, Predicted)]
    assert not relies_on_guesses(joint, alone)
    # At twice the batch size the casts were not timed.
    (guessed,) = predict(graph, ["batch_size:x2+amp:bf16"], durations=durations, measuring_s=0.0)
    assert relies_on_guesses(guessed, alone)


@pytest.mark.parametrize(("seconds", "complete"), [(60.0, True), (0.0, False)])
def test_advice_keeps_its_deadline(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, complete: bool
) -> None:
    monkeypatch.setattr(
        advising, "single_techniques", lambda: [*parse("amp:bf16"), *parse("channels_last")]
    )
    advice = advise(
        graph, durations=SomeDurations(tmp_path / "none.db"), until=time.monotonic() + seconds
    )
    assert (advice.estimated == 0) == complete
    names = {p.technique for p in advice.predictions if isinstance(p, Predicted)}
    assert ("amp:bf16" in names) == complete
    assert ("amp:bf16" in advice.not_timed) != complete
    text = advice.table(graph, None).to_markdown()
    assert ("for lack of time" in text) != complete


def test_a_few_operators_are_timed_before_other_launches_are_watched(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    techniques = [*parse("amp:bf16"), *parse("fused_optimizer:fused")]
    monkeypatch.setattr(advising, "single_techniques", lambda: techniques)
    durations = SomeDurations(tmp_path / "none.db")
    timed: list[str] = []

    def settle(recorded: Graph) -> Graph:
        timed.extend(question.call.name for question in durations.carefully)
        return recorded

    until = time.monotonic() + 600.0
    advise(graph, durations=durations, settle=settle, combinations=False, until=until)
    assert sum("optimizer_step" in name for name in timed) == 2
    assert 0 < len(timed) < len(durations.carefully), "amp asks for more"
