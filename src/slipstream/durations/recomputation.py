"""What checkpointing a block costs beside running it again. Runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHECKPOINT = "slipstream::checkpointed_block"
# Each saves one tensor. Hooks between calls of one operator on one number would find all their code
# and data in the processor's first cache. In a real block they do not, and cost half as much again:
# so there are many operators, on tensors that fill that cache.
OPERATORS = (
    "sin", "exp", "tanh", "square", "cos", "sqrt", "sigmoid", "log1p", "atan", "expm1", "erf",
    "rsqrt", "asinh", "abs", "sinh", "relu", "reciprocal",
)  # fmt: skip
_NUMBERS = 8192
# The first block that runs again, and the first of a forward pass, are colder than those after.
_BLOCKS = 4
_REPEATS = 3


def checkpoint_overhead(saved: int, clock: Callable[[], int]) -> Callable[[], float]:
    """A function that returns the ns a block spends on hooks, several for each of `saved` tensors,
    on the state of the random generator, and on stopping.

    It is the time of steps through a stack of blocks of `saved` small operators with checkpointing,
    less that of the same steps without and of one more forward pass. The garbage collector runs as
    it does in a user's steps. As a difference it errs to both sides: of several, take the median.
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
            # In turn: a machine that grows slower meanwhile slows all three.
            turns = [(timed(checkpointed), timed(plain), timed(forward)) for _ in range(_REPEATS)]
        whole, without, again = (min(times) for times in zip(*turns, strict=True))
        return float(max(whole - without - again, 0)) / _BLOCKS

    sample()
    return sample
