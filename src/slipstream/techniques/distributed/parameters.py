"""What of a training can be exchanged: optimizers, their parameters and gradients, their start."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.wire import DTYPES

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
    found = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for number, parameter in enumerate(found):
        if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"optimizer.parameters[{number}]",
                f"it is {parameter.dtype} on {parameter.device}",
                remedy="dense floating parameters on a processor",
            )
    if not found:
        raise InvalidArgumentError("optimizer", "it has no parameter that takes a gradient")
    return found


def fingerprint(parameters: list[torch.Tensor]) -> str:
    """The same for parameters that are equal to the bit."""
    digest = hashlib.sha256()
    for parameter in parameters:
        plain = parameter.detach().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()[:16]
