"""A model's forward pass as graphs of the operators that eager mode runs.

torch.compile's tracer finds the graphs, with guards and breaks; each is traced down to operators
when it is first called. A traced graph is run by eager mode, and autograd follows it as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

Change = Callable[[GraphModule], GraphModule | None]
"""Returns a changed copy of a graph of operators, or None to leave it unchanged."""
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "inference_mode")


def _why_opaque(module: GraphModule) -> str | None:
    """Return why a graph of torch.compile cannot be traced down to operators; None if it can."""
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, HigherOrderOperator):
            return f"it calls {name}, whose gradient is not that of its operators"
        if any(mode in name for mode in _MODES):
            return f"it changes the mode of autograd or autocast in the middle ({name})"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "it runs under autocast"
    return None


class TracingBackend:
    """Back end of torch.compile that passes every graph to `change` when it is first called.

    Attributes:
        reasons: why graphs stayed unchanged.
    """

    def __init__(self, change: Change) -> None:
        self._change = change
        self.reasons: list[str] = []

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        chosen: list[Callable[..., Any]] = []

        def run(*arguments: Any) -> Any:
            if not chosen:
                chosen.append(self._changed(module, arguments))
            return chosen[0](*arguments)

        return run

    def _changed(self, module: GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        unchanged: Callable[..., Any] = module.forward
        if (reason := _why_opaque(module)) is not None:
            self.reasons.append(reason)
            return unchanged
        try:
            traced: GraphModule = make_fx(module, tracing_mode="fake")(*arguments)
            traced.graph.eliminate_dead_code()
            traced.recompile()
            changed = self._change(traced)
        except (RuntimeError, NotImplementedError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            self.reasons.append(f"it cannot be traced: {lines[0]}")
            return unchanged
        return unchanged if changed is None else changed.forward
