"""Micro-benchmark of ``slipstream::scan``: a layer's pass, including Python overhead."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.graph import Call, TensorSpec
from slipstream.native import build

OP = "slipstream::scan"


def layer_call(
    kind: str, steps: int, batch: int, inputs: int, hidden: int, dtype: str, backward: bool,
    training: bool,
) -> Call:  # fmt: skip
    """Return the call to time a layer's pass by its fastest way, for `slipstream.durations`.

    Args:
        kind: ``tanh``, ``relu``, ``gru`` or ``lstm``.
        dtype: ``float32`` or ``float64``.
        backward: whether to time the backward pass instead of the forward pass.
        training: whether the forward pass saves tensors for the backward pass.
    """
    x = TensorSpec(dtype, (steps, batch, inputs), (batch * inputs, inputs, 1))
    return Call(f"{OP}({build()[:12] or 'python'})", (kind, hidden, x, backward, training), ())


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the pass on random values."""
    import torch

    from slipstream.techniques.scan.nn import rnn
    from slipstream.techniques.scan.plan import Shape, layer

    kind, hidden, spec, backward, training = call.arguments
    steps, batch, inputs = spec.shape
    dtype = getattr(torch, spec.dtype)
    shape = Shape(kind, batch, inputs, hidden, dtype, training, torch.get_num_threads())
    module = layer(shape)
    x = torch.randn(steps, batch, inputs, dtype=dtype)

    def forward() -> torch.Tensor:
        with torch.set_grad_enabled(training):
            output: torch.Tensor = rnn(module, x)[0]
            return output

    if not backward:
        return forward
    y, parameters = forward(), list(module.parameters())
    gradient = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, parameters, gradient, retain_graph=True)
