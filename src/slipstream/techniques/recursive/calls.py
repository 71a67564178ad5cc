"""Compiled calls of the modules of a model that recurse, in place."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.recursive.net import RecursiveNet


def compile_calls(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Compile the calls of modules that call themselves, such as a recursive Tree-LSTM.

    Modules remain the same objects. A call with one node computes all nodes below it in one kernel
    call; the first one compiles. Under autocast and torch.compile, with hooks on one of its
    modules, and on another device, the module runs as it was written.

    Args:
        names: qualified names of the modules; by default `recursive_modules`.

    Returns:
        The names.

    Raises:
        InvalidArgumentError: no module calls itself, or one of `names` is not a module.
    """
    chosen = recursive_modules(model) if names is None else list(names)
    if not chosen:
        raise InvalidArgumentError(
            "model", "none of its modules calls itself",
            remedy="pass a model with a forward(node) that calls itself for the node's children",
        )  # fmt: skip
    modules: dict[str, Any] = dict(model.named_modules())
    for name in chosen:
        if name not in modules:
            raise InvalidArgumentError("names", f"there is no module {name!r}")
        module = modules[name]
        vars(module)["forward"] = CompiledForward(module)
    return chosen


def recursive_modules(model: nn.Module) -> list[str]:
    """Return the qualified names of modules whose class calls ``self(...)`` in a method."""
    return [name for name, module in model.named_modules() if _calls_itself(type(module))]


def _calls_itself(kind: type) -> bool:
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.startswith("torch."):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in ("self", "self.forward", "self.__call__"):
                return True
    return False


class CompiledForward:
    """A module's ``forward`` that computes all nodes below the passed one in one kernel call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.net: RecursiveNet | None = None

    @property
    def written(self) -> Any:
        """The ``forward`` of the module's class."""
        return type(self.module).forward.__get__(self.module)

    def __call__(self, *nodes: Any, **named: Any) -> Any:
        """Return what the module's class returns for a node."""
        if named or len(nodes) != 1 or not self._compiles(nodes[0]):
            return self.written(*nodes, **named)
        if self.net is None:
            self.net = RecursiveNet(self.module)
        roots = self.net(nodes).roots
        return tree_unflatten([state[0] for state in roots], self.net.state_tree)

    def _compiles(self, node: Any) -> bool:
        if (
            isinstance(node, torch.Tensor)
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
        ):
            return False
        parameter = next(self.module.parameters(), None)
        if parameter is None or parameter.device.type != "cpu":
            return False
        if parameter.dtype not in (torch.float32, torch.float64):
            return False
        return not any(
            module._forward_hooks or module._forward_pre_hooks for module in self.module.modules()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return CompiledForward, (self.module,)
