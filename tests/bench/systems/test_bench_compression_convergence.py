"""Error feedback sends and retains the published values; each method is judged at its own rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.techniques.distributed import Compressor, RandomK, Sign, SimulatedWorkers
from slipstream.techniques.distributed.compression.bucket import Layout
from slipstream_bench.rows import BenchOptions
from slipstream_bench.systems.compression import convergence
from slipstream_bench.systems.compression.convergence import Pace, Run, Task

_NUMBERS = 200


def _sent(team: SimulatedWorkers, gradients: np.ndarray) -> np.ndarray:
    """Return the mean of the workers' rows after the exchange, float32 [workers, numbers]."""
    (parameter,) = team.parameters.values()
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).view_as(parameter).clone()
        team.collect()
    team.reduce()
    assert parameter.grad is not None
    return parameter.grad.reshape(-1).double().numpy()


def _drawn(steps: int, workers: int) -> np.ndarray:
    """Return gradients whose values differ by orders of magnitude."""
    drawn = np.random.default_rng(0)
    sizes = 10.0 ** drawn.uniform(-3, 0, _NUMBERS)
    return (sizes * drawn.standard_normal((steps, workers, _NUMBERS))).astype(np.float32)


def test_signs_are_those_of_the_first_algorithm_of_karimireddy_et_al() -> None:
    """p = g + e; d = |p|_1 / n sign(p); e = p - d; what arrives is the mean of the workers' d."""
    gradients = _drawn(40, 2)
    team = SimulatedWorkers(nn.Linear(_NUMBERS, 1, bias=False), Sign(), 2)
    residual = np.zeros((2, _NUMBERS))
    for step in gradients:
        corrected = residual + step
        sent = np.abs(corrected).mean(1, keepdims=True) * np.where(corrected >= 0, 1.0, -1.0)
        residual = corrected - sent
        assert np.allclose(_sent(team, step), sent.mean(0), rtol=1e-4, atol=1e-6)


