"""Detection of the device and threads of a step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from slipstream.capture.place import OffThreadWork, find_device, find_off_thread_work
from slipstream.workload.built import build_from


@dataclass
class Event:
    """The attributes that are read from a Kineto event."""

    thread: int
    begin: int
    end: int
    label: str = "aten::mm"

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def start_thread_id(self) -> int:
        return self.thread


def test_operators_of_one_thread_run_on_no_other() -> None:
    assert find_off_thread_work([Event(1, 0, 10), Event(1, 20, 30)]) == OffThreadWork(0, 0.0)
    assert find_off_thread_work([]) == OffThreadWork(0, 0.0)


def test_work_of_other_threads_is_a_share_of_time_or_of_count() -> None:
    own = [Event(1, 10 * n, 10 * n + 10) for n in range(9)]
    assert find_off_thread_work([*own, Event(2, 0, 10)]) == OffThreadWork(1, 0.1)
    # Nested operators count their time once.
    long = [Event(2, 0, 90), Event(2, 10, 20)]
    assert find_off_thread_work([*own, *long]) == OffThreadWork(2, 0.5)


@pytest.mark.parametrize("name", ["gloo:all_reduce", "[memory]", "record_param_comms"])
def test_annotations_of_other_threads_are_not_operators(name: str) -> None:
    assert find_off_thread_work([Event(1, 0, 10), Event(2, 0, 99, name)]) == OffThreadWork(0, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_without_a_device_of_torch_there_is_none() -> None:
    built = build_from((nn.Linear(2, 2), torch.zeros(1, 2)), (), 0, "linear")
    assert find_device(built) is None
