"""Stability training: a fine-tune that also asks for one answer to a scene and its twin.

Source: Zheng et al., "Improving the Robustness of Deep Neural Networks via Stability Training",
CVPR 2016; Cidon et al., MLSys 2021. Both branches receive gradient, and both go through the model
in one batch, so that batch norms see both.
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
    """A fine-tune lost its way."""

    def __init__(self, epoch: int, learning_rate: float) -> None:
        super().__init__(
            f"the loss is no number any more, in epoch {epoch + 1}",
            where=f"learning rate {learning_rate:g}",
            remedy="a lower learning rate, or a smaller alpha",
        )


@dataclass(frozen=True)
class Recipe:
    """How a fine-tune is done, the same for the hardened model and its control.

    Attributes:
        loss: ``kl`` between the answers to a scene and to its twin; ``embedding``: squared
            distance of what the last linear layer reads, over its width; ``augment``: no stability
            term, twins are only learned as scenes are.
        alpha: weight of the stability term beside the task's own loss.
        epochs, batch, learning_rate: of Adam; the rate falls to zero along a cosine.
        seed: of the order of scenes and of the twins.
        draws: of a scene's twins; later epochs take one of these again, for drawing costs more than
            training does. 0 draws a new one in every epoch.
        int8: whether twins also pass through the layers as an int8 copy of the model computes them.
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
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not above 0")


def fine_tune(
    model: nn.Module,
    scenes: Pixels,
    labels: NDArray[np.int64],
    pipeline: Pipeline,
    twins: Twins | None,
    recipe: Recipe,
    say: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """A copy of `model`, trained on; with `twins` None the plain fine-tune, which is the control.

    Args:
        scenes: uint8 [N, H, W, 3].
        labels: int64 [N].

    Raises:
        InvalidArgumentError: fewer scenes than two, or labels of other scenes.
        TrainingFailedError: the loss is no number any more.
    """
    import torch
    import torch.nn.functional as f

    from slipstream.ship.stability.int8 import as_int8, norms_behind

    if len(scenes) != len(labels) or len(scenes) < 2:
        raise InvalidArgumentError("labels", f"{len(labels)} of them for {len(scenes)} scenes")
    model = _without_chance(copy.deepcopy(model))
    head = _Reader(model) if recipe.loss == "embedding" else None
    samples, targets = torch.from_numpy(samples_of(scenes, pipeline)), torch.from_numpy(labels)
    norms = norms_behind(model, samples[:1]) if recipe.int8 else {}
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
                    loss = loss + recipe.alpha * _apart(first, second, head)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 8 == 0:
                value = float(loss.detach())
                if not np.isfinite(value):
                    raise TrainingFailedError(epoch, recipe.learning_rate)
                say(f"epoch {epoch + 1} of {recipe.epochs}, step {step} of {batches}: {value:.3f}")
    if head is not None:
        head.close()
    return model.eval()


def _without_chance(model: nn.Module) -> nn.Module:
    """In training mode as far as batch norms go.

    Dropout and layers left out at random would differ between a scene and its twin, and the
    stability term would be about these.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return model


def _apart(first: Tensor, second: Tensor, head: _Reader | None) -> Tensor:
    """How far the answers to scenes and twins lie apart, of logits [N, C] each."""
    import torch.nn.functional as f

    if head is None:
        return f.kl_div(
            f.log_softmax(second, 1), f.log_softmax(first, 1), reduction="batchmean",
            log_target=True,
        )  # fmt: skip
    one, other = head.read.flatten(1).split(len(first))
    distance: Tensor = (one - other).square().sum(1).mean() / one.shape[1]
    return distance


class _Reader:
    """Keeps what the model's last linear layer reads."""

    def __init__(self, model: nn.Module) -> None:
        from torch import nn

        linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
        if not linear:
            raise InvalidArgumentError(
                "loss", "the model has no linear layer whose input were an embedding",
                remedy="loss kl",
            )  # fmt: skip
        self.read: Tensor
        self._hook = linear[-1].register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.read = inputs[0]

    def close(self) -> None:
        """Leave the model as it was."""
        self._hook.remove()
