"""Trials that train: a perceptron on digits, data-parallel over a trial's workers.

The batch, its order and the learning rate depend on the candidate alone: at any width, each step
averages gradients over the same 64 samples. After every epoch a trial saves a checkpoint with its
loss curve, from which it resumes at any width.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engines.trials import ClusterState, Scheduler
from slipstream.ranks.launch import Host, joined
from slipstream.search import Halving, Int, Space, State, TrialRun, study

if TYPE_CHECKING:
    import torch

BATCH = 64
STEPS = 10
_KEPT = "checkpoint.pt"
# When the trial is resized: after this many epochs, by its width until then.
_EPOCHS, _HIDDEN, _RESIZED_AT = 6, 64, {1: 2, 2: 4}
_RATE = 0.05
# Polling interval of a trial that waits for another one, and its timeout.
_LOOK_S, _PATIENCE_S = 0.02, 200.0


def train(config: Mapping[str, Any], run: TrialRun) -> float:
    """Train to `run.fidelity` epochs on `run.width` workers; return the last epoch's mean loss."""
    curve = _trained(int(config["hidden"]), run, lr=float(config["lr"]))[-STEPS:]
    return sum(curve) / len(curve)


def train_or_wait(config: Mapping[str, Any], run: TrialRun) -> float:
    """With ``wait_for`` 0, train and be resized twice; otherwise end when the other trial has been
    trained for this many epochs."""
    assert run.folder is not None
    if not config["wait_for"]:
        return _trained(_HIDDEN, run, pause_at=_RESIZED_AT.get(run.width))[-1]
    trials = Path(run.folder).parent
    _wait(
        lambda: any(
            _epochs(checkpoint) >= config["wait_for"] for checkpoint in trials.glob(f"*/{_KEPT}")
        )
    )
    return 0.0


def _trained(
    hidden: int, run: TrialRun, pause_at: int | None = None, lr: float = _RATE
) -> list[float]:
    """Resume training, save a checkpoint after each epoch, and return the loss curve.

    Args:
        pause_at: number of epochs after which training waits until the trial is resized.
    """
    assert run.folder is not None
    path = Path(run.folder) / _KEPT
    arguments: dict[str, Any] = {"path": str(path), "hidden": hidden, "lr": lr, "seed": run.seed}

    def is_resized() -> bool:
        run.checkpointed()
        return False

    def run_epochs(epoch: Callable[[], object]) -> None:
        for done in range(_epochs(path), int(run.fidelity)):
            if done == pause_at:
                _wait(is_resized)
            epoch()
            run.checkpointed()

    if run.width == 1:
        run_epochs(lambda: train_epoch(**arguments))
    else:
        with joined([Host()] * run.width, name="the trial") as call:
            run_epochs(lambda: call("slipstream_bench.trial_training:train_epoch", arguments))
    return losses(path)


def _wait(over: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not over():
        if time.monotonic() > until:
            raise TimeoutError("the other trial, or the resize of this one, did not happen in time")
        time.sleep(_LOOK_S)


def losses(path: Path) -> list[float]:
    """Return the checkpoint's loss curve, the batch's mean loss per step; empty without one."""
    import torch

    return list(torch.load(path)["losses"]) if path.exists() else []


def _epochs(path: Path) -> int:
    return len(losses(path)) // STEPS


def train_epoch(path: str, hidden: int, lr: float, seed: int) -> None:
    """Train one more epoch than the checkpoint, on every rank if this process is one.

    Rank r of w takes samples r, r + w, ... of each batch.
    """
    import torch
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(1)
    x, y = _digits()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden),
        torch.nn.Tanh(), torch.nn.Linear(hidden, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    curve: list[float] = []
    if Path(path).exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        curve = saved["losses"]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed + len(curve)))
    for batch in order[: STEPS * BATCH].view(STEPS, BATCH):
        own = batch[rank::ranks]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[own]), y[own])
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        mean = torch.nn.utils.parameters_to_vector([loss.detach().view(1), *gradients])
        if ranks > 1:
            dist.all_reduce(mean)
            mean /= ranks
        torch.nn.utils.vector_to_parameters(mean[1:], gradients)
        optimizer.step()
        curve.append(float(mean[0]))
    if rank == 0:
        partial = Path(f"{path}.partial")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": curve},
            partial,
        )
        partial.replace(path)


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)


class OneTwoOne(Scheduler):
    """Three slots for three trials of `train_or_wait`, two at a time: the first gets a second slot
    when the third begins, and gives it back when that ends."""

    name = "one two one"

    def decide(self, state: ClusterState) -> None:
        begins = [i for i in state.waiting.tolist() if i]
        width = 2 if 2 in begins else 1
        if state.here[0] and state.width[0] != width:
            state.spread(0, width)
        for i in begins:
            state.spread(i, 1)


def resized_trial(folder: Path) -> tuple[list[float], list[float], list[int]]:
    """Train one trial with Ray at widths 1, 2 and 1, and the same one here at width 1.

    Returns:
        Loss curves of both, the resized one first, and its widths in order.
    """
    from slipstream.engines.trials.ray_executor import RayExecutor

    executor = RayExecutor(3, scheduler=OneTwoOne(), ahead=2, restart_s=1.0)
    run = study(
        "s", Space({"wait_for": Int(0, _EPOCHS)}), "loss", estimator=train_or_wait,
        strategy="random", store=folder / "s.db", rungs=Halving(_EPOCHS, _EPOCHS, n=3),
        start=[{"wait_for": epochs} for epochs in (0, *_RESIZED_AT.values())],
    ).run(executor)  # fmt: skip
    assert [trial.state for trial in run.trials] == [State.COMPLETE] * 3, run.trials
    candidate = run.trials[0].candidate
    resized = losses(Path(f"{folder / 's.db'}.files", candidate.id.hex(), _KEPT))
    here = folder / "here"
    here.mkdir()
    same = _trained(_HIDDEN, TrialRun(_EPOCHS, run.trial_seed(candidate), str(here)))
    widths = [len(slots) for number, slots, _, _ in executor.intervals if number == 0]
    return resized, same, widths
