"""Effect of a combination rule on training: many workers simulated in one process.

Workers start from the same weights. Either each steps separately, with its own momentum, and the
updates are combined (``adasum``: `AdasumOptimizer`), or gradients are combined and there is one
momentum (``adasum_hook``: `adasum_hook` before SGD); for means both are the same. All workers'
gradients are computed together (``torch.func.vmap``), so that 64 workers take seconds; for means
one gradient of all samples suffices. A sum is the mean at a learning rate multiplied by the number
of workers. (`SimulatedWorkers` run the code of real ranks, alternately on one model.) Settings are
chosen on one set of samples and reported on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from slipstream.techniques.distributed.adasum.rule import weights

RULES = ("average", "adasum", "adasum_hook")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """Inputs, float32 [samples, ...], and labels, int64 [samples]."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Reached:
    """Accuracy after training, in percent, on samples that choose settings and on reported ones."""

    chosen: float
    held: float


@dataclass(frozen=True)
class Study:
    """A training run.

    Attributes:
        make: builds the model from torch's seed; without batch norms.
        train: training samples.
        choice: samples that choose settings.
        held: reported samples.
        workers: number of simulated workers.
        batch: samples per worker and step.
        epochs: passes over all samples, which are distributed among the workers.
        momentum: momentum of SGD.
        falling: whether the learning rate decays linearly to zero over the steps.
    """

    make: Callable[[], nn.Module]
    train: Samples
    choice: Samples
    held: Samples
    workers: int = 16
    batch: int = 32
    epochs: int = 3
    momentum: float = 0.9
    falling: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.epochs * (len(self.train.x) // (self.workers * self.batch))

    def reached(self, rule: str, lr: float, seed: int) -> Reached:
        """Return the accuracy after training with `rule` and the initial learning rate `lr`."""
        *_, (model, weight) = self._trained(rule, lr, seed)
        return Reached(*(_right(model, weight, samples) for samples in (self.choice, self.held)))

    def profiles(self, lr: float, seed: int, places: Sequence[float]) -> list[tuple[Any, float]]:
        """Profile steps of a training that averages.

        Args:
            places: positions of the steps as shares of all, less than 1.

        Returns:
            By position, scalar products of the workers' gradients, float64 [layers, workers,
            workers], and the mean loss of the same samples.
        """
        chosen = {int(place * self.steps) for place in places}
        # Samples in a separate order, so not those of the latest steps.
        probes = self._batches(seed + 1000)
        profiles = []
        for number, (model, weight) in enumerate(self._trained("average", lr, seed)):
            if number in chosen:
                x, y = next(probes)
                with torch.no_grad():
                    loss = cross_entropy(
                        functional_call(model, weight, (x.flatten(0, 1),)), y.flatten()
                    )
                profiles.append((_products(_gradients(model, weight, x, y)), float(loss)))
        return profiles

    def _trained(self, rule: str, lr: float, seed: int) -> Iterator[tuple[nn.Module, Tensors]]:
        """Yield the model and its weights, at the start and after every step until they diverge."""
        model, weight = self._start(seed)
        yield model, weight
        own = rule == "adasum"
        velocity = {
            n: torch.zeros((self.workers, *p.shape) if own else p.shape) for n, p in weight.items()
        }
        for number, (x, y) in enumerate(self._batches(seed)):
            rate = lr * (1.0 - number / self.steps) if self.falling else lr
            found = self._found(model, weight, rule, x, y)
            for name, gradient in found.items():
                velocity[name].mul_(self.momentum).add_(gradient)
            updates = combined(velocity) if own else velocity
            for name, update in updates.items():
                weight[name] = weight[name] - rate * update
            yield model, weight
            # The last layer's bias gets the error of every sample, so it shows divergence.
            if not bool(weight[name].isfinite().all()):
                break

    def _start(self, seed: int) -> tuple[nn.Module, Tensors]:
        torch.manual_seed(seed)
        model = self.make()
        return model, {name: p.detach().clone() for name, p in model.named_parameters()}

    def _batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batch of every step, [workers, batch, ...]."""
        generator = torch.Generator().manual_seed(seed)
        samples = self.workers * self.batch
        for _ in range(self.epochs):
            order = torch.randperm(len(self.train.x), generator=generator)
            for at in range(0, len(order) - samples + 1, samples):
                chosen = order[at : at + samples].view(self.workers, self.batch)
                yield self.train.x[chosen], self.train.y[chosen]

    def _found(
        self, model: nn.Module, weight: Tensors, rule: str, x: torch.Tensor, y: torch.Tensor
    ) -> Tensors:
        """Return the input of the momentum, or of every worker's."""
        if rule == "adasum":
            return _gradients(model, weight, x, y)
        if rule == "adasum_hook":
            return combined(_gradients(model, weight, x, y))
        return _gradient(model, weight, x.flatten(0, 1), y.flatten())


def combined(updates: Tensors) -> Tensors:
    """Combine the workers' updates, [workers, ...] per layer, with Adasum."""
    factors = torch.from_numpy(np.nan_to_num(weights(_products(updates)))).float()
    return {
        name: (by @ update.flatten(1)).view(update.shape[1:])
        for by, (name, update) in zip(factors, updates.items(), strict=True)
    }


def _products(updates: Tensors) -> Any:
    """Return scalar products of the workers' updates, float64 [layers, workers, workers]."""
    rows = [update.flatten(1) for update in updates.values()]
    return np.stack([(row @ row.T).double().numpy() for row in rows])


def _gradient(model: nn.Module, weight: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return _made(model)(weight, x, y)


def _gradients(model: nn.Module, weight: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Return gradients of each worker, [workers, ...] per parameter."""
    gradients: Tensors = vmap(_made(model), in_dims=(None, 0, 0))(weight, x, y)
    return gradients


def _made(model: nn.Module) -> Callable[[Tensors, torch.Tensor, torch.Tensor], Tensors]:
    def loss(parameters: Tensors, x: torch.Tensor, y: torch.Tensor) -> object:
        return cross_entropy(functional_call(model, parameters, (x,)), y)

    return grad(loss)


def _right(model: nn.Module, weight: Tensors, samples: Samples) -> float:
    with torch.no_grad():
        guess = functional_call(model, weight, (samples.x,)).argmax(1)
    return 100.0 * float((guess == samples.y).float().mean())
