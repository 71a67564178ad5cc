"""Which module runs: names opened around every module's forward, and the user's line behind it."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PREFIX = "module::"
ROOT = "model"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = (os.path.dirname(os.path.abspath(os.__file__)), _PACKAGE)


class ModuleNames:
    """Within it, every module's forward is annotated ``module::NAME``.

    NAME is the qualified name under `model` (the root itself is ``model``), or the class for
    modules that do not belong to it, such as a loss.

    Attributes:
        sources: by NAME: the user's ``file.py:line`` that called it first, as the file's name only.
        inference_mode: whether a module ran under ``torch.inference_mode``.
        autocast: the dtype of the autocast a module ran under, such as ``bfloat16``; else empty.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        if model is not None:
            for name, module in model.named_modules():
                self._names[id(module)] = f"{ROOT}.{name}" if name else ROOT
        self._open: list[Any] = []
        self._hooks: list[Any] = []
        self.sources: dict[str, str] = {}
        self.inference_mode = False
        self.autocast = ""

    def __enter__(self) -> ModuleNames:
        import torch

        register = torch.nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._before),
            register.register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return  # a region that is compiled has no modules inside

        name = self._names.get(id(module), type(module).__name__)
        if name not in self.sources:
            self.sources[name] = _user_line()
        self.inference_mode |= torch.is_inference_mode_enabled()
        self.autocast = self.autocast or _autocast()
        annotation: Any = torch.profiler.record_function(PREFIX + name)
        annotation.__enter__()
        self._open.append(annotation)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        import torch

        if self._open and not torch.compiler.is_compiling():
            self._open.pop().__exit__(None, None, None)


def module_classes(model: torch.nn.Module | None) -> dict[str, str]:
    """The class of every module by the NAME that `ModuleNames` gives it; empty without a model."""
    if model is None:
        return {}
    return {
        f"{ROOT}.{name}" if name else ROOT: type(module).__name__
        for name, module in model.named_modules()
    }


def _autocast() -> str:
    """The dtype of the autocast that is on, as torch names it; empty when none is."""
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def _user_line() -> str:
    """``file.py:line`` of the nearest frame outside torch, the standard library and us."""
    import torch

    libraries = (*_LIBRARY, os.path.dirname(torch.__file__))
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(libraries) and not path.startswith("<"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
