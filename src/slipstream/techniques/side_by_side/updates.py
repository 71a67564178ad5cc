"""An optimizer's step of one parameter as a loop that waits for memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.techniques.side_by_side.kernels import Loop

KINDS = ("Adam", "AdamW", "SGD")
_UNKNOWN = ("amsgrad", "dampening", "differentiable", "maximize", "nesterov")


def why_no_loop(kind: str, settings: Mapping[str, Any]) -> str | None:
    """Why an optimizer's step has no loop here; None where it has one."""
    if kind not in KINDS:
        return f"updates of {kind} have no loop here; those of {', '.join(KINDS)} have"
    odd = next((name for name in _UNKNOWN if settings.get(name)), None)
    return f"updates of {kind} with {odd} have no loop here" if odd else None


def form(kind: str, settings: Mapping[str, Any]) -> str:
    """What an update is timed by: the optimizer's class, or ``Descent`` without momentum."""
    return "Descent" if kind == "SGD" and not settings.get("momentum") else kind


def fits_update(parameter: torch.Tensor) -> bool:
    """Whether a parameter is whole cache lines of float32 on the processor."""
    plain = parameter.dtype is torch.float32 and parameter.is_cpu and parameter.is_contiguous()
    return plain and parameter.numel() % 16 == 0


class Update:
    """What an optimizer owes a parameter whose gradient is complete.

    Its state is the optimizer's own, made as torch makes it, and counted on as torch counts.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        arrays: list[torch.Tensor | None] = [parameter.detach(), gradient.detach()]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        if "betas" in group:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            first, second = group["betas"]
            number = float(state["step"])
            apart = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
            arrays += [state["exp_avg"], state["exp_avg_sq"]]
            settings = [
                rate / (1 - first**number), first, second, group["eps"],
                0.0 if apart else decay, rate * decay if apart else 0.0,
                math.sqrt(1 - second**number),
            ]  # fmt: skip
            self._kind = "Adam"
        else:
            momenta = None
            if group["momentum"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momenta = state["momentum_buffer"]
            arrays.append(momenta)
            settings = [rate, group["momentum"], decay]
            self._kind = "Descent"
        self._arrays = [None if one is None else one.view(-1) for one in arrays]
        self._settings = torch.tensor(settings)
        self.parameter = parameter
        self.count = parameter.numel()

    def part(self, begin: int, end: int) -> Loop:
        """The step of numbers `begin` to `end`, multiples of 16."""
        arrays = [None if one is None else one[begin:end] for one in self._arrays]
        return Loop(self._kind, (*arrays, self._settings), (end - begin,))


def fused_step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """What a fused ``optimizer.step()`` runs for one parameter that has its state."""
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    gradient = parameter.grad
    assert gradient is not None
    with torch.no_grad():
        if "betas" in group:
            adam = torch._fused_adamw_ if group["weight_decay"] else torch._fused_adam_
            adam(
                [parameter], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                [state["step"]], lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip
        else:
            momenta = [state["momentum_buffer"]] if group["momentum"] else []
            torch._fused_sgd_(
                [parameter], [gradient], momenta, lr=group["lr"],
                weight_decay=group["weight_decay"], momentum=group["momentum"], dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
