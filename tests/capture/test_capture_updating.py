"""The time of the weight update: measured in plain steps, found among units, calibrated apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.capture import program
from slipstream.capture.clocks import UpdateClock, UpdateTime
from slipstream.capture.overhead import StepTimes, calibrate, calibrate_apart
from slipstream.graph import StepPhase
from slipstream.verbs.profiling import profile
from tiny_models import workload


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    return optimizer


def test_each_update_counts_once() -> None:
    optimizer = stepped(nn.Linear(8, 8))
    with UpdateClock(optimizer) as clock:
        assert clock.take() == UpdateTime(0, 0)
        optimizer.step()
        found = clock.take()
        assert found.wall_ns > 0
        assert found.cpu_ns > 0
        assert clock.take() == UpdateTime(0, 0)
    optimizer.step()
    assert clock.take() == UpdateTime(0, 0)


def test_an_object_without_a_step_takes_no_time() -> None:
    with UpdateClock(None) as clock:
        assert clock.take() == UpdateTime(0, 0)


def test_the_minimum_update_counts_on_the_clock_of_the_step() -> None:
    times = StepTimes((9, 9), (8, 8), (), (UpdateTime(5, 3), UpdateTime(4, 2)))
    assert times.quiet_update_ns(1) == 2
    assert times.quiet_update_ns(2) == 4
    assert StepTimes((9,), (8,)).quiet_update_ns(1) == 0


def test_each_part_has_the_cost_that_its_times_show() -> None:
    # Two units of the backward pass, whose events cost 100 ns each, and two of the update at 20 ns.
    inner = np.array([10, 10, 10, 10])
    durations = np.array([[3000.0, 3000.0, 1200.0, 1200.0]])
    gaps, between = np.zeros((1, 5)), np.zeros(5, np.int64)
    update = np.array([False, False, True, True]), np.array([False] * 3 + [True, False]), 2000.0
    found = calibrate_apart(durations, gaps, inner, between, 6000.0, update)
    np.testing.assert_allclose(found.duration_ns, [2000, 2000, 1000, 1000])
    assert found.per_event_ns == pytest.approx(60)
    assert found.scale == pytest.approx(1)
    together = calibrate_apart(durations, gaps, inner, between, 6000.0, None)
    plain = calibrate(durations, gaps, inner, between, 6000.0)
    np.testing.assert_array_equal(together.duration_ns, plain.duration_ns)
    assert together.duration_ns[2:].sum() < 2000


def test_the_update_of_a_real_step_has_its_measured_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So long that concurrent work of the machine does not matter.
    least = 1_000_000_000

    class Watching(UpdateClock):
        def take(self) -> UpdateTime:
            seen = super().take()
            return UpdateTime(least, least) if seen.cpu_ns else seen

    monkeypatch.setattr(program, "UpdateClock", Watching)
    graph = profile(workload("transformer"), warmup=1, steps=4, threads=1)
    tasks = graph.tasks
    update = tasks.phase == StepPhase.OPTIMIZER
    inside = float(tasks.duration_ns[update].sum() + tasks.gap_ns[update][:-1].sum())
    # The rest is Python before its first operator and after its last.
    assert 0.5 * least < inside <= least * (1 + 1e-9)
