"""Modules that belong together: one takes what the other gives, and nobody else does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Asking a tensor these does not use its numbers.
_HARMLESS = frozenset(
    ["shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf"]
)
_HARMLESS_CALLS = frozenset(["size", "dim", "numel", "stride", "ndimension", "is_floating_point"])


@dataclass(frozen=True)
class Pair:
    """Two modules in a row.

    Attributes:
        first, second: qualified names; modules reached under several names have their first.
    """

    first: str
    second: str


def consecutive_pairs(
    model: Any, run: Callable[[], object], first: tuple[type, ...], second: tuple[type, ...]
) -> list[Pair]:
    """Where a module of a class in `second` takes the output of one in `first`, and nobody else.

    Found by running one forward pass with hooks. Both are called exactly once in it, the second
    with nothing but the first's output, which no function and no other module reads; where the
    second writes over it (a ReLU in place), before that.

    Args:
        model: an ``nn.Module``.
        run: runs one forward pass of `model`; it may do more.

    Raises:
        whatever `run` raises.
    """
    from torch.overrides import TorchFunctionMode

    names = {id(module): name for name, module in model.named_modules()}
    watched = [m for m in model.modules() if type(m) in (*first, *second)]
    calls: Counter[int] = Counter()
    made_by: dict[int, Any] = {}
    taken: dict[int, int] = {}
    # Keeps outputs alive, so that no other tensor gets one's id.
    kept: list[Any] = []
    uses: Counter[int] = Counter()
    # Outputs that the second module has written over: who reads one now reads what that made.
    written: set[int] = set()
    inside: list[Any] = []

    class Uses(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            looks = (name == "__get__" and owner in _HARMLESS) or name in _HARMLESS_CALLS
            if not looks:
                for number in _tensor_ids((args, kwargs or {})):
                    # What the second module itself does with its input is its own business.
                    if number not in written and taken.get(number) not in inside:
                        uses[number] += 1
            return func(*args, **(kwargs or {}))

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls[id(module)] += 1
        if type(module) in second and len(args) == 1 and not kwargs and id(args[0]) in made_by:
            taken.setdefault(id(args[0]), id(module))
        inside.append(id(module))

    def after(module: Any, args: Any, output: Any) -> None:
        inside.pop()
        if type(module) in second and taken.get(id(output)) == id(module):
            written.add(id(output))
        if type(module) in first and hasattr(output, "untyped_storage"):
            kept.append(output)
            made_by[id(output)] = module
            # What was read under this id before was another tensor, gone by now.
            uses.pop(id(output), None)
            taken.pop(id(output), None)
            written.discard(id(output))

    with contextlib.ExitStack() as hooks:
        for module in watched:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        with Uses():
            run()
    return [
        Pair(names[id(made_by[output])], names[module])
        for output, module in taken.items()
        if calls[id(made_by[output])] == calls[module] == 1 and not uses[output]
    ]


def _tensor_ids(values: Any) -> list[int]:
    from torch.utils._pytree import tree_leaves

    return [id(leaf) for leaf in tree_leaves(values) if hasattr(leaf, "untyped_storage")]


def place(model: Any, name: str, module: Any) -> None:
    """Put `module` where `name` is, and wherever else the model holds the same object."""
    old = model.get_submodule(name)
    for holder in list(model.modules()):
        for key, child in list(holder._modules.items()):
            if child is old:
                setattr(holder, key, module)
