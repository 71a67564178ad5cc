"""Gradients on their way: whoever reads one waits for it.

Between the backward pass and the update, ``parameter.grad`` is a view of the buffer that is being
summed up. Clipping, scalers and logging read it; to them it must be the mean over all ranks.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

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
        made: InFlight = view.as_subclass(InFlight)
        made.owner = weakref.ref(owner)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _KNOWN:
            for one in _guards((args, kwargs)):
                owner = one.owner()
                if owner is not None:
                    owner.before_read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_plain(args), **_plain(kwargs))


def _guards(value: Any) -> list[InFlight]:
    if isinstance(value, InFlight):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [one for each in value for one in _guards(each)]


def _plain(value: Any) -> Any:
    if isinstance(value, InFlight):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
