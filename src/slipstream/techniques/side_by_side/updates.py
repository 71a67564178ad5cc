"""An optimizer's step of one parameter as a memory-bound loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.techniques.side_by_side.kernels import Loop

KINDS = ("Adam", "AdamW", "SGD")
_UNSUPPORTED = ("amsgrad", "dampening", "differentiable", "maximize", "nesterov")


def why_no_loop(kind: str, settings: Mapping[str, Any]) -> str | None:
    """Return why there is no loop for an optimizer's step; None if there is one."""
    if kind not in KINDS:
        return f"updates of {kind} are not supported, only those of {', '.join(KINDS)}"
    unsupported = next((name for name in _UNSUPPORTED if settings.get(name)), None)
    return f"updates of {kind} with {unsupported} are not supported" if unsupported else None


def update_kind(kind: str, settings: Mapping[str, Any]) -> str:
    """Return the kind that identifies durations: the class, or ``Descent`` without momentum."""
    return "Descent" if kind == "SGD" and not settings.get("momentum") else kind


def fits_update(parameter: torch.Tensor) -> bool:
    """Whether a parameter consists of whole cache lines of float32 on the CPU."""
    supported = parameter.dtype is torch.float32 and parameter.is_cpu and parameter.is_contiguous()
    return supported and parameter.numel() % 16 == 0


class Update:
    """The pending update of a parameter whose gradient is complete.

    It uses the optimizer's state, which it creates and counts on as torch does.
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
            step = float(state["step"])
            decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get(
                "decoupled_weight_decay"
            )
            arrays += [state["exp_avg"], state["exp_avg_sq"]]
            settings = [
                rate / (1 - first**step), first, second, group["eps"],
                0.0 if decoupled else decay, rate * decay if decoupled else 0.0,
                math.sqrt(1 - second**step),
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
        self._arrays = [None if array is None else array.view(-1) for array in arrays]
        self._settings = torch.tensor(settings)
        self.parameter = parameter
        self.count = parameter.numel()

    def part(self, begin: int, end: int) -> Loop:
        """Return the loop over elements `begin` to `end`, multiples of 16."""
        arrays = [None if array is None else array[begin:end] for array in self._arrays]
        return Loop(self._kind, (*arrays, self._settings), (end - begin,))


def fused_step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Run the kernel of a fused ``optimizer.step()`` for a parameter with state."""
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
