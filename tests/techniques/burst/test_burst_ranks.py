"""Bursts between real processes: losses and weights of one process, refusals, lost ranks."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forked_ranks import run_ranks
from slipstream.cluster import Collective, Group
from slipstream.errors import CommunicationError, InvalidArgumentError, WorkloadError
from slipstream.techniques.burst import runner
from slipstream.techniques.burst.background import background
from slipstream.techniques.burst.technique import Burst
from slipstream.workload.built import build_from

STEPS = 20


def parts() -> Any:
    """Return two convolutions and three layers, with an activation that overwrites its input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Tanh()),
        nn.Flatten(),
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)),
    )
    batch = torch.randn(12, 2, 8, 8), torch.randint(0, 3, (12,))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, batch, nn.functional.cross_entropy, optimizer


def run(technique: Burst, rank: int) -> tuple[list[float], list[torch.Tensor], int]:
    built = build_from(parts(), (technique,), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    return losses, [p.detach() for p in built.model.parameters()], built.samples


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (4, "4/2@0.2/1@2"), (4, "1/4@0.1/2@2.1"), (3, "3/2@1/3@2"), (3, "2"), (2, ""),
    ],
)  # fmt: skip
def test_bursts_train_like_one_process(workers: int, plan: str) -> None:
    answers = run_ranks(workers, functools.partial(run, Burst(workers, plan=plan)))
    built = build_from(parts(), (), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        assert answer[0] == pytest.approx(losses, abs=1e-5)
    assert sum(answer[2] for answer in answers) == 12
    # The first rank runs every layer.
    for ours, theirs in zip(answers[0][1], built.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


def measured_network(rank: int) -> tuple[int, float, float]:
    cluster = runner._network()
    cost = cluster.cost(Collective("p2p", 1e6, Group.of([0, 1])))
    return cluster.devices, cost.latency_ns, cost.duration_ns


def test_the_network_of_a_plan_is_that_between_the_first_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There and back in 2 ms, and 20 ns more per byte.
    monkeypatch.setattr(
        runner, "timed",
        lambda operation, rank, groups: [(0.0, 2e-3 + 20e-9 * operation.nbytes)] * (rank < 2),
    )  # fmt: skip
    devices, latency_ns, duration_ns = run_ranks(3, measured_network)[0]
    assert devices == 3
    assert latency_ns == pytest.approx(1e6, rel=0.01)
    assert duration_ns == pytest.approx(1e6 + 10e6, rel=0.01)


def lost(rank: int) -> None:
    built = build_from(parts(), (Burst(3, plan="3/1@2"),), 0, "test")
    for step in range(STEPS):
        if (rank, step) == (1, 3):
            os._exit(1)
        built.step()


def test_a_rank_that_ends_is_named() -> None:
    first, second, _ = run_ranks(3, lost)
    assert second is None
    assert isinstance(first, CommunicationError)
    assert "rank 0 of the burst lost" in str(first)


def normed() -> Any:
    model, batch, loss, optimizer = parts()
    model[0].insert(1, nn.BatchNorm2d(4))
    return model, batch, loss, optimizer


def tied() -> Any:
    model, batch, loss, optimizer = parts()
    model[0][2].weight = nn.Parameter(model[0][2].weight.detach())
    model[2].append(nn.Module())
    model[2][3].weight = model[0][2].weight
    model[2][3].forward = lambda x: x
    return model, batch, loss, optimizer


def refused(technique: Burst, changed: Any, rank: int) -> None:
    build_from(changed(), (technique,), 0, "test")


def test_no_plan_within_the_limits_is_refused_on_every_rank() -> None:
    for error in run_ranks(2, functools.partial(refused, Burst(2, deadline_ms=1e-6), parts)):
        assert isinstance(error, WorkloadError)
        assert "no plan is within the limits" in str(error)


@pytest.mark.parametrize(
    ("changed", "plan", "problem"),
    [
        (normed, "2/1@2", "layer '0.1' has batch norm, which would normalise"),
        (tied, "2/1@2", "layer '2.3' shares a parameter with a layer of another part"),
        (tied, "2/1@1/2@2", "layer '2.3' shares a parameter with a layer of another part"),
        (parts, "2/1@features", "no later layer begins module 'features'"),
        (lambda: (nn.LSTM(4, 4), *parts()[1:]), "2", "the model is LSTM"),
        (lambda: (*parts()[:1], [torch.ones(3, 2, 8, 8), torch.ones(3)], *parts()[2:]), "2",
         "3 samples do not divide among 2 devices"),
        (lambda: (*parts()[:2], nn.CrossEntropyLoss(reduction="sum"), parts()[3]), "2",
         "the loss is not a mean over samples"),
    ],
)  # fmt: skip
def test_what_bursts_cannot_run_is_refused(changed: Any, plan: str, problem: str) -> None:
    for error in run_ranks(2, functools.partial(refused, Burst(2, plan=plan), changed)):
        assert isinstance(error, WorkloadError)
        assert problem in str(error)


def test_background_work_runs_until_its_block_ends(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.touch()
    with background("shutil:copyfile", src=str(source), dst=str(copy)) as work:
        assert copy.exists()
        copy.unlink()
        while not copy.exists():
            time.sleep(0.01)
    assert work.calls >= 1
    assert work.elapsed_s > 0
    with pytest.raises(WorkloadError, match="'nothing'"), background("shutil:nothing"):
        pass
    with pytest.raises(InvalidArgumentError, match="'shutil'"), background("shutil"):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="not JSON"),
        background("shutil:rmtree", path=b""),
    ):
        pass


def test_background_work_may_be_next_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "next_to_it.py").write_text("def work():\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with background("next_to_it:work"):
        pass
