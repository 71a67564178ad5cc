"""Which of the user's modules call a function themselves, and with what they are called."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "torch.nn."


@dataclass(frozen=True)
class Site:
    """A module and what its forward was called with first, by the parameters' names."""

    name: str
    module: Any
    arguments: dict[str, Any]


def callers(
    model: Any, run: Callable[[], object], functions: tuple[str, ...], kinds: tuple[type, ...] = ()
) -> list[Site]:
    """The innermost modules in whose forward a function of these names is called.

    Torch's own layers count as functions of the module around them; those of a class in `kinds`
    are sites themselves, whatever they call.

    Args:
        model: an ``nn.Module``.
        run: runs a forward pass of it.

    Raises:
        whatever `run` raises.
    """
    from torch.overrides import TorchFunctionMode

    names = {id(module): name for name, module in model.named_modules()}
    open_: list[tuple[Any, dict[str, Any]]] = []
    sites: dict[int, Site] = {}

    def note(module: Any, arguments: dict[str, Any]) -> None:
        sites.setdefault(id(module), Site(names[id(module)], module, arguments))

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

    watched = [m for m in model.modules() if type(m) in kinds or not _of_library(m)]
    with contextlib.ExitStack() as hooks:
        for module in watched:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, always_call=True))
        with Watch():
            run()
    return list(sites.values())


def _of_library(module: Any) -> bool:
    return type(module).__module__.startswith(_LIBRARY)
