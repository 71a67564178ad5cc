"""Annotate closures of ``Optimizer.step`` to separate their work from the update.

``optimizer.step(closure)`` runs the forward and backward pass inside torch's annotation of the
update. Lightning trains every model this way.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.graph import CLOSURE_RANGE


class ClosureWatch:
    """Context manager that annotates and times closures passed to ``Optimizer.step``.

    Attributes:
        wall_ns, cpu_ns: Wall time and CPU time of the thread in closures so far.
    """

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0
        self._hook: Any = None

    def __enter__(self) -> ClosureWatch:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _before_step(
        self, optimizer: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Wrap the closure among the arguments of ``step``; ``args[0]`` is the optimizer."""
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._watched(args[1]), *args[2:]), dict(kwargs)
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._watched(closure)}
        return None

    def _watched(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        @functools.wraps(closure)
        def watched(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                with torch.profiler.record_function(CLOSURE_RANGE):
                    return closure(*args, **kwargs)
            finally:
                self.cpu_ns += time.thread_time_ns() - cpu
                self.wall_ns += time.perf_counter_ns() - wall

        return watched
