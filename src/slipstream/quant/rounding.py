"""To whole numbers: nearest with ties to even, or up and down at random without bias.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015 (stochastic).
"""

from __future__ import annotations

from typing import Any, Literal

from slipstream.errors import InvalidArgumentError

Rounding = Literal["nearest", "stochastic"]


def round_nearest(values: Any) -> Any:
    """The nearest whole number; of two as near, the even one. Same shape and dtype."""
    return values.round()


def round_stochastic(values: Any, generator: Any = None) -> Any:
    """The whole number below or above, so that the mean over draws is the value itself.

    Args:
        values: float tensor of any shape.
        generator: a ``torch.Generator``, for draws that can be repeated; default: torch's own.
    """
    import torch

    drawn = torch.rand(values.shape, generator=generator, dtype=values.dtype, device=values.device)
    below = values.floor()
    return below + (drawn < values - below)


def rounded(values: Any, how: Rounding, generator: Any = None) -> Any:
    """`values` rounded as `how` says.

    Raises:
        InvalidArgumentError: `how` is neither nearest nor stochastic.
    """
    if how == "nearest":
        return round_nearest(values)
    if how == "stochastic":
        return round_stochastic(values, generator)
    raise InvalidArgumentError("rounding", f"'{how}' is neither nearest nor stochastic")
