"""Planted violations in the logs of a real run: each is rejected with its own message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.mlperf.training import Judged, check_set
from slipstream.mlperf.training.log import Event, read
from slipstream.mlperf.training.rcp import Reference
from slipstream.mlperf.training.rules import epochs_of

Logs = list[list[Event]]
Plant = Callable[[Logs], Logs]


def logs_of(judged: Judged) -> Logs:
    return [read(Path(run.log)) for run in judged.arms[0].runs]


def numbered(events: list[Event]) -> list[Event]:
    return [dataclasses.replace(one, line=number) for number, one in enumerate(events, 1)]


def changed(key: str, value: object, run: int = 0) -> Plant:
    """The value of a key in a run; in all of them where `run` is -1."""

    def plant(logs: Logs) -> Logs:
        return [
            [dataclasses.replace(e, value=value) if e.key == key else e for e in one]
            if run in (n, -1)
            else one
            for n, one in enumerate(logs)
        ]

    return plant


def edited(change: Callable[[list[Event]], list[Event]], runs: int = 1) -> Plant:
    """The first runs' events, in another order or number."""
    return lambda logs: [
        numbered(change(list(one))) if n < runs else one for n, one in enumerate(logs)
    ]


def before_the_clock(events: list[Event]) -> list[Event]:
    at = next(n for n, one in enumerate(events) if one.key == "run_start")
    touched = dataclasses.replace(events[at], key="data_touched")
    return [*events[:at], touched, *events[at:]]


def without(key: str, which: int | None = None) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        places = [n for n, one in enumerate(events) if one.key == key]
        gone = set(places) if which is None else {places[which]}
        return [one for n, one in enumerate(events) if n not in gone]

    return change


def twice(key: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [
        copy for one in events for copy in ([one, one] if one.key == key else [one])
    ]


def aborted(events: list[Event]) -> list[Event]:
    return [
        dataclasses.replace(one, metadata={**one.metadata, "status": "aborted"})
        if one.key == "run_stop"
        else one
        for one in events
    ]


def later_seed(events: list[Event]) -> list[Event]:
    seed = next(one for one in events if one.key == "seed")
    rest = [one for one in events if one.key != "seed"]
    return [*rest[:-1], seed, rest[-1]]


def set_clock(events: list[Event]) -> list[Event]:
    return [*events[:-1], dataclasses.replace(events[-1], time_ms=events[-1].time_ms + 60_000)]


def slow_start(events: list[Event]) -> list[Event]:
    moved, inside = [], False
    for one in events:
        inside |= one.key == "init_stop"
        moved.append(dataclasses.replace(one, time_ms=one.time_ms + 15e6 * inside))
    return moved


def went_on(events: list[Event]) -> list[Event]:
    last = max(n for n, one in enumerate(events) if one.key == "eval_accuracy")
    return [*events[: last + 1], events[last], *events[last + 1 :]]


def worse_last(events: list[Event]) -> list[Event]:
    last = max(n for n, one in enumerate(events) if one.key == "eval_accuracy")
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


def test_an_honest_result_breaks_no_rule(judged: Judged) -> None:
    assert check_set(logs_of(judged), judged.task, runs=3, optimizer="adam") == []
    assert all(arm.violations == () for arm in judged.arms)


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_violation_has_its_own_message(judged: Judged, rule: str) -> None:
    wrong = check_set(PLANTED[rule](logs_of(judged)), judged.task, runs=3, optimizer="adam")
    assert rule in {one.rule for one in wrong}
    texts = [one.text for one in wrong if one.rule == rule]
    assert all(texts)


def test_the_closed_division_keeps_optimizer_and_model(judged: Judged) -> None:
    closed = changed("submission_division", "closed", -1)(logs_of(judged))
    other = check_set(changed("opt_name", "lion")(closed), judged.task, runs=3, optimizer="adam")
    assert [one.rule for one in other] == ["optimizer changed"]
    thin = [read(Path(run.log)) for run in judged.arms[1].runs]
    thin = changed("submission_division", "closed", -1)(thin)
    found = check_set(thin, judged.task, runs=3, optimizer="adam")
    assert {one.rule for one in found} == {"model changed"}


def test_convergence_may_not_be_too_good(judged: Judged) -> None:
    logs = logs_of(judged)
    slow = Reference.of({24: [2.0 * epochs_of(one) for one in logs] * 3})
    (found,) = check_set(logs, judged.task, runs=3, reference=slow)
    assert found.rule == "convergence"
    assert "too fast" in found.text
