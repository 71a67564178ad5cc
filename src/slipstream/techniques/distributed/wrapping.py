"""What optimizers around another one have in common: they share its groups and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from slipstream.errors import UsageError

_T = TypeVar("_T")


class WrappingOptimizer(torch.optim.Optimizer):
    """Base of an optimizer whose step is another's, and what ranks exchange before or after it.

    Attributes:
        optimizer: the one inside. Groups and state are its own, so that schedulers change its
            learning rate.
    """

    # A GradScaler then leaves unscaling and skipping to `step`, which all ranks have to reach.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._has_all = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._has_all = True
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after the start: ranks would have to agree again."""
        if self._has_all:
            raise UsageError(
                f"{type(self).__name__} takes no more parameters",
                remedy="wrap the optimizer last",
            )
        super().add_param_group(param_group)

    def _share(self) -> None:
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo a GradScaler's scale, where one calls, before ranks' gradients meet."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.dtype))


def loss_of(closure: Callable[[], _T] | None) -> _T | None:
    """What a closure returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
