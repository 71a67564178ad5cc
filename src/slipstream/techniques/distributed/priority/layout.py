"""Units and slices: what is sent together, what may be overtaken, and where it lies in memory.

A unit is what one place of the forward pass waits for: the parameters that a module reads first,
of one dtype. Their gradients lie one behind the other in a buffer of the unit's own, which is cut
in slices. Behind them lies one flag a parameter, 1 where this rank has a gradient of it: summed up
with the gradients, it tells every rank whether anybody used the parameter.

Between the backward pass and the update, ``parameter.grad`` is a view of a buffer that is being
summed up. Clipping, scalers and logging read it; to them it must be the mean over all ranks: who
reads one waits for it.
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
# What can be told without the numbers.
_KNOWN = {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
_KNOWN |= {getattr(torch.Tensor, name) for name in _METHODS}


class InFlight(torch.Tensor):
    """A view of a buffer on its way; before its numbers are used, `owner` is told."""

    owner: weakref.ref[Any]

    @staticmethod
    def of(view: torch.Tensor, owner: object) -> InFlight:
        """The same memory, guarded."""
        guarded: InFlight = view.as_subclass(InFlight)
        guarded.owner = weakref.ref(owner)
        return guarded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if func not in _KNOWN:
            for one in tree_leaves(given):
                owner = one.owner() if isinstance(one, InFlight) else None
                if owner is not None:
                    owner.before_read()
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(InFlight, lambda one: one.as_subclass(torch.Tensor), given)
            return func(*args, **kwargs)


@dataclass(frozen=True)
class Slice:
    """Numbers `begin` to `end` of a unit's buffer.

    Attributes:
        number: its place among all slices, the same on all ranks.
    """

    number: int
    unit: Unit
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """On the wire, once."""
        return (self.end - self.begin) * self.unit.flat.element_size()

    def tensor(self) -> torch.Tensor:
        """[end - begin], a view."""
        return self.unit.flat[self.begin : self.end]


@dataclass(eq=False)
class Unit:
    """Parameters that are awaited together.

    Attributes:
        number: its place in the forward pass; the smaller, the more urgent.
        parameters: in the order of the buffer.
        flat: [numel + parameters], gradients and flags.
        handed: which parameters' gradients are in the buffer in this round.
        given: of which this rank had a gradient in the last round.
        left: how many slices have not arrived.
        due: the optimizer has stepped, and this unit has not been updated yet.
    """

    number: int
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    slices: list[Slice] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    guards: list[InFlight] = field(default_factory=list)
    handed: list[bool] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    left: int = 0
    due: bool = False

    @property
    def flags(self) -> torch.Tensor:
        """[parameters]; above 0 where a rank has a gradient."""
        return self.flat[self.flat.numel() - len(self.parameters) :]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def used(self) -> list[bool]:
        """Which parameters some rank has a gradient of, once all slices are there."""
        flags: list[bool] = (self.flags > 0).tolist()
        return flags

    def show(self) -> None:
        """Where a gradient is guarded still, put what it has become; None if nobody has one."""
        triples = zip(self.parameters, self.guards, self.views, strict=True)
        for (parameter, guard, view), used in zip(triples, self.used(), strict=True):
            if parameter.grad is guard:
                parameter.grad = view if used else None


def units_of(groups: Sequence[Sequence[torch.nn.Parameter]], owner: Any) -> list[Unit]:
    """Units of parameters that are awaited at the same place, the first place first.

    Args:
        groups: parameters by place.
        owner: is asked before anybody reads a gradient that is on its way.

    Raises:
        InvalidArgumentError: a parameter that cannot be exchanged.
    """
    units: list[Unit] = []
    for group in groups:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in group:
            if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
                raise InvalidArgumentError(
                    "model", f"has a parameter of {parameter.dtype} on {parameter.device}",
                    remedy="floating parameters on a processor; DistributedDataParallel otherwise",
                )  # fmt: skip
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            units.append(_unit(len(units), parameters, owner))
    return units


def _unit(number: int, parameters: list[torch.nn.Parameter], owner: Any) -> Unit:
    numel = sum(one.numel() for one in parameters)
    flat = torch.zeros(numel + len(parameters), dtype=parameters[0].dtype)
    unit = Unit(number, parameters, flat, handed=[False] * len(parameters))
    unit.given = [True] * len(parameters)
    start = 0
    for one in parameters:
        view = flat[start : start + one.numel()].view(one.shape)
        unit.views.append(view)
        unit.guards.append(InFlight.of(view, owner))
        start += one.numel()
    return unit


def cut(units: Sequence[Unit], elements: int) -> list[Slice]:
    """Slices of at most `elements` numbers, unit by unit; those of a unit before are forgotten."""
    slices: list[Slice] = []
    for unit in units:
        unit.slices = []
        for begin in range(0, unit.flat.numel(), elements):
            end = min(begin + elements, unit.flat.numel())
            unit.slices.append(Slice(len(slices), unit, begin, end))
            slices.append(unit.slices[-1])
    return slices
