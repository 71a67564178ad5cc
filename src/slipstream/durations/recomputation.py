"""Overhead of checkpointing a block in addition to recomputation. Runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHECKPOINT = "slipstream::checkpointed_block"
# Each saves one tensor. Between calls of one operator on one number, hooks would find their code
# and data in the first-level cache. In a real block they do not, and cost 50 % more, so there are
# many operators, on tensors that fill that cache.
OPERATORS = (
    "sin", "exp", "tanh", "square", "cos", "sqrt", "sigmoid", "log1p", "atan", "expm1", "erf",
    "rsqrt", "asinh", "abs", "sinh", "relu", "reciprocal",
)  # fmt: skip
_NUMBERS = 8192
# The first recomputed block and the first of a forward pass are colder than the later ones.
_BLOCKS = 4
_REPEATS = 3


def checkpoint_overhead(saved: int, clock: Callable[[], int]) -> Callable[[], float]:
    """Return a function that measures a checkpointed block's overhead in ns.

    This is the time for hooks of `saved` tensors, the state of the random generator, and stopping:
    the time of steps through blocks of `saved` small operators with checkpointing, less that of the
    same steps without and of one more forward pass. The garbage collector runs as in a user's step.
    Errors of the difference have both signs, so take the median of several.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    start: Any = torch.full((_NUMBERS,), 0.5, requires_grad=True)
    gradient = torch.full_like(start, 0.5)
    operators = [getattr(torch, OPERATORS[i % len(OPERATORS)]) for i in range(saved)]

    def block(x: Any) -> Any:
        for operator in operators:
            x = operator(x)
        return x

    def checkpointed() -> None:
        x: Any = start
        for _ in range(_BLOCKS):
            x = checkpoint(block, x, use_reentrant=False)
        x.backward(gradient)

    def forward() -> Any:
        x = start
        for _ in range(_BLOCKS):
            x = block(x)
        return x

    def plain() -> None:
        forward().backward(gradient)

    def timed(work: Callable[[], Any]) -> int:
        begin = clock()
        work()
        return clock() - begin

    def sample() -> float:
        with torch.enable_grad():
            # Interleaved, so that a drift of the machine's speed affects all three.
            rounds = [(timed(checkpointed), timed(plain), timed(forward)) for _ in range(_REPEATS)]
        whole, without, again = (min(times) for times in zip(*rounds, strict=True))
        return float(max(whole - without - again, 0)) / _BLOCKS

    sample()
    return sample
