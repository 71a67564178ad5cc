"""Annotate every module's forward with its name, and find the user's line behind it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from slipstream.graph import MODULE_RANGE, StepPhase

if TYPE_CHECKING:
    import torch

    from slipstream.workload.lines import Chain, UserLines

PREFIX = MODULE_RANGE
ROOT = "model"
UPDATE = "Optimizer.step#"
"""Prefix of torch's annotations of ``Optimizer.step``."""


class ModuleNames:
    """Context manager that annotates every module's forward as ``module::NAME``.

    NAME is the qualified name under `model` (the root is ``model``), or the class for modules
    outside of it, such as a loss.

    Attributes:
        sources: The user's ``file.py:line`` that first called a module, else that created it, by
            NAME.
        update, backward: The user's line that first called the optimizer, and the backward pass;
            empty if no user code did.
        inference_mode: Whether a module ran under ``torch.inference_mode``.
        autocast: Dtype of the autocast that a module ran under, such as ``bfloat16``; else empty.
        calls: By NAME, for each call of a module in order, how often it called itself directly.
    """

    def __init__(self, model: torch.nn.Module | None, lines: UserLines | None = None) -> None:
        self._lines = lines
        self._names: dict[int, str] = {}
        if model is not None:
            for name, module in model.named_modules():
                self._names[id(module)] = f"{ROOT}.{name}" if name else ROOT
        self._open: list[Any] = []
        self._hooks: list[Any] = []
        self._torch_backward: Any = None
        # A single object, since torch.compile recompiles for another.
        self._watching = self._watched_backward
        self.sources: dict[str, str] = {}
        self.update = ""
        self.backward = ""
        self.inference_mode = False
        self.autocast = ""
        self.calls: dict[str, list[int]] = {}
        self._entered: dict[str, list[int]] = {}

    def __enter__(self) -> ModuleNames:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register = torch.nn.modules.module
        self.calls, self._entered = {}, {}
        self._torch_backward = torch.autograd.backward
        # Torch has no hook for the call of a backward pass.
        torch.autograd.backward = self._watching
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register.register_module_forward_pre_hook(self._before),
            register.register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        torch.autograd.backward = self._torch_backward
        for hook in self._hooks:
            hook.remove()
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _before_update(self, *arguments: object) -> None:
        self.update = self.update or self._user_line()

    def _watched_backward(self, *arguments: Any, **named: Any) -> Any:
        self.backward = self.backward or self._user_line()
        return self._torch_backward(*arguments, **named)

    def line_of(self, module: str, phase: int, scope: str) -> str:
        """Return the user's line behind an operator: its module's, else that of its pass."""
        if line := self.sources.get(module):
            return line
        if phase == StepPhase.BACKWARD:
            return self.backward
        # zero_grad has the same phase, but another caller.
        return self.update if scope.startswith(UPDATE) else ""

    def _user_line(self) -> str:
        """Return the innermost user line behind the caller of the current hook."""
        return "" if self._lines is None else innermost(self._lines.chain(sys._getframe(2)))

    def _maker(self, module: torch.nn.Module) -> str:
        return "" if self._lines is None else innermost(self._lines.made(module))

    def _name(self, module: torch.nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return  # compiled regions contain no modules

        name = self._name(module)
        calls, entered = self.calls.setdefault(name, []), self._entered.setdefault(name, [])
        if entered:
            calls[entered[-1]] += 1
        entered.append(len(calls))
        calls.append(0)
        if name not in self.sources:
            self.sources[name] = self._user_line() or self._maker(module)
        self.inference_mode |= torch.is_inference_mode_enabled()
        self.autocast = self.autocast or _autocast()
        annotation: Any = torch.profiler.record_function(PREFIX + name)
        annotation.__enter__()
        self._open.append((name, annotation))

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return  # first, so that torch.compile guards on nothing of this object

        # Threads end modules in any order, and a region that torch stopped compiling may end one
        # that was never entered.
        name = self._name(module)
        for at in reversed(range(len(self._open))):
            if self._open[at][0] == name:
                self._open.pop(at)[1].__exit__(None, None, None)
                self._entered[name].pop()
                break


def module_classes(model: torch.nn.Module | None) -> dict[str, str]:
    """Return the class of every module by NAME (see `ModuleNames`); empty without a model."""
    if model is None:
        return {}
    return {
        f"{ROOT}.{name}" if name else ROOT: type(module).__name__
        for name, module in model.named_modules()
    }


def _autocast() -> str:
    """Return the dtype of the active autocast, as torch names it; empty without autocast."""
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def innermost(chain: Chain) -> str:
    """Return ``file.py:line`` of the line that made the call; empty if unknown."""
    return str(chain[-1]) if chain else ""
