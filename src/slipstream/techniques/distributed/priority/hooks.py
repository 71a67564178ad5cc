"""Hooks of a replica on its model: put on, taken off without a trace, and put on again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.techniques.distributed.priority.layout import Unit
from slipstream.techniques.distributed.priority.rounds import Rounds

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Hooks:
    """What tells `rounds` of gradients, and lets modules wait for units."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._gates: list[tuple[nn.Module, Sequence[Unit]]] = []
        self._on: list[Any] = []

    def put_on(self) -> None:
        """On the parameters, and on the modules that wait."""
        for number, parameter in enumerate(self._rounds.parameters):
            self._on += _on_parameter(parameter, number, self._rounds)
        for module, units in self._gates:
            self._on.append(module.register_forward_pre_hook(_gate_of(self._rounds, units)))

    def wait_at(self, gates: Sequence[tuple[nn.Module, Sequence[Unit]]]) -> None:
        """Let each module wait for these units from now on, before its forward pass."""
        self.take_off()
        self._gates = list(gates)
        self.put_on()

    def take_off(self) -> None:
        """Gradients are nobody's business any more, and nobody waits."""
        for one in self._on:
            one.remove()
        self._on = []
        for parameter in self._rounds.parameters:
            for kind in _KINDS:
                # Autograd takes the interpreter's lock for an empty dictionary as for a full one.
                if not getattr(parameter, kind):
                    setattr(parameter, kind, None)


def _on_parameter(parameter: nn.Parameter, number: int, rounds: Rounds) -> list[Any]:
    def before(_: torch.Tensor) -> None:
        rounds.before_gradient(number)

    def after(_: torch.Tensor) -> None:
        rounds.after_gradient(number)

    tensor: Any = parameter
    return [tensor.register_hook(before), tensor.register_post_accumulate_grad_hook(after)]


def _gate_of(rounds: Rounds, units: Sequence[Unit]) -> Callable[[nn.Module, Any], None]:
    def gate(module: nn.Module, inputs: Any) -> None:
        rounds.gate(units)

    return gate
