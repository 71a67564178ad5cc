"""The time of a method is that of a call and of its steps, and the fastest one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.techniques.scan import MARGIN, plan
from slipstream.techniques.scan import kernels as door

SHAPE = plan.Shape("tanh", 2, 3, 3, torch.float32, training=False, threads=1)


class Clock:
    """Replaces timing: returns the cost of a run's steps, and counts its calls."""

    def __init__(self, costs: dict[str, tuple[float, float]]) -> None:
        self._costs, self._took, self.most_steps = costs, 0.0, 0

    def rnn(self, module: Any, x: torch.Tensor, *, backward: str) -> tuple[torch.Tensor]:
        call_s, step_s = self._costs[backward]
        self._took, self.most_steps = call_s + step_s * len(x), max(self.most_steps, len(x))
        return (x,)

    def timed(self, run: Callable[[], object]) -> dict[str, float]:
        run()
        return {"cpu": self._took * 1e9}


@pytest.fixture
def clock_of(require: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    require("native", door.available(), "no compiled kernels")

    def make(**costs: tuple[float, float]) -> Clock:
        clock = Clock(costs)
        monkeypatch.setattr(plan, "time_function", clock.timed)
        return clock

    return make


def test_the_time_of_any_length_follows_from_two_lengths(clock_of: Callable[..., Clock]) -> None:
    clock = clock_of(fused=(1e-3, 1e-7), framework=(1e-4, 1e-4))
    paces = plan.paces(SHAPE, clock.rnn)
    for steps in (1, 100, 100_000):
        assert paces["fused"].seconds(steps) == pytest.approx(1e-3 + 1e-7 * steps)
        assert paces["framework"].seconds(steps) == pytest.approx(1e-4 + 1e-4 * steps)
    # If steps are cheap compared with the call, their time follows from a long run.
    assert clock.most_steps >= 10_000


def test_the_fastest_is_chosen_and_torchs_method_must_be_clearly_faster(
    clock_of: Callable[..., Clock],
) -> None:
    clock = clock_of(fused=(1e-3, 0.0), framework=(0.0, 1e-4))
    at_par = int(10 / MARGIN)
    assert plan.choose(SHAPE, at_par - 1, clock.rnn) == "framework"
    assert plan.choose(SHAPE, at_par + 1, clock.rnn) == "fused"


def test_a_stopwatch_evicts_the_caches_before_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Swept:
        def sum(self) -> None:
            seen.append("sweep")

    sizes: list[int] = []
    monkeypatch.setattr(plan.torch, "ones", lambda size: sizes.append(4 * size) or Swept())
    seconds = plan.stopwatch("wall")
    assert 0 <= seconds(lambda: seen.append("run")) < 10
    assert seen == ["sweep", "run"]
    assert sizes == [32 << 20]
