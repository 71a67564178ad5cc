"""A network of two stages on two hosts, trained by one script.

slipstream control plan examples/control_stages.py:make_program --hosts 2
slipstream control run examples/control_stages.py:make_program --engine local --launches 50
slipstream control trace examples/control_stages.py:make_program -o launch.slipgraph
"""

import torch

from slipstream.engines.controller import REPLICATED, Controller, TracedProgram, compiled

RATE = 0.05


@compiled
def hidden(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the activations of the first stage, [batch, width]."""
    return torch.tanh(inputs @ weight)


@compiled(out=(REPLICATED, REPLICATED, REPLICATED))
def loss_and_update(
    activations: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, the updated weight, and the gradient of the activations."""
    activations = activations.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    loss = torch.nn.functional.mse_loss(activations @ weight, targets)
    gradients = torch.autograd.grad(loss, (activations, weight))
    return loss, weight - RATE * gradients[1], gradients[0]


@compiled
def update(inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the updated weight of the first stage; it computes the activations again."""
    weight = weight.detach().requires_grad_()
    activations = torch.tanh(inputs @ weight)
    return weight - RATE * torch.autograd.grad(activations, weight, gradient)[0]


def make_program(pool: Controller) -> TracedProgram:
    """Place the stages on a device each; the next launch begins with the updated weights."""
    torch.manual_seed(0)
    left, right = pool.slice(1, "left"), pool.slice(1, "right")
    inputs = torch.randn(64, 16)
    with pool.program("two stages") as program:
        x = program.input("inputs", inputs, left)
        y = program.input("targets", inputs.sum(1, keepdim=True).sin(), right)
        first = program.input("first", torch.randn(16, 128) / 4, left)
        second = program.input("second", torch.randn(128, 1) / 12, right)
        loss, new_second, gradient = loss_and_update(hidden(x, first), y, second, on=right)
        program.output("loss", loss)
        program.carry("second", new_second)
        program.carry("first", update(x, first, gradient, on=left))
    return program
