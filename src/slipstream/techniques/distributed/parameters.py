"""An optimizer's parameters: which they are, and whether two ranks start from the same."""

from __future__ import annotations

import hashlib

import torch

from slipstream.errors import InvalidArgumentError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What can be exchanged."""


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
