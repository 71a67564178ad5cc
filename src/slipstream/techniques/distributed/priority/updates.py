"""An optimizer's step in parts, each once its gradients have arrived, with bitwise equal results.

Elementwise optimizers can update some parameters now and others later. Their settings are those at
the time of `optimizer.step`, because schedulers may change the learning rate before the last
parameter is updated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.distributed.optimizers import ELEMENTWISE

# Optimizers that update each parameter independently.
_SEPARABLE = frozenset({
    *ELEMENTWISE, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor
})  # fmt: skip
Settings = list[dict[str, Any]]


class Updates:
    """Parts of an optimizer's step.

    Raises:
        InvalidArgumentError: the optimizer evaluates the model itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InvalidArgumentError(
                "optimizer", "is LBFGS, which evaluates the model several times per step",
                remedy="use another optimizer, or DistributedDataParallel",
            )  # fmt: skip
        self.optimizer = optimizer
        # The class's method: the instance's may be replaced by PriorityDDP or a scheduler.
        self._step = functools.partial(type(optimizer).step, optimizer)

    @property
    def separable(self) -> bool:
        """Whether sequential partial updates equal a whole step."""
        hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        return type(self.optimizer) in _SEPARABLE and not any(hooks)

    def settings(self) -> Settings:
        """Return a copy of the current settings, such as learning rates, of all groups."""
        return [
            {k: _copied(v) for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def apply(
        self,
        settings: Settings,
        gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor | None]],
    ) -> None:
        """Update parameters with gradients; those that are not the optimizer's are skipped."""
        by_id = {id(parameter): (parameter, gradient) for parameter, gradient in gradients}
        whole = self.optimizer.param_groups
        part: Settings = []
        for group, current in zip(whole, settings, strict=True):
            members = [parameter for parameter in group["params"] if id(parameter) in by_id]
            if members:
                part.append({**current, "params": members})
        if not part:
            return
        before = [(parameter, parameter.grad) for parameter, _ in by_id.values()]
        self.optimizer.param_groups = part
        try:
            for parameter, gradient in by_id.values():
                parameter.grad = gradient
            self._step()
        finally:
            self.optimizer.param_groups = whole
            for parameter, gradient in before:
                parameter.grad = gradient

    def whole(self) -> None:
        self._step()

    def unexchanged(self, exchanged: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return parameters with a gradient that are not in `exchanged`."""
        ids = {id(parameter) for parameter in exchanged}
        groups = self.optimizer.param_groups
        return [
            parameter
            for group in groups
            for parameter in group["params"]
            if id(parameter) not in ids and parameter.grad is not None
        ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
