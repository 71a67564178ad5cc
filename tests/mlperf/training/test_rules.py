"""Each violation planted in the logs of a real run is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.mlperf.training import TrainingResult, check_set
from slipstream.mlperf.training.log import Event, read
from slipstream.mlperf.training.rcp import Reference
from slipstream.mlperf.training.rules import epochs_of

Logs = list[list[Event]]
Plant = Callable[[Logs], Logs]


def logs_of(judged: TrainingResult) -> Logs:
    return [read(Path(run.log)) for run in judged.arms[0].runs]


def numbered(events: list[Event]) -> list[Event]:
    return [dataclasses.replace(event, line=number) for number, event in enumerate(events, 1)]


def changed(key: str, value: object, run: int = 0) -> Plant:
    """Replace the value of a key in one run; in all runs if `run` is -1."""

    def plant(logs: Logs) -> Logs:
        return [
            [dataclasses.replace(e, value=value) if e.key == key else e for e in events]
            if run in (n, -1)
            else events
            for n, events in enumerate(logs)
        ]

    return plant


def edited(change: Callable[[list[Event]], list[Event]], runs: int = 1) -> Plant:
    """Change the events of the first `runs` runs."""
    return lambda logs: [
        numbered(change(list(events))) if n < runs else events for n, events in enumerate(logs)
    ]


def before_the_clock(events: list[Event]) -> list[Event]:
    at = next(n for n, event in enumerate(events) if event.key == "run_start")
    touched = dataclasses.replace(events[at], key="data_touched")
    return [*events[:at], touched, *events[at:]]


def without(key: str, which: int | None = None) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        places = [n for n, event in enumerate(events) if event.key == key]
        gone = set(places) if which is None else {places[which]}
        return [event for n, event in enumerate(events) if n not in gone]

    return change


def twice(key: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [
        copy for event in events for copy in ([event, event] if event.key == key else [event])
    ]


def aborted(events: list[Event]) -> list[Event]:
    return [
        dataclasses.replace(event, metadata={**event.metadata, "status": "aborted"})
        if event.key == "run_stop"
        else event
        for event in events
    ]


def later_seed(events: list[Event]) -> list[Event]:
    seed = next(event for event in events if event.key == "seed")
    others = [event for event in events if event.key != "seed"]
    return [*others[:-1], seed, others[-1]]


def set_clock(events: list[Event]) -> list[Event]:
    return [*events[:-1], dataclasses.replace(events[-1], time_ms=events[-1].time_ms + 60_000)]


def slow_start(events: list[Event]) -> list[Event]:
    moved, inside = [], False
    for event in events:
        inside |= event.key == "init_stop"
        moved.append(dataclasses.replace(event, time_ms=event.time_ms + 15e6 * inside))
    return moved


def went_on(events: list[Event]) -> list[Event]:
    last = max(n for n, event in enumerate(events) if event.key == "eval_accuracy")
    return [*events[: last + 1], events[last], *events[last + 1 :]]


def worse_last(events: list[Event]) -> list[Event]:
    last = max(n for n, event in enumerate(events) if event.key == "eval_accuracy")
    events[last] = dataclasses.replace(events[last], value=0.1)
    return events


PLANTED: dict[str, Plant] = {
    "data before the clock": edited(before_the_clock),
    "evaluation skipped": edited(without("eval_accuracy", 2)),
    "seed repeated": changed("seed", 11, -1),
    "target lowered": changed("target_quality", 0.5),
    "not converged": edited(aborted, 2),
    "best of several": lambda logs: [*logs, changed("seed", 99)(logs)[0]],
    "runs missing": lambda logs: logs[:-1],
    "clock paused": edited(twice("run_start")),
    "caches not cleared": edited(without("cache_clear")),
    "init": edited(slow_start),
    "seed late": edited(later_seed),
    "success claimed": edited(worse_last),
    "went on": edited(went_on),
    "evaluation less thorough": changed("eval_samples", 36),
    "epoch changed": changed("train_samples", 100),
    "clock set": edited(set_clock),
    "crashed": edited(without("run_stop")),
    "resumed": edited(twice("init_start")),
    "mixed settings": changed("opt_base_learning_rate", 1.0),
    "missing or repeated": edited(without("submission_org")),
}


def test_valid_result_has_no_violations(judged: TrainingResult) -> None:
    assert check_set(logs_of(judged), judged.task, runs=3, optimizer="adam") == []
    assert all(arm.violations == () for arm in judged.arms)


@pytest.mark.parametrize("rule", PLANTED)
def test_planted_violation_is_reported(judged: TrainingResult, rule: str) -> None:
    violations = check_set(PLANTED[rule](logs_of(judged)), judged.task, runs=3, optimizer="adam")
    texts = [violation.text for violation in violations if violation.rule == rule]
    assert texts
    assert all(texts)


def test_closed_division_requires_the_references_optimizer_and_model(
    judged: TrainingResult,
) -> None:
    closed = changed("submission_division", "closed", -1)(logs_of(judged))
    other = check_set(changed("opt_name", "lion")(closed), judged.task, runs=3, optimizer="adam")
    assert [violation.rule for violation in other] == ["optimizer changed"]
    thin = [read(Path(run.log)) for run in judged.arms[1].runs]
    thin = changed("submission_division", "closed", -1)(thin)
    found = check_set(thin, judged.task, runs=3, optimizer="adam")
    assert {violation.rule for violation in found} == {"model changed"}


def test_convergence_may_not_be_too_fast(judged: TrainingResult) -> None:
    logs = logs_of(judged)
    slow = Reference.of({24: [2.0 * epochs_of(events) for events in logs] * 3})
    (found,) = check_set(logs, judged.task, runs=3, reference=slow)
    assert found.rule == "convergence"
    assert "too fast" in found.text
