"""What a way to combine does to training: many workers simulated in one process.

Workers share their start. Either each steps by itself, with a momentum of its own, and the updates
are combined (``adasum``: `AdasumOptimizer`), or gradients are combined and there is one momentum
(``adasum_hook``: `adasum_hook` before SGD); of means and sums it is the same. All workers'
gradients are computed at once (``torch.func.vmap``), so that 64 workers take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from slipstream.techniques.distributed.adasum.rule import weights

RULES = ("average", "sum", "adasum", "adasum_hook")


@dataclass(frozen=True)
class Study:
    """A training run.

    Attributes:
        make: the model, from torch's seed; without batch norms.
        x, y: what is trained on, float32 [samples, ...] and int64 [samples].
        held_x, held_y: what accuracy is of.
        workers: simulated.
        batch: samples a worker and step.
        epochs: over all samples, shared out among the workers.
        momentum: of SGD.
    """

    make: Callable[[], nn.Module]
    x: torch.Tensor
    y: torch.Tensor
    held_x: torch.Tensor
    held_y: torch.Tensor
    workers: int = 16
    batch: int = 32
    epochs: int = 3
    momentum: float = 0.9

    def accuracy(self, rule: str, lr: float, seed: int) -> float:
        """Percent right after training with `rule` at the learning rate `lr`."""
        model, weight = self._start(seed)
        own = rule == "adasum"
        velocity = {
            n: torch.zeros((self.workers, *p.shape) if own else p.shape) for n, p in weight.items()
        }
        for x, y in self._batches(seed):
            for name, gradient in self._gradients(model, weight, x, y).items():
                step = velocity[name].mul_(self.momentum)
                step += gradient if own else combined(gradient, rule)
                weight[name] = weight[name] - lr * (combined(step, rule) if own else step)
        with torch.no_grad():
            guess = functional_call(model, weight, (self.held_x,)).argmax(1)
        return 100.0 * float((guess == self.held_y).float().mean())

    def products(self, lr: float, seed: int, after: int) -> Any:
        """Scalar products of the workers' gradients after so many steps of the first one alone.

        Returns:
            float64 [layers, workers, workers].
        """
        model, weight = self._start(seed)
        velocity = {name: torch.zeros_like(p) for name, p in weight.items()}
        batches = itertools.cycle(self._batches(seed))
        for x, y in itertools.islice(batches, after):
            for name, gradient in self._gradients(model, weight, x[:1], y[:1]).items():
                velocity[name].mul_(self.momentum).add_(gradient[0])
                weight[name] = weight[name] - lr * velocity[name]
        rows = [
            one.flatten(1).double()
            for one in self._gradients(model, weight, *next(batches)).values()
        ]
        return np.stack([(one @ one.T).numpy() for one in rows])

    def _start(self, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(seed)
        model = self.make()
        return model, {name: p.detach().clone() for name, p in model.named_parameters()}

    def _batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of every step, [workers, batch, ...]."""
        generator = torch.Generator().manual_seed(seed)
        together = self.workers * self.batch
        for _ in range(self.epochs):
            order = torch.randperm(len(self.x), generator=generator)
            for at in range(0, len(order) - together + 1, together):
                chosen = order[at : at + together].view(self.workers, self.batch)
                yield self.x[chosen], self.y[chosen]

    @staticmethod
    def _gradients(
        model: nn.Module, weight: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Of each worker, [workers, ...] a parameter."""

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> object:
            return cross_entropy(functional_call(model, parameters, (x,)), y)

        found: dict[str, torch.Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(weight, x, y)
        return found


def combined(updates: torch.Tensor, rule: str) -> torch.Tensor:
    """One layer's updates [workers, ...] put together by one of `RULES`."""
    if rule == "average":
        return updates.mean(0)
    if rule == "sum":
        return updates.sum(0)
    rows = updates.flatten(1)
    products = (rows @ rows.T).double().numpy()
    found = torch.from_numpy(np.nan_to_num(weights(products[None])[0])).float()
    return (found @ rows).view(updates.shape[1:])
