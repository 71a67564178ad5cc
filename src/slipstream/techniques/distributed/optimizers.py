"""Common base and checks of optimizers that communicate between ranks in their step."""

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
"""Elementwise optimizers, which update a slice exactly like the whole; subclasses may not."""
EXCHANGES = "slipstream_exchanges"
"""Attribute of an optimizer that communicates in its step: a phrase for messages."""


def need_optimizer(optimizer: Any) -> None:
    """Raise unless `optimizer` is an optimizer whose step does not communicate.

    Raises:
        InvalidArgumentError: it is not an optimizer.
        UsageError: its step already communicates; combining twice would go unnoticed, because
            little but the time changes.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "optimizer", f"is a {type(optimizer).__name__}", remedy="pass a torch.optim.Optimizer"
        )
    how = getattr(optimizer, EXCHANGES, None)
    if how is not None:
        raise UsageError(
            f"the optimizer {how} already",
            remedy="use only one of AdasumOptimizer, PriorityDDP and ShardedUpdate",
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the trainable parameters, in the order of the optimizer's groups.

    Raises:
        InvalidArgumentError: there is none, or one is not floating-point on CPU.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for number, parameter in enumerate(trained):
        if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"optimizer.parameters[{number}]",
                f"it is {parameter.dtype} on {parameter.device}",
                remedy="pass dense floating-point parameters on CPU",
            )
    if not trained:
        raise InvalidArgumentError("optimizer", "it has no parameter with requires_grad=True")
    return trained


def fingerprint(parameters: list[torch.Tensor]) -> str:
    """Return a digest that is equal for bitwise equal parameters."""
    digest = hashlib.sha256()
    for parameter in parameters:
        raw = parameter.detach().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:16]


class WrappingOptimizer(torch.optim.Optimizer):
    """Base of optimizers that wrap another one and communicate before or after its step.

    Attributes:
        optimizer: the wrapped optimizer. Groups and state are shared with it, so that schedulers
            change its learning rate.
    """

    # Makes a GradScaler leave unscaling and skipping to `step`, which all ranks must reach.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._has_all = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._has_all = True
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise after construction, because ranks have already agreed on the parameters."""
        if self._has_all:
            raise UsageError(
                f"{type(self).__name__} accepts no more parameters",
                remedy="add all parameter groups before wrapping the optimizer",
            )
        super().add_param_group(param_group)

    def _share(self) -> None:
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo the scale of a GradScaler, if one calls, before gradients are exchanged."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.dtype))


def loss_of(closure: Callable[[], _T] | None) -> _T | None:
    """Return the loss of a closure, run with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
