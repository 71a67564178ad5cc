"""Stability training: a fine-tune that penalizes different answers to a scene and its twin.

Source: Zheng et al., "Improving the Robustness of Deep Neural Networks via Stability Training",
CVPR 2016; Cidon et al., MLSys 2021. Both branches receive gradients and share a batch, so that
batch norms see both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.ship.stability.twins import Pixels, Twins, samples_of

if TYPE_CHECKING:
    from torch import Tensor, nn

Loss = Literal["kl", "embedding", "augment"]


class TrainingFailedError(SlipstreamError):
    """The loss of a fine-tune is no longer finite."""

    def __init__(self, epoch: int, learning_rate: float) -> None:
        super().__init__(
            f"the loss became NaN or infinite in epoch {epoch + 1}",
            where=f"learning rate {learning_rate:g}",
            remedy="use a lower learning rate or a smaller alpha",
        )


@dataclass(frozen=True)
class Recipe:
    """Settings of a fine-tune, shared by the hardened model and its control.

    Attributes:
        loss: ``kl`` between the answers to a scene and its twin; ``embedding``: squared distance
            of the last linear layer's inputs, divided by their width; ``augment``: no stability
            term, twins are trained on as scenes.
        alpha: weight of the stability term.
        epochs, batch, learning_rate: of Adam; the rate falls to zero along a cosine.
        seed: seed of the order of scenes and of the twins.
        draws: twins per scene, reused in later epochs because drawing costs more than training;
            0 draws a new twin in every epoch.
        int8: whether twins pass through a simulated int8 copy of the model.
    """

    loss: Loss = "kl"
    alpha: float = 5.0
    epochs: int = 3
    batch: int = 128
    learning_rate: float = 1e-3
    seed: int = 0
    draws: int = 0
    int8: bool = False

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise UnknownNameError("stability loss", self.loss, get_args(Loss))
        for name in ("alpha", "draws"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(name, f"{getattr(self, name):g} is negative")
        for name in ("epochs", "batch", "learning_rate"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not positive")


def fine_tune(
    model: nn.Module,
    scenes: Pixels,
    labels: NDArray[np.int64],
    pipeline: Pipeline,
    twins: Twins | None,
    recipe: Recipe,
    report: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """Fine-tune a copy of `model`; without `twins`, plainly, as the control.

    Args:
        scenes: uint8 [N, H, W, 3].
        labels: int64 [N].

    Raises:
        InvalidArgumentError: fewer than two scenes, or another number of labels.
        TrainingFailedError: the loss is no longer finite.
    """
    import torch
    import torch.nn.functional as f

    from slipstream.ship.stability.int8 import as_int8, following_norms

    if len(scenes) != len(labels) or len(scenes) < 2:
        raise InvalidArgumentError("labels", f"{len(labels)} labels for {len(scenes)} scenes")
    model = _deterministic(copy.deepcopy(model))
    head = _HeadInput(model) if recipe.loss == "embedding" else None
    samples, targets = torch.from_numpy(samples_of(scenes, pipeline)), torch.from_numpy(labels)
    norms = following_norms(model, samples[:1]) if recipe.int8 else {}
    rng = np.random.default_rng(recipe.seed)
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate)
    batches = max(len(scenes) // recipe.batch, 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * batches)
    for epoch in range(recipe.epochs):
        order = rng.permutation(len(scenes))
        for step, places in enumerate(np.array_split(order, batches)):
            x, y = samples[places], targets[places]
            if twins is None:
                loss = f.cross_entropy(model(x), y)
            else:
                twin = torch.from_numpy(twins(scenes[places], places, rng, pipeline))
                with as_int8(model, norms, share=0.5) if recipe.int8 else nullcontext():
                    both = model(torch.cat([x, twin]))
                first, second = both.split(len(x))
                loss = f.cross_entropy(first, y)
                if recipe.loss == "augment":
                    loss = (loss + f.cross_entropy(second, y)) / 2
                else:
                    loss = loss + recipe.alpha * _distance(first, second, head)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 8 == 0:
                value = float(loss.detach())
                if not np.isfinite(value):
                    raise TrainingFailedError(epoch, recipe.learning_rate)
                report(
                    f"epoch {epoch + 1} of {recipe.epochs}, step {step} of {batches}: {value:.3f}"
                )
    if head is not None:
        head.close()
    return model.eval()


def _deterministic(model: nn.Module) -> nn.Module:
    """Put only batch norms into training mode.

    Dropout and stochastic depth would make a scene differ from its twin.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return model


def _distance(first: Tensor, second: Tensor, head: _HeadInput | None) -> Tensor:
    """Return the distance between answers to scenes and twins, logits [N, C] each."""
    import torch.nn.functional as f

    if head is None:
        return f.kl_div(
            f.log_softmax(second, 1), f.log_softmax(first, 1), reduction="batchmean",
            log_target=True,
        )  # fmt: skip
    scene, twin = head.read.flatten(1).split(len(first))
    distance: Tensor = (scene - twin).square().sum(1).mean() / scene.shape[1]
    return distance


class _HeadInput:
    """Input of the model's last linear layer."""

    def __init__(self, model: nn.Module) -> None:
        from torch import nn

        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise InvalidArgumentError(
                "loss", "embedding needs a linear layer, but the model has none",
                remedy="use loss kl",
            )  # fmt: skip
        self.read: Tensor
        self._hook = linear[-1].register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.read = inputs[0]

    def close(self) -> None:
        self._hook.remove()
