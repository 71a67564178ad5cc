"""Find the modules that call a function directly, and their arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModuleCall:
    """A module and the arguments of its first forward, by the parameters' names."""

    name: str
    module: Any
    arguments: dict[str, Any]


def callers(
    model: Any, run: Callable[[], object], functions: tuple[str, ...], kinds: tuple[type, ...] = ()
) -> list[ModuleCall]:
    """Return the innermost modules whose forward calls one of `functions`.

    Torch's own layers count as functions of the enclosing module; modules of a class in `kinds` are
    sites themselves, whatever they call.

    Args:
        model: an ``nn.Module``.
        run: runs a forward pass of it.
    """
    from torch.overrides import TorchFunctionMode

    names = {id(module): name for name, module in model.named_modules()}
    open_: list[tuple[Any, dict[str, Any]]] = []
    sites: dict[int, ModuleCall] = {}

    def note(module: Any, arguments: dict[str, Any]) -> None:
        sites.setdefault(id(module), ModuleCall(names[id(module)], module, arguments))

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(func, "__name__", "") in functions and open_:
                note(*open_[-1])
            return func(*args, **(kwargs or {}))

    def before(module: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        open_.append((module, dict(bound.arguments)))
        if type(module) in kinds:
            note(*open_[-1])

    def after(module: Any, args: Any, output: Any) -> None:
        open_.pop()

    watched = [
        m
        for m in model.modules()
        if type(m) in kinds or not type(m).__module__.startswith("torch.nn.")
    ]
    with contextlib.ExitStack() as hooks:
        for module in watched:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, always_call=True))
        with Watch():
            run()
    return list(sites.values())
