"""Page faults: measured before the pages are kept, and ignored if insignificant."""

from __future__ import annotations

import itertools

import pytest

from slipstream import heap
from slipstream.capture import paging
from slipstream.capture.overhead import StepTimes
from slipstream.capture.paging import Faulting, keep_pages
from slipstream.graph import Kind, StepPhase, replay
from slipstream.graph.edit import append_task
from slipstream.graph.page_faults import PAGE_FAULTS, page_fault_ns, page_fault_tasks
from tiny_models import captured

_MS = 1_000_000


def steps(cpu: list[int], faults: list[int]) -> Faulting:
    return Faulting(tuple(cpu), tuple(cpu), tuple(faults))


def cpu_times(*cpu: int) -> StepTimes:
    return StepTimes(cpu, cpu)


def test_the_extra_time_of_earlier_steps_is_that_of_page_faults() -> None:
    watched = steps([12 * _MS] * 3, [1000] * 3)
    assert watched.extra_ns(cpu_times(10 * _MS, 10 * _MS), 1) == 2 * _MS


def test_a_busy_machine_does_not_raise_the_cost_of_page_faults_beyond_its_limit() -> None:
    watched = steps([90 * _MS] * 3, [1000] * 3)
    assert watched.extra_ns(cpu_times(10 * _MS), 1) == 6 * _MS
    quicker = steps([9 * _MS] * 3, [1000] * 3)
    assert 0 < quicker.extra_ns(cpu_times(10 * _MS), 1) < _MS


def test_irregular_page_faults_are_less_certain() -> None:
    assert steps([1] * 4, [1000] * 4).spread == pytest.approx(paging._MIN_SPREAD)
    assert steps([1] * 4, [0, 2000, 0, 2000]).spread == pytest.approx(paging._MAX_SPREAD)


def run(faults_per_step: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Faulting | None, int, int]:
    """Return the result of `keep_pages`, the number of steps, and how often pages were kept."""
    counter = itertools.count(step=faults_per_step)
    kept_times: list[bool] = []
    monkeypatch.setattr(heap, "page_faults", lambda: next(counter))
    monkeypatch.setattr(heap, "can_keep_pages", lambda: True)
    monkeypatch.setattr(heap, "keep_pages", lambda: not kept_times.append(True))
    program = keep_pages(24, lambda line: None)
    taken = 0
    try:
        while True:
            next(program)
            sum(range(20_000))
            taken += 1
    except StopIteration as end:
        return end.value, taken, len(kept_times)


def test_few_page_faults_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken, times_kept = run(0, monkeypatch)
    assert found is None
    assert (taken, times_kept) == (paging._MIN_STEPS, 0)


def test_many_page_faults_are_measured_and_then_pages_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, taken, times_kept = run(5000, monkeypatch)
    assert found is not None
    assert set(found.faults) == {5000}
    assert len(found.cpu_ns) == len(found.wall_ns) == paging._MAX_STEPS
    assert (taken, times_kept) == (paging._MAX_STEPS + paging._SETTLE, 1)


def test_page_faults_are_a_separate_task_at_the_end_of_the_step() -> None:
    graph = captured("mlp")
    longer = append_task(graph, PAGE_FAULTS, 5e6, 0.2, Kind.HOST)
    assert page_fault_tasks(longer) == [len(graph)]
    assert page_fault_tasks(graph) == []
    assert page_fault_ns(longer) == 5e6
    assert replay(longer).step_ns == pytest.approx(replay(graph).step_ns + 5e6)
    last = longer.tasks
    assert longer.string(int(last.name[-1])) == PAGE_FAULTS
    assert last.phase[-1] == StepPhase.OTHER
    assert (last.module[-1], last.source[-1], last.sequence[-1]) == (0, 0, -1)
    assert longer.edits == graph.edits
    longer.check()
