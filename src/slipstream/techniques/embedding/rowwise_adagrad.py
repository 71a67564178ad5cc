"""Adagrad with one sum for each row: what embedding tables are often trained with.

Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011; one number a row as in
FBGEMM's and TorchRec's ``EXACT_ROWWISE_ADAGRAD``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError


class RowwiseAdagrad(torch.optim.Optimizer):
    """Each row of a parameter, its first dimension, is divided by the root of one running sum.

    The sum is of the mean squares of a row's gradients; a slice of a core is a row.

    Args:
        params: parameters, or groups of them.
        lr: the step size.
        eps: added to the root.

    Raises:
        InvalidArgumentError: `lr` or `eps` is negative.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, eps: float = 1e-10) -> None:
        for name, value in (("lr", lr), ("eps", eps)):
            if not value >= 0:
                raise InvalidArgumentError(name, f"{value} is negative")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; `closure` is called first, with gradients, where it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        rows = parameter.grad.flatten(1)
        state = self.state[parameter]
        if not state:
            state["sum"] = rows.new_zeros(len(rows))
        state["sum"] += rows.square().mean(1)
        steps = group["lr"] / (state["sum"].sqrt() + group["eps"])
        parameter.sub_(parameter.grad * steps.view(-1, *[1] * (parameter.dim() - 1)))
