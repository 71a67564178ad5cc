"""Stages between real processes: losses of one process, weight versions of the order, refusals."""

from __future__ import annotations

import functools
import itertools
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from forked_ranks import run_ranks
from slipstream.cluster.orders import Action
from slipstream.errors import CommunicationError, WorkloadError
from slipstream.technique import parse
from slipstream.techniques.distributed.chains import chain
from slipstream.techniques.pipeline.simulation import simulate
from slipstream.techniques.pipeline.stages import _divide
from slipstream.techniques.pipeline.technique import Pipeline
from slipstream.workload import BuiltWorkload
from slipstream.workload.built import build_from

STEPS = 30


def parts(layers: int = 6) -> tuple[nn.Sequential, Any, Any, Any]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers - 1)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4))
    batch = torch.randn(24, 16), torch.randn(24, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, batch, nn.functional.mse_loss, optimizer


def run(technique: Pipeline, rank: int) -> tuple[list[float], list[Any], list[float]]:
    """Return losses, the log of every step, and the sums of this stage's parameters."""
    built = build_from(parts(), (technique,), 0, "test")
    losses, logs = [], []
    for _ in range(STEPS):
        losses.append(float(built.step()))
        logs.append(built.step.__self__.log)  # type: ignore[attr-defined]
    built.settle()
    return losses, logs, [float(p.detach().sum()) for p in built.model.parameters()]


def run_technique(technique: Pipeline) -> list[Any]:
    answers = run_ranks(technique.workers, functools.partial(run, technique))
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def alone() -> tuple[list[float], list[float]]:
    built: BuiltWorkload = build_from(parts(), (), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    return losses, [float(p.detach().sum()) for p in built.model.parameters()]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule"),
    [(2, 4, "gpipe"), (3, 4, "1f1b"), (3, 6, "zero_bubble"), (2, 1, "1f1b")],
)
def test_synchronous_stages_train_like_one_process(
    stages: int, micro_batches: int, schedule: Any
) -> None:
    technique = Pipeline(stages, micro_batches, schedule)
    answers = run_technique(technique)
    losses, sums = alone()
    for answer in answers:
        assert answer[0] == pytest.approx(losses, rel=1e-5)
    assert [total for answer in answers for total in answer[2]] == pytest.approx(sums, abs=1e-4)
    for rank, (_, logs, _) in enumerate(answers):
        # The logged actions are those of the order, with the versions it predicts.
        row = technique.order.slots[rank]
        assert [entry[0] for entry in logs[5]] == [
            slot.action.value for slot in row if slot.action is not Action.UPDATE
        ]


class Blocks(nn.Module):
    """A loop over blocks with skips within them, a shared operation and an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.enter(x)
        if mask is not None:
            x = x * mask
        for block in self.blocks:
            x = x + block(x.clone())
        return self.head(x * self.scale)


class Overwrites(nn.Module):
    """Operators that overwrite a tensor: results that are not used, and the input of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.mul_(0.5)
        nn.functional.relu(x, inplace=True)
        x = self.second(x)
        x = self.third(nn.functional.relu(x, inplace=True)) + x
        return self.head(x)


class Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def blocks(kind: type[nn.Module]) -> tuple[nn.Module, Any, Any, Any]:
    _, batch, loss, _ = parts()
    model = kind()
    return model, batch, loss, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def run_blocks(kind: type[nn.Module], technique: Pipeline, rank: int) -> list[float]:
    built = build_from(blocks(kind), (technique,), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    built.settle()
    return losses


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (Blocks, ["enter.0", "enter.1", "blocks.0.0", "blocks.1.0", "blocks.2.0", "head"]),
        (Overwrites, ["first", "second", "third", "head"]),
    ],
)
def test_a_model_with_its_own_forward_is_cut_at_its_blocks(
    kind: type[nn.Module], layers: list[str]
) -> None:
    assert [name for name, _ in chain(kind(), "test")] == layers
    built = build_from(blocks(kind), (), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    for answer in run_ranks(3, functools.partial(run_blocks, kind, Pipeline(3, 4, "1f1b"))):
        assert answer == pytest.approx(losses, rel=1e-5)


def partly_frozen() -> tuple[nn.Sequential, Any, Any, Any]:
    """Return layers without gradients before the others, with batch norm in evaluation mode."""
    model, (x, y), loss, _ = parts()
    frozen = nn.Module()
    frozen.forward = lambda x: frozen.norm(frozen.linear(x))  # type: ignore[method-assign]
    frozen.linear, frozen.norm = nn.Linear(16, 16), nn.BatchNorm1d(16).eval()
    model = nn.Sequential(frozen.requires_grad_(False), nn.Tanh(), *model)
    batch = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    return model, batch, loss, torch.optim.AdamW(model.parameters(), 0.01)


def run_partly_frozen(technique: Pipeline, rank: int) -> tuple[list[float], int]:
    built = build_from(partly_frozen(), (technique,), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    built.settle()
    return losses, built.samples


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_frozen_layers_stay_in_evaluation_mode_and_get_no_gradients(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The frozen layers are the first stage.
    times = [9.0, *[1.0] * 12]
    monkeypatch.setattr(
        "slipstream.techniques.pipeline.stages.layer_times", lambda layers, x: times
    )
    answers = run_ranks(3, functools.partial(run_partly_frozen, Pipeline(3, 5, schedule)))
    built = build_from(partly_frozen(), (), 0, "test")
    losses = [float(built.step()) for _ in range(STEPS)]
    for answer in answers:
        assert answer[0] == pytest.approx(losses, rel=1e-4)
    assert sum(answer[1] for answer in answers) == built.samples == 25


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (2, "micro_batches=1,schedule=async"),
        (3, "micro_batches=1,schedule=async,rescheduling=20,correction=0.135,warmup=4"),
        (3, "micro_batches=2,schedule=async,correction=0.5"),
        (2, "micro_batches=2,schedule=pipedream,warmup=1"),
        (3, "micro_batches=1,schedule=pipedream,rescheduling=40"),
    ],
)
def test_asynchronous_stages_train_like_simulated_ones(
    stages: int, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Equal times give the same cut in every run.
    module = "slipstream.techniques.pipeline.stages"
    monkeypatch.setattr(f"{module}.layer_times", lambda layers, x: [1.0] * len(layers))
    (technique,) = parse(f"pipeline:{stages},{settings}")
    assert isinstance(technique, Pipeline)
    answers = run_technique(technique)
    model, batch, loss, optimizer = parts()
    layers = [layer for _, layer in chain(model, "test")]
    cut = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(_divide([1.0] * 11, stages))]
    history = simulate(cut, [batch] * STEPS, loss, optimizer, technique)
    assert answers[-1][0] == pytest.approx(history.losses, rel=1e-5)
    order, warmup = technique.order, technique.warmup
    for rank, (_, logs, _) in enumerate(answers):
        entries = [entry for log in logs for entry in log]
        # The simulated pipeline also drains.
        assert history.log[rank][: len(entries)] == entries
        for action, number, updates in entries:
            after = number - warmup * order.micro_batches
            version = order.version(rank, after, Action(action)) if after >= 0 else 0
            assert updates == (warmup + version if after >= 0 else number // order.micro_batches)


def late(rank: int) -> None:
    built = build_from(parts(), (Pipeline(2, 1, "async"),), 0, "test")
    for step in range(6):
        time.sleep(0.5 * (rank and step == 5))
        built.step()
    built.settle()


def test_stages_settle_once_the_last_one_has() -> None:
    """The first stage of an asynchronous pipeline does not use the gradients of the last steps."""
    for answer in run_ranks(2, late):
        assert not isinstance(answer, Exception), answer


def lost(technique: Pipeline, rank: int) -> None:
    built = build_from(parts(), (technique,), 0, "test")
    for step in range(STEPS):
        if (rank, step) == (1, 3):
            os._exit(1)
        built.step()


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_a_stage_that_ends_is_named(schedule: Any) -> None:
    first, second, third = run_ranks(3, functools.partial(lost, Pipeline(3, 2, schedule)))
    assert second is None
    assert any(
        isinstance(error, CommunicationError) and "lost stage 2 (rank 1)" in str(error)
        for error in (first, third)
    )


def refused(technique: Pipeline, changed: Any, rank: int) -> None:
    build_from(changed(), (technique,), 0, "test")


def tied() -> Any:
    model, batch, loss, optimizer = parts()
    model[1][0].weight = model[4][0].weight  # type: ignore[index]
    return model, batch, loss, optimizer


def under_hook() -> Any:
    model, *others = parts()
    model[1].register_forward_hook(lambda *call: None)
    return model, *others


def test_autocast_of_the_whole_model_is_refused() -> None:
    techniques = parse("amp:bf16+pipeline:2")
    for error in run_ranks(2, lambda rank: build_from(parts(), techniques, 0, "test")):
        assert "would skip the hooks, autocast or compilation" in str(error)


@pytest.mark.parametrize(
    ("changed", "micro_batches", "problem"),
    [
        (parts, 5, "24 samples and 11 layers do not make 5 equal micro-batches"),
        (tied, 4, "shared by layers of different stages"),
        (lambda: (nn.LSTM(4, 4), *parts()[1:]), 4, "the model is LSTM, which cannot be traced"),
        (lambda: (Skipped(), *parts()[1:]), 4, "several tensors pass between its modules first, s"),
        (lambda: (parts()[0], parts()[1][0], *parts()[2:]), 4, "a batch of two tensors"),
        (lambda: (parts()[0], ([1.0], 2), *parts()[2:]), 4, "a batch of two tensors"),
        (
            lambda: (nn.Sequential(nn.LSTM(16, 4), nn.Tanh()), *parts()[1:]),
            4,
            "(LSTM) returns a tuple",
        ),
        (under_hook, 4, "would skip the hooks, autocast or compilation"),
    ],
)
def test_what_stages_cannot_run_is_refused(changed: Any, micro_batches: int, problem: str) -> None:
    technique = Pipeline(2, micro_batches)
    for error in run_ranks(2, functools.partial(refused, technique, changed)):
        assert isinstance(error, WorkloadError)
        assert problem in str(error)
