"""What the first steps tell: which module reads which parameter first, and how long it takes.

Order of registration is not order of use; a module may read another's parameters; a tied parameter
is needed where it is used first. So the first forward pass is watched, function by function.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchFunctionMode):
    def __init__(self, parameters: list[nn.Parameter], root: nn.Module) -> None:
        super().__init__()
        self.unread = {id(one): one for one in parameters}
        self.inside = [root]
        self.first: list[tuple[nn.Parameter, nn.Module]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for one in tree_leaves((args, kwargs)) if self.unread else ():
            if id(one) in self.unread:
                self.first.append((self.unread.pop(id(one)), self.inside[-1]))
        return func(*args, **kwargs)


@contextmanager
def first_reads(
    root: nn.Module, parameters: list[nn.Parameter]
) -> Iterator[list[tuple[nn.Parameter, nn.Module]]]:
    """While inside: fills a list with (parameter, module in whose forward it is read first)."""
    watch = _Watch(parameters, root)

    def enter(module: nn.Module, _: Any) -> None:
        watch.inside.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        watch.inside.pop()

    modules = list(root.modules())
    hooks: list[Any] = [one.register_forward_pre_hook(enter) for one in modules]
    hooks += [one.register_forward_hook(leave, always_call=True) for one in modules]
    try:
        with watch:
            yield watch.first
    finally:
        for hook in hooks:
            hook.remove()


def places(
    root: nn.Module, parameters: list[nn.Parameter], read: list[tuple[nn.Parameter, nn.Module]]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules in the order in which they first read, each with what it reads first.

    A parameter that was not read in the step is awaited before the root begins.
    """
    of: dict[nn.Module, list[nn.Parameter]] = {}
    known = {id(one) for one, _ in read}
    idle = [one for one in parameters if id(one) not in known]
    if idle:
        of[root] = idle
    for parameter, module in read:
        of.setdefault(module, []).append(parameter)
    return list(of.items())


class Kind(IntEnum):
    """What happens on the training thread."""

    NEEDED = 0
    """The forward pass comes to a unit's place."""
    READY = 1
    """A unit's gradients are complete."""
    END = 2
    """The backward pass and all that follows is over: the next step begins."""


@dataclass
class Clock:
    """When units are needed and ready in a step, without what was waited for the network."""

    _steps: list[list[tuple[Kind, int, float]]] = field(default_factory=list)
    _began: float = 0.0
    _used: list[tuple[float, float]] = field(default_factory=list)
    _used_before: float = 0.0
    _needed: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """A step's forward pass begins; ends the one before."""
        now, used = time.perf_counter(), time.thread_time()
        if self._steps:
            self._steps[-1].append((Kind.END, -1, now - self._began))
            self._used.append((used - self._used_before, now - self._began))
        self._steps.append([])
        self._needed.clear()
        self._began, self._used_before = now, used

    def skip(self, seconds: float) -> None:
        """So much of the step was no computation."""
        self._began += seconds

    def mark(self, kind: Kind, unit: int) -> None:
        """Something happens now; a unit is needed once a step."""
        if kind is Kind.NEEDED:
            if unit in self._needed:
                return
            self._needed.add(unit)
        if self._steps:
            self._steps[-1].append((kind, unit, time.perf_counter() - self._began))

    @property
    def busy(self) -> float:
        """Share of the computation in which this thread used a core; 0 to 1, a median."""
        return min(1.0, statistics.median(used / max(s, 1e-9) for used, s in self._used))

    def segments(self) -> list[tuple[Kind, int, float]]:
        """What ends each stretch of computation, and how many seconds it takes: medians.

        Steps that differ from the last one in what happens when are left out.
        """
        whole = [step for step in self._steps if step and step[-1][0] is Kind.END]
        shape = [event[:2] for event in whole[-1]]
        alike = [step for step in whole if [event[:2] for event in step] == shape]
        taken = [[t for _, _, t in step] for step in alike]
        lengths = [[b - a for a, b in zip([0.0, *t], t, strict=False)] for t in taken]
        middle = [statistics.median(each) for each in zip(*lengths, strict=True)]
        return [(kind, unit, max(s, 0.0)) for (kind, unit), s in zip(shape, middle, strict=True)]


def why_not_plain(model: nn.Module) -> str | None:
    """None, or why modules of a model cannot be waited for one by one."""
    # Where the compiler, which takes seconds to import, has not been, nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and any(isinstance(one, dynamo.OptimizedModule) for one in model.modules()):
        return "is compiled, and nothing can wait inside of it"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "is in DistributedDataParallel already"
    if any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
        return "is scripted, and nothing can wait inside of it"
    return None
