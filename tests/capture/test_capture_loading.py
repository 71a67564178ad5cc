"""Data loading as a task: placed before the operators inside it, and counted separately."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch.utils.data

from known_clock import KnownClock
from slipstream.capture import clocks as watched
from slipstream.capture.clocks import LoadingClock, LoadingTime
from slipstream.capture.overhead import StepTimes, count_events, lay_out, share_out
from slipstream.capture.trace import Node
from slipstream.capture.units import LOADING, Units, find_units
from slipstream.graph import Call, StepPhase, TensorSpec

_SPEC = TensorSpec("float32", (2, 2), (2, 1))
_MM = Call("aten::mm(Tensor self, Tensor mat2) -> Tensor", (_SPEC,), (_SPEC,))
_NEXT = LOADING + "_SingleProcessDataLoaderIter.__next__"


def units() -> Units:
    """An operator, a loading with two operators inside (one in a composite), an operator."""
    nodes = [
        Node("aten::mm", -1, -1, _MM, ()), Node(_NEXT, -1, -1, None, ()),
        Node("aten::mm", 1, -1, _MM, ()), Node("annotation", 1, -1, None, ()),
        Node("aten::mm", 3, -1, _MM, ()), Node("aten::copy_", 4, -1, _MM, ()),
        Node("aten::mm", -1, -1, _MM, ()),
    ]  # fmt: skip
    return find_units(nodes)


def test_a_loading_is_a_unit_and_so_are_the_operators_inside() -> None:
    found = units()
    assert found.loading.tolist() == [-1, 1, 1, 1, -1]
    assert found.last.tolist() == [0, 5, 2, 5, 6]
    assert found.phase[1:4].tolist() == [StepPhase.OTHER] * 3
    assert found.scope[1] == _NEXT
    assert found.scope[3] == f"{_NEXT}/annotation"


def test_tasks_inside_follow_and_no_time_is_lost() -> None:
    start = np.array([[0, 10, 20, 50, 120], [0, 10, 30, 60, 150]], float)
    end = np.array([[5, 100, 30, 70, 130], [5, 140, 50, 70, 155]], float)
    begins, ends = lay_out(units(), start, end)
    assert begins.tolist() == [[0, 10, 70, 80, 120], [0, 10, 110, 130, 150]]
    assert ends.tolist() == [[5, 70, 80, 100, 130], [5, 110, 130, 140, 155]]


def test_a_loading_that_does_not_enclose_its_operators_is_unknown() -> None:
    start = np.array([[0.0, 10.0, 20.0, 50.0, 120.0]])
    end = np.array([[5.0, 12.0, 30.0, 70.0, 130.0]])
    begins, ends = lay_out(units(), start, end)
    assert np.isnan((ends - begins)[0, 1])
    assert (ends - begins)[0, [0, 4]].tolist() == [5, 10]


def test_events_inside_are_counted_once() -> None:
    inner, between = count_events(units())
    # The loading has the annotation and its two operators; the copy belongs to an operator.
    assert inner.tolist() == [0, 3, 0, 1, 0]
    assert between.tolist() == [1, 1, 0, 0, 1, 0]


def test_recorded_times_divide_the_measured_time() -> None:
    shares = share_out(np.array([[300, 100], [600, 120]]), 1000.0)
    assert shares.tolist() == [750.0, 250.0]


class Slow(torch.utils.data.IterableDataset[int]):
    """Work, then wait, on a clock that nothing else advances."""

    def __init__(self, clock: KnownClock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[int]:
        while True:
            self.clock.work(3e6)
            self.clock.wait(4e6)
            yield 1


def test_the_clock_separates_work_from_waiting_and_restores_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known_clock = KnownClock()
    clocks = SimpleNamespace(
        perf_counter_ns=lambda: int(known_clock.wall_ns),
        thread_time_ns=lambda: int(known_clock.cpu_ns),
    )
    monkeypatch.setattr(watched, "time", clocks)
    monkeypatch.setattr(watched, "delay_between", lambda before, after: 0)
    batches = iter(torch.utils.data.DataLoader(Slow(known_clock), None))
    before = type(batches).__next__
    with LoadingClock() as clock:
        next(batches)
        next(batches)
    next(batches)
    taken = clock.take()
    assert taken.cpu_ns == pytest.approx(6e6, rel=0.1)
    assert taken.waiting_ns == pytest.approx(8e6, rel=0.1)
    assert type(batches).__next__ is before


def test_waiting_belongs_to_the_quiet_step_and_queueing_does_not() -> None:
    loading = (LoadingTime(30, 20), LoadingTime(32, 15))
    times = StepTimes((200, 900), (70, 75), loading)
    assert times.quiet_ns(threads=1) == (40.0, 47.0)
    assert times.quiet_ns(threads=2) == (153.0, 47.0)
    assert StepTimes((200, 900), (70, 75)).quiet_ns(threads=1) == (70.0, 0.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_without_loading_has_its_minimum_time(threads: int) -> None:
    outside, within = StepTimes((9, 8), (7, 6)).quiet_ns(threads)
    assert (outside, within) == ((6.0, 0.0) if threads == 1 else (8.0, 0.0))
