"""Micro-benchmark of ``slipstream::side_by_side``: a pair interleaved or sequential."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from slipstream.durations import Durations
from slipstream.graph import Call

MAX_RATIO = 0.98
"""Maximum ratio of interleaved to sequential time at which a pair is interleaved."""
_MAX_BYTES = 96 << 20


def pair_call(
    kind: str, rows: int, outputs: int, inputs: int, needs_input: bool, count: int, trained: int,
    together: bool,
) -> Call:  # fmt: skip
    """Return the call of a linear layer, forward and backward, and an update of `count` parameters.

    Args:
        kind: see `slipstream.techniques.side_by_side.updates.update_kind`.
        needs_input: whether the gradient of the layer's input is required.
        trained: number of parameters of the optimizer, which determines what caches hold.
        together: whether both are interleaved; otherwise torch runs them sequentially.
    """
    from slipstream.techniques.side_by_side.kernels import version

    shape = kind, rows, outputs, inputs, needs_input, count, trained, together
    return Call(f"slipstream::side_by_side({version()})", shape, ())


def timer(call: Call) -> Callable[[], object]:
    """Return a function that runs the pair as in a step, with different weights each time."""
    import torch

    from slipstream.techniques.side_by_side.nn import interleave_updates
    from slipstream.techniques.side_by_side.updates import fused_step

    kind, rows, outputs, inputs, needs_input, count, trained, together = call.arguments
    x, dy = torch.randn(rows, inputs, requires_grad=needs_input), torch.randn(rows, outputs)
    variant_count = min(4 * 4 * trained, _MAX_BYTES) // (4 * (4 * count + outputs * inputs))
    variants = []
    for _ in range(max(1, min(variant_count, 64))):
        owner = torch.nn.Parameter(torch.randn(count))
        owner.grad = torch.full_like(owner, 1e-3)
        optimizer_class = getattr(torch.optim, "SGD" if kind == "Descent" else kind)
        settings = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = optimizer_class([owner], lr=1e-3, fused=True, **settings)
        optimizer.step()
        layer = torch.nn.Linear(inputs, outputs)
        variants.append(
            (interleave_updates([layer] if together else [], optimizer), owner, layer, optimizer)
        )
    following = itertools.cycle(variants)

    def run() -> None:
        updates, owner, layer, optimizer = next(following)
        x.grad = layer.weight.grad = None
        updates.enqueue(owner)
        with torch.enable_grad():
            layer(x).backward(dy)
        if not together:
            fused_step(optimizer, owner)
        updates.finish_step()

    return run


@functools.cache
def is_faster(
    kind: str, rows: int, outputs: int, inputs: int, needs_input: bool, count: int, trained: int
) -> bool:
    """Whether a pair is faster interleaved, measured once per machine."""
    import torch

    durations = Durations(torch.get_num_threads())
    shape = kind, rows, outputs, inputs, needs_input, count, trained
    calls = pair_call(*shape, together=False), pair_call(*shape, together=True)
    durations.measure(calls)
    ratio = durations.ratio(*calls)
    return ratio is not None and ratio.value <= MAX_RATIO
