"""Micro-benchmarks of packed attention and of the fused LAMB update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.graph import Call, TensorSpec

_ATTENTION, _LAMB = "slipstream::packed_attention()", "slipstream::fused_lamb()"


def attention_call(lengths: Sequence[int], call: Call, backward: bool) -> Call:
    """Return the call to time a pass of packed attention.

    Args:
        call: the recorded operator on packed tensors, the first of them [1, heads, n, width].
    """
    return Call(_ATTENTION, (tuple(lengths), backward, *call.inputs), call.outputs)


def attention_timer(call: Call) -> Callable[[], object]:
    """Return a function that runs one pass of attention over sequences of the given lengths."""
    import torch

    from slipstream.techniques.pretraining.hooks import packed_attention

    lengths, backward, query = call.arguments[:3]
    _, heads, n, width = query.shape
    shape, kind = (1, n, heads, width), getattr(torch, query.dtype)
    sources = [torch.randn(shape, dtype=kind, requires_grad=True) for _ in range(3)]

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            q, k, v = (x.transpose(1, 2) for x in sources)
            return packed_attention(lengths, q, k, v)

    if not backward:
        return forward
    output = forward()
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, sources, gradient, retain_graph=True)


def lamb_call(specs: Sequence[TensorSpec]) -> Call:
    """Return the call to time one update of tensors of these specs."""
    return Call(_LAMB, (tuple(specs),))


def lamb_timer(call: Call) -> Callable[[], object]:
    """Return a function that runs one update."""
    import torch

    from slipstream.techniques.pretraining.lamb import FusedLAMB

    parameters = []
    for spec in call.arguments[0]:
        value = torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))
        parameter = torch.nn.Parameter(value.normal_())
        parameter.grad = torch.full_like(parameter, 1e-3)
        parameters.append(parameter)
    return FusedLAMB(parameters).step
