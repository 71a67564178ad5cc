"""What the micro-benchmark runs for ``slipstream::side_by_side``: a pair in one loop or in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from slipstream.durations import Durations
from slipstream.graph import Call

MOST = 0.98
"""A pair becomes one loop only where that takes at most this share of both in turn."""
_MOST_BYTES = 96 << 20


def pair_call(
    kind: str, rows: int, outputs: int, inputs: int, wants_input: bool, count: int, trained: int,
    together: bool,
) -> Call:  # fmt: skip
    """A linear layer forward and backward, and a fused optimizer's step of `count` numbers.

    Args:
        kind: see `slipstream.techniques.side_by_side.updates.form`.
        wants_input: whether the gradient of the layer's input is wanted.
        trained: how many numbers the optimizer has, which tells how far away they are.
        together: in one loop, else in turn, by torch.
    """
    from slipstream.techniques.side_by_side.kernels import version

    shape = kind, rows, outputs, inputs, wants_input, count, trained, together
    return Call(f"slipstream::side_by_side({version()})", shape, ())


def timer(call: Call) -> Callable[[], object]:
    """The pair as a function of nothing, as a step runs it: other weights each time."""
    import torch

    from slipstream.techniques.side_by_side.nn import put_beside
    from slipstream.techniques.side_by_side.updates import fused_step

    kind, rows, outputs, inputs, wants_input, count, trained, together = call.arguments
    x, dy = torch.randn(rows, inputs, requires_grad=wants_input), torch.randn(rows, outputs)
    sets = min(4 * 4 * trained, _MOST_BYTES) // (4 * (4 * count + outputs * inputs))
    turns = []
    for _ in range(max(1, min(sets, 64))):
        owner = torch.nn.Parameter(torch.randn(count))
        owner.grad = torch.full_like(owner, 1e-3)
        make = getattr(torch.optim, "SGD" if kind == "Descent" else kind)
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = make([owner], lr=1e-3, fused=True, **more)
        optimizer.step()
        layer = torch.nn.Linear(inputs, outputs)
        turns.append((put_beside([layer] if together else [], optimizer), owner, layer, optimizer))
    following = itertools.cycle(turns)

    def run() -> None:
        beside, owner, layer, optimizer = next(following)
        x.grad = layer.weight.grad = None
        beside.owe(owner)
        with torch.enable_grad():
            layer(x).backward(dy)
        if not together:
            fused_step(optimizer, owner)
        beside.settle()

    return run


@functools.cache
def pays(
    kind: str, rows: int, outputs: int, inputs: int, wants_input: bool, count: int, trained: int
) -> bool:
    """Whether a pair is faster in one loop, as measured here, once a machine."""
    import torch

    durations = Durations(torch.get_num_threads())
    shape = kind, rows, outputs, inputs, wants_input, count, trained
    calls = pair_call(*shape, together=False), pair_call(*shape, together=True)
    durations.measure(calls)
    ratio = durations.ratio(*calls)
    return ratio is not None and ratio.value <= MOST
