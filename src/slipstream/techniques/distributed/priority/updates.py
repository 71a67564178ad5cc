"""An optimizer's step in parts, each when its gradients are there, with the same bits.

Optimizers that treat every number by itself can update some parameters now and others later. What
they do depends on the settings of the moment of `optimizer.step`: schedulers change the learning
rate before the last parameter has been updated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.distributed.optimizers import ELEMENTWISE

# Optimizers that look at one parameter at a time.
_SEPARABLE = frozenset({
    *ELEMENTWISE, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor
})  # fmt: skip
Settings = list[dict[str, Any]]


class Updates:
    """Parts of an optimizer's step.

    Raises:
        InvalidArgumentError: an optimizer that evaluates the model itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InvalidArgumentError(
                "optimizer", "is LBFGS, which evaluates the model several times a step",
                remedy="another optimizer, or DistributedDataParallel",
            )  # fmt: skip
        self.optimizer = optimizer
        # Of the class: the instance's own may be ours, or a scheduler's.
        self._step = functools.partial(type(optimizer).step, optimizer)

    @property
    def separable(self) -> bool:
        """Whether parts, one after the other, are the whole."""
        hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        return type(self.optimizer) in _SEPARABLE and not any(hooks)

    def settings(self) -> Settings:
        """Learning rates and the like, as they are now."""
        return [
            {k: _kept(v) for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def apply(
        self,
        settings: Settings,
        gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor | None]],
    ) -> None:
        """Update parameters with gradients; those that the optimizer does not have stay."""
        given = {id(parameter): (parameter, gradient) for parameter, gradient in gradients}
        whole = self.optimizer.param_groups
        part: Settings = []
        for group, now in zip(whole, settings, strict=True):
            mine = [one for one in group["params"] if id(one) in given]
            if mine:
                part.append({**now, "params": mine})
        if not part:
            return
        before = [(one, one.grad) for one, _ in given.values()]
        self.optimizer.param_groups = part
        try:
            for parameter, gradient in given.values():
                parameter.grad = gradient
            self._step()
        finally:
            self.optimizer.param_groups = whole
            for parameter, kept in before:
                parameter.grad = kept

    def whole(self) -> None:
        self._step()

    def strangers(self, known: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Parameters with a gradient that are none of `known`: nobody sends those."""
        ids = {id(one) for one in known}
        groups = self.optimizer.param_groups
        return [
            one
            for g in groups
            for one in g["params"]
            if id(one) not in ids and one.grad is not None
        ]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
