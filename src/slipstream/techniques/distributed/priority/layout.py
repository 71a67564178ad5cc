"""Units and slices: groups of parameters, their buffers, and the parts that are sent.

A unit holds the parameters of one dtype that a module reads first, which the forward pass awaits
together. Their gradients are contiguous in the unit's buffer, which is cut into slices. At its end
there is a flag per parameter, 1 if this rank has a gradient of it; its sum over ranks shows whether
any rank used the parameter.

Between the backward pass and the update, ``parameter.grad`` is a view of a buffer that is being
summed. Clipping, scalers and logging must read the mean over all ranks, so reading the view waits
for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.wire import DTYPES

_GETTERS = (
    "device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_sparse", "layout", "ndim",
    "requires_grad", "shape",
)  # fmt: skip
_METHODS = ("dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size", "stride")
# Attributes that do not depend on values.
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
_METADATA |= {getattr(torch.Tensor, name) for name in _METHODS}


class InFlight(torch.Tensor):
    """A view of a buffer in transit; reading its values first calls ``owner.before_read()``."""

    owner: weakref.ref[Any]

    @staticmethod
    def of(view: torch.Tensor, owner: object) -> InFlight:
        """Return a guarded view of the same memory."""
        guarded: InFlight = view.as_subclass(InFlight)
        guarded.owner = weakref.ref(owner)
        return guarded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = args, kwargs or {}
        if func not in _METADATA:
            for tensor in tree_leaves(operands):
                owner = tensor.owner() if isinstance(tensor, InFlight) else None
                if owner is not None:
                    owner.before_read()
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(
                InFlight, lambda tensor: tensor.as_subclass(torch.Tensor), operands
            )
            return func(*args, **kwargs)


@dataclass(frozen=True)
class Slice:
    """Elements `begin` to `end` of a unit's buffer.

    Attributes:
        number: index among all slices, the same on all ranks.
    """

    number: int
    unit: Unit
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return (self.end - self.begin) * self.unit.flat.element_size()

    def tensor(self) -> torch.Tensor:
        """Return the view [end - begin] of the buffer."""
        return self.unit.flat[self.begin : self.end]


@dataclass(eq=False)
class Unit:
    """Parameters that are awaited together.

    Attributes:
        number: index in the order of the forward pass; smaller is more urgent.
        parameters: parameters in the order of the buffer.
        flat: gradients and flags, [numel + parameters].
        views: views of the gradients in `flat`.
        guards: guarded views of the same memory.
        handed: whether each parameter's gradient is in the buffer in this round.
        has_gradient: whether this rank had a gradient of each parameter in the last round.
        missing: number of slices that have not arrived.
        due: whether the optimizer has stepped, but this unit is not updated yet.
    """

    number: int
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    slices: list[Slice] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    guards: list[InFlight] = field(default_factory=list)
    handed: list[bool] = field(default_factory=list)
    has_gradient: list[bool] = field(default_factory=list)
    missing: int = 0
    due: bool = False

    @property
    def flags(self) -> torch.Tensor:
        """Flags [parameters]; positive if any rank has a gradient."""
        return self.flat[self.flat.numel() - len(self.parameters) :]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def used(self) -> list[bool]:
        """Return, once all slices have arrived, whether any rank has each gradient."""
        flags: list[bool] = (self.flags > 0).tolist()
        return flags

    def show(self) -> None:
        """Replace guarded gradients by the received ones; None if no rank has one."""
        triples = zip(self.parameters, self.guards, self.views, strict=True)
        for (parameter, guard, view), used in zip(triples, self.used(), strict=True):
            if parameter.grad is guard:
                parameter.grad = view if used else None


def units_of(groups: Sequence[Sequence[torch.nn.Parameter]], owner: Any) -> list[Unit]:
    """Create the units of groups of parameters, one per group and dtype.

    Args:
        groups: parameters that are awaited together, in the order of the forward pass.
        owner: its `before_read` is called before a gradient in transit is read.

    Raises:
        InvalidArgumentError: a parameter cannot be exchanged.
    """
    units: list[Unit] = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in group:
            if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
                raise InvalidArgumentError(
                    "model", f"has a parameter of {parameter.dtype} on {parameter.device}",
                    remedy="use DistributedDataParallel, or floating-point parameters on the CPU",
                )  # fmt: skip
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            units.append(_unit(len(units), parameters, owner))
    return units


def _unit(number: int, parameters: list[torch.nn.Parameter], owner: Any) -> Unit:
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(numel + len(parameters), dtype=parameters[0].dtype)
    unit = Unit(number, parameters, flat, handed=[False] * len(parameters))
    unit.has_gradient = [True] * len(parameters)
    start = 0
    for parameter in parameters:
        view = flat[start : start + parameter.numel()].view(parameter.shape)
        unit.views.append(view)
        unit.guards.append(InFlight.of(view, owner))
        start += parameter.numel()
    return unit


def cut(units: Sequence[Unit], elements: int) -> list[Slice]:
    """Cut units into slices of at most `elements` elements, replacing earlier slices."""
    slices: list[Slice] = []
    for unit in units:
        unit.slices = []
        for begin in range(0, unit.flat.numel(), elements):
            end = min(begin + elements, unit.flat.numel())
            unit.slices.append(Slice(len(slices), unit, begin, end))
            slices.append(unit.slices[-1])
    return slices
