"""What a way to combine does to training: many workers simulated in one process.

Workers share their start. Either each steps by itself, with a momentum of its own, and the updates
are combined (``adasum``: `AdasumOptimizer`), or gradients are combined and there is one momentum
(``adasum_hook``: `adasum_hook` before SGD); of means it is the same. All workers'
gradients are computed at once (``torch.func.vmap``), so that 64 workers take seconds; for means one
gradient of everybody's samples does. A sum is the mean at as many times the learning rate as there
are workers. (`SimulatedWorkers` are for the code that ranks run: they take turns in one model.)

Settings are chosen by samples of their own, and what is reported is of others.
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
    """Float32 [samples, ...] and int64 [samples]."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Reached:
    """Percent right after training: of the samples that settings are chosen by, and of others."""

    chosen: float
    held: float


@dataclass(frozen=True)
class Study:
    """A training run.

    Attributes:
        make: the model, from torch's seed; without batch norms.
        train: what is trained on.
        choice: what settings are chosen by.
        held: what is reported.
        workers: simulated.
        batch: samples a worker and step.
        epochs: over all samples, shared out among the workers.
        momentum: of SGD.
        falling: the learning rate falls to zero, in a straight line over the steps; else it stays.
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
        """Of the whole run."""
        return self.epochs * (len(self.train.x) // (self.workers * self.batch))

    def reached(self, rule: str, lr: float, seed: int) -> Reached:
        """What training with `rule`, from the learning rate `lr` on, ends at."""
        *_, (model, weight) = self._trained(rule, lr, seed)
        return Reached(*(_right(model, weight, one) for one in (self.choice, self.held)))

    def profiles(self, lr: float, seed: int, places: Sequence[float]) -> list[tuple[Any, float]]:
        """What steps of a training that averages show, at places of it.

        Args:
            places: shares of its steps, less than 1.

        Returns:
            Place by place, scalar products of the workers' gradients, float64 [layers, workers,
            workers], and the mean loss of the same samples.
        """
        wanted = {int(place * self.steps) for place in places}
        # Samples in an order of their own: not the ones of the steps just before.
        probes = self._batches(seed + 1000)
        found = []
        for number, (model, weight) in enumerate(self._trained("average", lr, seed)):
            if number in wanted:
                x, y = next(probes)
                with torch.no_grad():
                    loss = cross_entropy(
                        functional_call(model, weight, (x.flatten(0, 1),)), y.flatten()
                    )
                found.append((_products(_gradients(model, weight, x, y)), float(loss)))
        return found

    def _trained(self, rule: str, lr: float, seed: int) -> Iterator[tuple[nn.Module, Tensors]]:
        """The model and its weights, at the start and after every step until they diverge."""
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
            # The last layer's bias gets every sample's error: what diverged shows there.
            if not bool(weight[name].isfinite().all()):
                break

    def _start(self, seed: int) -> tuple[nn.Module, Tensors]:
        torch.manual_seed(seed)
        model = self.make()
        return model, {name: p.detach().clone() for name, p in model.named_parameters()}

    def _batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of every step, [workers, batch, ...]."""
        generator = torch.Generator().manual_seed(seed)
        together = self.workers * self.batch
        for _ in range(self.epochs):
            order = torch.randperm(len(self.train.x), generator=generator)
            for at in range(0, len(order) - together + 1, together):
                chosen = order[at : at + together].view(self.workers, self.batch)
                yield self.train.x[chosen], self.train.y[chosen]

    def _found(
        self, model: nn.Module, weight: Tensors, rule: str, x: torch.Tensor, y: torch.Tensor
    ) -> Tensors:
        """What goes into a momentum, or every worker's."""
        if rule == "adasum":
            return _gradients(model, weight, x, y)
        if rule == "adasum_hook":
            return combined(_gradients(model, weight, x, y))
        return _gradient(model, weight, x.flatten(0, 1), y.flatten())


def combined(updates: Tensors) -> Tensors:
    """Adasum of the workers' updates, [workers, ...] a layer."""
    found = torch.from_numpy(np.nan_to_num(weights(_products(updates)))).float()
    return {
        name: (by @ one.flatten(1)).view(one.shape[1:])
        for by, (name, one) in zip(found, updates.items(), strict=True)
    }


def _products(updates: Tensors) -> Any:
    """Scalar products of the workers' updates, float64 [layers, workers, workers]."""
    rows = [one.flatten(1) for one in updates.values()]
    return np.stack([(one @ one.T).double().numpy() for one in rows])


def _gradient(model: nn.Module, weight: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return _made(model)(weight, x, y)


def _gradients(model: nn.Module, weight: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Of each worker, [workers, ...] a parameter."""
    found: Tensors = vmap(_made(model), in_dims=(None, 0, 0))(weight, x, y)
    return found


def _made(model: nn.Module) -> Callable[[Tensors, torch.Tensor, torch.Tensor], Tensors]:
    def loss(parameters: Tensors, x: torch.Tensor, y: torch.Tensor) -> object:
        return cross_entropy(functional_call(model, parameters, (x,)), y)

    return grad(loss)


def _right(model: nn.Module, weight: Tensors, samples: Samples) -> float:
    with torch.no_grad():
        guess = functional_call(model, weight, (samples.x,)).argmax(1)
    return 100.0 * float((guess == samples.y).float().mean())
