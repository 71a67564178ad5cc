"""Optimizers whose steps exchange something between ranks: what they share, and what they need."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.wire import DTYPES

_T = TypeVar("_T")
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
)  # fmt: skip
"""Optimizers that look at one number at a time, so that a slice is updated as the whole would be.
Subclasses may not be."""
EXCHANGES = "slipstream_exchanges"
"""Attribute of an optimizer whose steps exchange something between ranks already: how it does."""


def need_optimizer(optimizer: Any) -> None:
    """Raise unless it is an optimizer whose step is this rank's own.

    Raises:
        InvalidArgumentError: it is no optimizer.
        UsageError: its steps exchange something already; to combine what is combined would go
            unnoticed, for it changes little but the time.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "optimizer", f"is a {type(optimizer).__name__}", remedy="a torch.optim.Optimizer"
        )
    how = getattr(optimizer, EXCHANGES, None)
    if how is not None:
        raise UsageError(
            f"the optimizer {how} already",
            remedy="one of AdasumOptimizer, PriorityDDP and ShardedUpdate, around a plain one",
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What takes a gradient, in the order of the optimizer's groups.

    Raises:
        InvalidArgumentError: there is none, or one that is not floating on a processor.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for number, parameter in enumerate(trained):
        if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"optimizer.parameters[{number}]",
                f"it is {parameter.dtype} on {parameter.device}",
                remedy="dense floating parameters on a processor",
            )
    if not trained:
        raise InvalidArgumentError("optimizer", "it has no parameter that takes a gradient")
    return trained


def fingerprint(parameters: list[torch.Tensor]) -> str:
    """The same for parameters that are equal to the bit."""
    digest = hashlib.sha256()
    for parameter in parameters:
        plain = parameter.detach().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()[:16]


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
