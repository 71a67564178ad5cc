"""Make each evaluation of LBFGS's closure one step.

One call of ``LBFGS.step`` evaluates its closure up to ``max_eval`` times, on one batch. Scripts
that solve differential equations allow tens of thousands, and some call ``step`` once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Evaluations:
    """The evaluations of closures by `torch.optim.LBFGS`, which run the hooks of a step.

    Attributes:
        after: called after an evaluation and the update that follows it, outside of torch's
            annotation of the update.
    """

    def __init__(self) -> None:
        self.after: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None

    def watch(self) -> None:
        """Replace ``step`` of the class, until the process ends."""
        from torch.optim import LBFGS

        hooked: Any = LBFGS.step
        original = hooked.__wrapped__ if hasattr(hooked, "hooked") else hooked

        @functools.wraps(original)
        def step(optimizer: LBFGS, closure: Callable[[], Any]) -> Any:
            return self._step(original, optimizer, closure)

        # For torch, which adds the hooks of a step to classes without them.
        step.hooked = True  # type: ignore[attr-defined]
        LBFGS.step = step  # type: ignore[method-assign]

    def _step(self, original: Any, optimizer: torch.optim.LBFGS, closure: Callable[[], Any]) -> Any:
        update = contextlib.ExitStack()
        evaluated = False

        def evaluate() -> Any:
            nonlocal evaluated
            if evaluated:
                update.close()
                self.after(optimizer)
            result = closure()
            evaluated = True
            update.enter_context(_hooks_of_step(optimizer))
            return result

        with update:
            result = original(optimizer, evaluate)
        self.after(optimizer)
        return result


def evaluates(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether `Evaluations` watches `optimizer`."""
    from torch.optim import LBFGS

    return getattr(type(optimizer), "step", None) is LBFGS.step


@contextlib.contextmanager
def _hooks_of_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Annotate an update as torch does, and run the hooks before and after it."""
    import torch
    from torch.optim import optimizer as hooks

    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        before = hooks._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
        for hook in (hook for registered in before for hook in list(registered.values())):
            hook(optimizer, (optimizer,), {})
        yield
        after = optimizer._optimizer_step_post_hooks, hooks._global_optimizer_post_hooks
        for hook in (hook for registered in after for hook in list(registered.values())):
            hook(optimizer, (optimizer,), {})
