"""What every function of the room refuses."""

from __future__ import annotations

from typing import Any

from slipstream.errors import InvalidArgumentError


def real_numbers(argument: str, tensor: Any) -> Any:
    """`tensor` in float32 and without gradient, if it is not empty and all its numbers are finite.

    Raises:
        InvalidArgumentError: it is something else; names the argument.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if not tensor.is_floating_point():
        raise InvalidArgumentError(
            argument, f"has dtype {tensor.dtype}", remedy="give floating-point numbers"
        )
    if not tensor.numel():
        raise InvalidArgumentError(argument, f"is empty: its shape is {tuple(tensor.shape)}")
    if not bool(tensor.isfinite().all()):
        kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
        raise InvalidArgumentError(
            argument, f"holds {kind}", remedy="find where it comes from before quantising"
        )
    return tensor.detach().float()
