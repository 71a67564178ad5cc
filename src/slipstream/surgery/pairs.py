"""Find consecutive modules: one whose output only the other reads."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Attributes and methods that do not read a tensor's values.
_HARMLESS = frozenset(
    ["shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf"]
)
_HARMLESS_CALLS = frozenset(["size", "dim", "numel", "stride", "ndimension", "is_floating_point"])


@dataclass(frozen=True)
class Pair:
    """Two consecutive modules.

    Attributes:
        first, second: qualified names, the first one of modules with several.
    """

    first: str
    second: str


def consecutive_pairs(
    model: Any, run: Callable[[], object], first: tuple[type, ...], second: tuple[type, ...]
) -> list[Pair]:
    """Return pairs in which only a module of class `second` reads the output of one in `first`.

    They are found by a forward pass with hooks. Both are called exactly once, the second with only
    the first's output, which no function or other module reads before the second overwrites it
    (such as a ReLU in place).

    Args:
        model: an ``nn.Module``.
        run: runs one forward pass of `model`; may do more.
    """
    from torch.overrides import TorchFunctionMode

    names = {id(module): name for name, module in model.named_modules()}
    watched = [m for m in model.modules() if type(m) in (*first, *second)]
    calls: Counter[int] = Counter()
    made_by: dict[int, Any] = {}
    reader_of: dict[int, int] = {}
    # Keeps outputs alive, so that their ids stay unique.
    outputs: list[Any] = []
    uses: Counter[int] = Counter()
    # Outputs that the second module has overwritten: later reads are of its own output.
    written: set[int] = set()
    inside: list[Any] = []

    class Uses(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            harmless = (name == "__get__" and owner in _HARMLESS) or name in _HARMLESS_CALLS
            if not harmless:
                for number in _tensor_ids((args, kwargs or {})):
                    # Reads inside the second module do not count.
                    if number not in written and reader_of.get(number) not in inside:
                        uses[number] += 1
            return func(*args, **(kwargs or {}))

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls[id(module)] += 1
        if type(module) in second and len(args) == 1 and not kwargs and id(args[0]) in made_by:
            reader_of.setdefault(id(args[0]), id(module))
        inside.append(id(module))

    def after(module: Any, args: Any, output: Any) -> None:
        inside.pop()
        if type(module) in second and reader_of.get(id(output)) == id(module):
            written.add(id(output))
        if type(module) in first and hasattr(output, "untyped_storage"):
            outputs.append(output)
            made_by[id(output)] = module
            # Earlier reads of this id were of another tensor, since freed.
            uses.pop(id(output), None)
            reader_of.pop(id(output), None)
            written.discard(id(output))

    with contextlib.ExitStack() as hooks:
        for module in watched:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        with Uses():
            run()
    return [
        Pair(names[id(made_by[output])], names[module])
        for output, module in reader_of.items()
        if calls[id(made_by[output])] == calls[module] == 1 and not uses[output]
    ]


def _tensor_ids(values: Any) -> list[int]:
    from torch.utils._pytree import tree_leaves

    return [id(leaf) for leaf in tree_leaves(values) if hasattr(leaf, "untyped_storage")]


def place(model: Any, name: str, module: Any) -> None:
    """Replace the module `name`, and all other references to the same object in the model."""
    old = model.get_submodule(name)
    for holder in list(model.modules()):
        for key, child in list(holder._modules.items()):
            if child is old:
                setattr(holder, key, module)
