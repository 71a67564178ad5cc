"""What is measured where somebody waits, and what is then said of the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.durations import Answer, Durations, Question
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


class Some(Durations):
    """Knows what it was asked to measure, as many as there is time for."""

    def __init__(self, path: Path, most: float = math.inf) -> None:
        super().__init__(1, path)
        self._most = most
        self.carefully: list[Question] = []
        self.roughly: list[Question] = []
        self._times: set[Any] = set()

    def lookup(self, call: Any) -> Answer | None:
        known = self._key(call) in self._times
        return Answer(1000.0, 0.0, Provenance.MICROBENCHMARK) if known else None

    def missing(self, calls: Iterable[Any]) -> Any:
        wanted = {self._key(call): call for call in calls}
        return [(key, one) for key, one in wanted.items() if key not in self._times]

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


def measured(graph: Graph, durations: Some, *names: str) -> int:
    looked = first_look(graph, [part for name in names for part in parse(name)], durations)
    return measure_in_time(graph, looked, durations, math.inf)


def test_what_most_of_the_step_hangs_on_is_measured_with_care(graph: Graph, tmp_path: Path) -> None:
    # One call takes five sixths of the step, one the last sixth but for next to nothing.
    names, tasks = [one.name for one in graph.calls], graph.tasks
    lasts = np.ones(len(tasks.duration_ns))
    lasts[tasks.call == names.index("aten::native_batch_norm")] = 1e9
    lasts[tasks.call == names.index("aten::silu")] = 2e8
    heavy = replace(graph, tasks=replace(tasks, duration_ns=lasts))
    durations = Some(tmp_path / "none.db")
    assert measured(heavy, durations, "batch_size:x2") == 0
    # The machine's limits, then the call as it is and at the new size.
    assert [one.call.name for one in durations.carefully[3:]] == ["aten::native_batch_norm"] * 2
    assert [one.call.name for one in durations.roughly] == ["aten::silu"] * 2


def test_techniques_that_ask_least_come_first(graph: Graph, tmp_path: Path) -> None:
    durations = Some(tmp_path / "none.db")
    measured(graph, durations, "amp:bf16", "fused_optimizer:fused")
    names = [one.call.name for one in durations.carefully]
    update = [i for i, name in enumerate(names) if "optimizer_step" in name]
    limits = 3
    assert update == [limits, limits + 1]


def test_what_there_was_no_time_for_is_counted_and_not_told(graph: Graph, tmp_path: Path) -> None:
    durations = Some(tmp_path / "none.db", most=4)
    left = measured(graph, durations, "amp:bf16")
    assert left > 0
    assert f"{left:,} operators" in unmeasured_note(left)
    (guessed,) = predict(graph, ["amp:bf16"], durations=durations, measuring_s=0.0)
    assert isinstance(guessed, Predicted)
    told = refuse_if_assumed(graph, guessed, durations)
    assert isinstance(told, Refused)
    assert "cannot be predicted here: there was no time to measure" in told.in_words
    assert told.techniques == guessed.techniques


def test_what_was_measured_is_told(graph: Graph, tmp_path: Path) -> None:
    durations = Some(tmp_path / "none.db")
    assert measured(graph, durations, "amp:bf16") == 0
    (told,) = predict(graph, ["amp:bf16"], durations=durations, measuring_s=0.0)
    assert refuse_if_assumed(graph, told, durations) is told
    assert unmeasured_note(0) == ""
    assert "1 operator was " in unmeasured_note(1)


def test_a_combination_rests_on_no_more_than_its_parts(graph: Graph, tmp_path: Path) -> None:
    durations = Some(tmp_path / "none.db")
    parts = ["fused_optimizer:fused", "amp:bf16"]
    assert measured(graph, durations, *parts) == 0
    singles = predict(graph, parts, durations=durations, measuring_s=0.0)
    (joint,) = predict(graph, ["+".join(parts)], durations=durations, measuring_s=0.0)
    alone = [p for p in singles if isinstance(p, Predicted)]
    assert not relies_on_guesses(joint, alone)
    # At twice the batch nobody has timed the casts.
    (guessed,) = predict(graph, ["batch_size:x2+amp:bf16"], durations=durations, measuring_s=0.0)
    assert relies_on_guesses(guessed, alone)


@pytest.mark.parametrize(("seconds", "told"), [(60.0, True), (0.0, False)])
def test_advice_is_there_in_time(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, told: bool
) -> None:
    monkeypatch.setattr(
        advising, "single_techniques", lambda: [*parse("amp:bf16"), *parse("channels_last")]
    )
    advice = advise(graph, durations=Some(tmp_path / "none.db"), until=time.monotonic() + seconds)
    assert (advice.estimated == 0) == told
    names = {p.technique for p in advice.predictions if isinstance(p, Predicted)}
    assert ("amp:bf16" in names) == told
    assert ("amp:bf16" in advice.not_timed) != told
    text = advice.table(graph, None).to_markdown()
    assert ("for lack of time" in text) != told


def test_a_few_operators_are_timed_before_other_launches_are_watched(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    techniques = [*parse("amp:bf16"), *parse("fused_optimizer:fused")]
    monkeypatch.setattr(advising, "single_techniques", lambda: techniques)
    durations = Some(tmp_path / "none.db")
    timed: list[str] = []

    def settle(recorded: Graph) -> Graph:
        timed.extend(question.call.name for question in durations.carefully)
        return recorded

    until = time.monotonic() + 600.0
    advise(graph, durations=durations, settle=settle, combinations=False, until=until)
    assert sum("optimizer_step" in name for name in timed) == 2
    assert 0 < len(timed) < len(durations.carefully), "amp asks for more"
