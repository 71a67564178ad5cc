"""What checkpointing a block costs beside running it again. Runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHECKPOINT = "slipstream::checkpoint"
_REPEATS = 5


def checkpoint_overhead(saved: int, clock: Callable[[], int]) -> Callable[[], float]:
    """A function that returns the ns a block spends on hooks, one for each of `saved` tensors, on
    the state of the random generator, and on stopping.

    It is the time of a chain of `saved` tiny operators with checkpointing, less that of the chain,
    its backward pass, and the chain once more.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    start = torch.ones(1, requires_grad=True)

    def chain(x: Any) -> Any:
        for _ in range(saved):
            x = x.sin()  # saves its input
        return x

    def checkpointed() -> None:
        checkpoint(chain, start, use_reentrant=False).backward()

    def plain() -> None:
        chain(start).backward()

    def least(work: Callable[[], Any]) -> int:
        times = []
        for _ in range(_REPEATS):
            begin = clock()
            work()
            times.append(clock() - begin)
        return min(times)

    def sample() -> float:
        with torch.enable_grad():
            once = least(lambda: chain(start))
            return float(max(least(checkpointed) - least(plain) - once, 0))

    sample()
    return sample
