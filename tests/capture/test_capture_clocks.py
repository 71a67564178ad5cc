"""Garbage collection is timed in plain steps and becomes a separate task."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from slipstream.capture import assemble, clocks
from slipstream.capture.clocks import (
    CollectionClock,
    CollectionTime,
    LoadingClock,
    collection_ns,
    collection_spread,
)
from slipstream.capture.overhead import StepTimes
from slipstream.graph import Kind, StepPhase, replay
from slipstream.workload import build_from
from tiny_models import parts, record


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every collection takes 7 ns of wall time and 5 ns of CPU time, and runs only when called."""
    wall, cpu = iter(range(0, 10**6, 7)), iter(range(0, 10**6, 5))
    clock = SimpleNamespace(perf_counter_ns=lambda: next(wall), thread_time_ns=lambda: next(cpu))
    monkeypatch.setattr(clocks, "time", clock)
    gc.disable()
    yield
    gc.enable()


def test_collections_are_timed_and_full_ones_counted_separately() -> None:
    with CollectionClock(LoadingClock()) as clock:
        gc.collect(0)
        gc.collect(1)
        gc.collect(2)
        assert clock.take() == CollectionTime(wall_ns=21, cpu_ns=15, young_ns=10, young=2)
        assert clock.take() == CollectionTime()
        gc.collect(0)
    gc.collect(0)
    assert clock.take() == CollectionTime(7, 5, 5, 1)


def test_collections_of_a_loader_belong_to_the_loader() -> None:
    loader = LoadingClock()
    with CollectionClock(loader) as clock:
        loader.inside = True
        gc.collect(0)
        loader.inside = False
        assert clock.take() == CollectionTime()


def test_collections_of_another_thread_do_not_belong_to_the_step() -> None:
    with CollectionClock(LoadingClock()) as clock:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        assert clock.take() == CollectionTime()


def test_a_mean_is_reported_if_significant_and_frequent() -> None:
    often = (CollectionTime(60, 60, 50, 1), CollectionTime()) * 4
    assert collection_ns(often, 2000.0) == 25.0
    assert collection_ns(often, 2501.0) == 0.0
    assert collection_spread(often) == 0.5
    seldom = (CollectionTime(900, 900, 900, 1),) + (CollectionTime(),) * 4
    assert collection_ns(seldom, 2000.0) == 0.0
    # A single full collection is not typical of the step.
    assert collection_ns((CollectionTime(900, 900),) * 4, 2000.0) == 0.0
    assert collection_ns((), 2000.0) == 0.0


@pytest.mark.parametrize(("threads", "quiet"), [(1, 65.0), (2, 170.0)])
def test_a_quiet_step_is_one_without_collections(threads: int, quiet: float) -> None:
    collected = (CollectionTime(30, 20, 20, 1), CollectionTime(10, 10))
    times = StepTimes((200, 900), (85, 95), collecting=collected)
    assert times.quiet_ns(threads) == (quiet, 0.0)


def test_collection_is_a_task_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "collection_ns", lambda *_: 5e6)
    graph = record(build_from(parts("mlp"), (), 0, "mlp"))
    last = len(graph) - 1
    assert graph.string(int(graph.tasks.name[last])) == assemble.COLLECTION_TASK
    assert graph.tasks.kind[last] == Kind.COLLECTION
    assert graph.tasks.phase[last] == StepPhase.OTHER
    assert graph.tasks.duration_ns[last] == 5e6
    assert (graph.tasks.kind == Kind.COLLECTION).sum() == 1
    assert replay(graph).step_ns >= 5e6