def test_random_entries_arrive_complete_and_unscaled() -> None:
    """A sent entry is all that was accumulated for it; it is not divided by the sampled share."""
    gradients = _drawn(60, 3)
    settings = RandomK(ratio=0.1, block=4)
    team = SimulatedWorkers(nn.Linear(_NUMBERS, 1, bias=False), settings, 3)
    residual, waited = np.zeros(_NUMBERS), []
    for step in gradients:
        residual += step.astype(np.float64).mean(0)
        found = _sent(team, step)
        arrived = np.flatnonzero(found)
        assert len(arrived) == _NUMBERS // 10
        assert len(set(arrived // 4)) == len(arrived) // 4, "whole runs"
        assert np.allclose(found[arrived], residual[arrived], rtol=1e-4, atol=1e-6)
        residual[arrived] = 0.0
        waited.append(arrived)
    assert len(set(np.concatenate(waited))) == _NUMBERS, "every entry is sent"


def _distance(rate: float, settings: Compressor | None) -> float:
    """Return |v x| after 100 steps on (v x)^2 / 2 from 1; v has length 1 and no small entries."""
    drawn = torch.Generator().manual_seed(0)
    direction = torch.randn(400, generator=drawn).sign() + torch.randn(400, generator=drawn) / 4
    direction /= direction.norm()
    model = nn.Linear(400, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(direction[None])
    team = SimulatedWorkers(model, settings, 1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(100):
        optimizer.zero_grad()
        model(direction[None]).square().sum().div(2).backward()
        team.collect()
        team.reduce()
        optimizer.step()
    return abs(model(direction[None]).item())


@dataclass(frozen=True)
class _Cycle(RandomK):
    """Return the residual if every entry is sent once per cycle."""

    def _drawn(self, layout: Layout, step: int) -> torch.Tensor:
        period = round(1 / self.ratio)
        return torch.arange(step % period, layout.numel, period)


def test_independent_draws_allow_a_rate_that_a_cycle_does_not() -> None:
    """Old gradients, weighted like momentum, allow a higher rate than exact ones (limit 2)."""
    draws, cycle = RandomK(ratio=0.1, block=1), _Cycle(ratio=0.1, block=1)
    assert _distance(0.3, cycle) < 0.1
    assert _distance(0.3, draws) < 0.1
    assert _distance(1.0, cycle) > 1.0
    assert _distance(2.5, None) > 1.0
    assert _distance(2.5, draws) < 0.1


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3, 0.7, 1.0])
def test_one_run_is_drawn_of_each_segment_with_equal_probability(ratio: float) -> None:
    settings, layout = RandomK(ratio=ratio, block=4), Layout.of({"a": (399,)})
    times, steps = np.zeros(399), 2000
    for step in range(steps):
        found = settings._drawn(layout, step).numpy()
        assert np.all(np.diff(found) > 0)
        assert len(set(found // 4)) == np.ceil(ratio * 100), "whole runs, the requested number"
        times[found] += 1
    share = np.ceil(ratio * 100) / 100
    # Segments differ by one run if they do not divide evenly; draws vary by chance.
    width = np.array([np.floor(1 / share), np.ceil(1 / share)])
    chance = 5 * np.sqrt(share * (1 - share) / steps)
    assert times.min() / steps >= 1 / width.max() - chance
    assert times.max() / steps <= 1 / width.min() + chance


@dataclass(frozen=True)
class Known(Task):
    """Scores by table: no compression is best with momentum, signs without."""

    def reached(
        self, how: str, runs: Sequence[Run], steps: int, examples: convergence.Examples
    ) -> list[float]:
        tuning = {run.seed >= 100 for run in runs}
        assert len(tuning) == 1
        expected = self.validation if tuning == {True} else self.held
        assert examples is expected, "judged scores do not influence the rate"
        return [self._known(how, run) for run in runs]

    @staticmethod
    def _known(how: str, run: Run) -> float:
        if how == "sign":
            return -np.inf if run.pace.momentum else 90.0 + 0.1 * (run.seed % 100)
        return (97.0 if run.pace.momentum else 95.0) + 0.1 * (run.seed % 100)


def _known() -> Known:
    first, second = ((torch.zeros(1), torch.zeros(1)) for _ in range(2))
    return Known(
        nn.Identity, lambda drawn: first, first, second, (Pace(0.1), Pace(0.01, 0.9)), 2, 300,
        lambda out, y: 0.0, "% right",
    )  # fmt: skip


def test_each_method_is_judged_at_the_rate_chosen_by_its_validation() -> None:
    tuned = _known().tuned("sign", 300)
    assert list(tuned) == [Pace(0.1), Pace(0.01, 0.9)]
    row = convergence.judged("trained", _known(), BenchOptions(full=True))
    assert "none 97.200 at 0.01, momentum 0.9" in row.detail
    assert "sign 90.200 at 0.1 (validation" in row.detail
    assert "at none's pace -inf" in row.detail
    assert row.holds is False
    assert re.search(r"\bworst\b.*\bsign\b", row.detail)
    spread = np.std([0.0, 0.1, 0.2, 0.3, 0.4], ddof=1)
    assert row.value == pytest.approx(7.0 / spread)


def test_a_quick_run_gives_no_verdict() -> None:
    assert convergence.judged("trained", _known(), BenchOptions()).holds is None


def test_trainings_computed_together_equal_a_plain_loop() -> None:
    """Rates decrease linearly to zero; clipping applies to the mean gradient after the exchange."""
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 10

    def batch(drawn: torch.Generator) -> convergence.Examples:
        chosen = torch.randint(0, 64, (8,), generator=drawn)
        return images[chosen], labels[chosen]

    def score(out: torch.Tensor, y: torch.Tensor) -> float:
        return -float(nn.functional.cross_entropy(out, y))

    examples, steps, clip = (images, labels), 6, 0.5
    task = Task(convergence._Images, batch, examples, examples, (), 1, steps, score, "", clip)
    runs = [Run(Pace(0.2), 0), Run(Pace(0.05, 0.9), 1)]
    for how, settings in (("none", None), ("randomk:0.3", RandomK(0.3))):
        expected = []
        for run in runs:
            torch.manual_seed(run.seed)
            model = convergence._Images()
            team = SimulatedWorkers(model, settings, 2)
            drawn = torch.Generator().manual_seed(run.seed)
            before = {p: torch.zeros_like(p) for p in model.parameters()}
            for step in range(steps):
                for _ in range(2):
                    x, y = batch(drawn)
                    torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
                    team.collect()
                team.reduce()
                gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
                norm = torch.cat([tensor.reshape(-1) for tensor in gradients.values()]).norm()
                with torch.no_grad():
                    for p, gradient in gradients.items():
                        clipped = gradient * min(1.0, clip / float(norm))
                        before[p] = run.pace.momentum * before[p] + clipped
                        p -= run.pace.lr * (1.0 - step / steps) * before[p]
                        p.grad = None
            expected.append(score(model(images).detach(), labels))
        assert task.reached(how, runs, steps, examples) == pytest.approx(expected, abs=1e-5), how
