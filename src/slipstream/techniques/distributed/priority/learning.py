"""Observation of the first steps: which module first reads which parameter, and timing.

Parameters may be used in another order than registered, by other modules than their owners, and by
several modules if tied. So the first forward pass is traced, function by function.
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


class _ReadTracer(TorchFunctionMode):
    def __init__(self, parameters: list[nn.Parameter], root: nn.Module) -> None:
        super().__init__()
        self.unread = {id(parameter): parameter for parameter in parameters}
        self.inside = [root]
        self.first: list[tuple[nn.Parameter, nn.Module]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)) if self.unread else ():
            if id(value) in self.unread:
                self.first.append((self.unread.pop(id(value)), self.inside[-1]))
        return func(*args, **kwargs)


@contextmanager
def first_reads(
    root: nn.Module, parameters: list[nn.Parameter]
) -> Iterator[list[tuple[nn.Parameter, nn.Module]]]:
    """Collect, within the context, (parameter, module whose forward reads it first)."""
    tracer = _ReadTracer(parameters, root)

    def enter(module: nn.Module, _: Any) -> None:
        tracer.inside.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        tracer.inside.pop()

    modules = list(root.modules())
    hooks: list[Any] = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in modules]
    try:
        with tracer:
            yield tracer.first
    finally:
        for hook in hooks:
            hook.remove()


def places(
    root: nn.Module, parameters: list[nn.Parameter], read: list[tuple[nn.Parameter, nn.Module]]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Group parameters by the module that first reads them, in the order of first reads.

    Parameters that were not read are assigned to the root, and so awaited before its forward.
    """
    by_module: dict[nn.Module, list[nn.Parameter]] = {}
    read_ids = {id(parameter) for parameter, _ in read}
    unread = [parameter for parameter in parameters if id(parameter) not in read_ids]
    if unread:
        by_module[root] = unread
    for parameter, module in read:
        by_module.setdefault(module, []).append(parameter)
    return list(by_module.items())


class Kind(IntEnum):
    """Kind of event on the training thread."""

    NEEDED = 0
    """The forward pass is about to use a unit."""
    READY = 1
    """A unit's gradients are complete."""
    END = 2
    """The next step begins."""


@dataclass
class Clock:
    """Times at which units are needed and ready in a step, without waits for the network."""

    _steps: list[list[tuple[Kind, int, float]]] = field(default_factory=list)
    _began: float = 0.0
    _busy: list[tuple[float, float]] = field(default_factory=list)
    _thread_began: float = 0.0
    _needed: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """Begin a step's forward pass, and end the preceding step."""
        now, used = time.perf_counter(), time.thread_time()
        if self._steps:
            self._steps[-1].append((Kind.END, -1, now - self._began))
            self._busy.append((used - self._thread_began, now - self._began))
        self._steps.append([])
        self._needed.clear()
        self._began, self._thread_began = now, used

    def skip(self, seconds: float) -> None:
        """Exclude `seconds` of the step, which were not computation."""
        self._began += seconds

    def mark(self, kind: Kind, unit: int) -> None:
        """Record an event now; only the first need of a unit per step counts."""
        if kind is Kind.NEEDED:
            if unit in self._needed:
                return
            self._needed.add(unit)
        if self._steps:
            self._steps[-1].append((kind, unit, time.perf_counter() - self._began))

    @property
    def busy(self) -> float:
        """Median share of a step in which this thread used a core, 0 to 1."""
        return min(1.0, statistics.median(used / max(s, 1e-9) for used, s in self._busy))

    def segments(self) -> list[tuple[Kind, int, float]]:
        """Return the events that end each interval of computation, with median seconds.

        Steps whose sequence of events differs from the last one's are ignored.
        """
        complete = [step for step in self._steps if step and step[-1][0] is Kind.END]
        shape = [event[:2] for event in complete[-1]]
        equal = [step for step in complete if [event[:2] for event in step] == shape]
        times = [[t for _, _, t in step] for step in equal]
        lengths = [[b - a for a, b in zip([0.0, *t], t, strict=False)] for t in times]
        medians = [statistics.median(each) for each in zip(*lengths, strict=True)]
        return [(kind, unit, max(s, 0.0)) for (kind, unit), s in zip(shape, medians, strict=True)]


def why_not_plain(model: nn.Module) -> str | None:
    """Return why the forward pass of single modules cannot be hooked, or None."""
    # If the compiler, which takes seconds to import, is not imported, nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and any(isinstance(module, dynamo.OptimizedModule) for module in model.modules()):
        return "is compiled, so that its layers cannot be awaited"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "is already in DistributedDataParallel"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "is scripted, so that its layers cannot be awaited"
    return None
