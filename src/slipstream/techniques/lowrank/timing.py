"""Micro-benchmark of ``slipstream::lowrank``, a layer that is timed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.graph import Call

OP = "slipstream::lowrank()"


def lstm_call(shape: Sequence[int], hidden: int, ranks: Sequence[int], backward: bool) -> Call:
    """Return the call of an LSTM layer in one direction.

    Args:
        shape: shape of its input, [time, batch, d].
        ranks: ranks of the input matrices and of the recurrent ones.
        backward: whether to time the backward pass, with gradients of the input and parameters.
    """
    return Call(OP, (tuple(shape), hidden, tuple(ranks), backward))


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the layer on random numbers."""
    import torch
    from torch import nn

    from slipstream.techniques.lowrank.nn import LowRankLSTM

    shape, hidden, ranks, backward = call.arguments
    dense = nn.LSTM(shape[2], hidden)
    layer = LowRankLSTM(dense, 1)
    for side, rank, width in (("ih", ranks[0], shape[2]), ("hh", ranks[1], hidden)):
        for name, size in ((f"a_{side}_l0", (4, rank, width)), (f"b_{side}_l0", (4, hidden, rank))):
            layer.register_parameter(name, nn.Parameter(torch.randn(size) / rank**0.5))
    x = torch.randn(tuple(shape), requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            states: torch.Tensor = layer(x)[0]
        return states

    if not backward:
        return forward
    output = forward()
    gradient, sources = torch.ones_like(output), [x, *layer.parameters()]
    return lambda: torch.autograd.grad(output, sources, gradient, retain_graph=True)
