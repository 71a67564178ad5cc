"""Batches of another size: the samples of one batch, cut off or repeated."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any


def resized(batch: Any, samples: int, wanted: int) -> Any:
    """`batch` with its first `wanted` samples, over again where it has fewer than that.

    A tensor holds samples when its first dimension has `samples` of them, or has a run of another
    such tensor's dimensions flattened in: targets of shape [8 * 128] beside tokens of [8, 128].
    Everything else is kept, as is which of them are one tensor: inputs that are their own targets.
    Strides stay in the order they are in, paddings included.

    Args:
        batch: tensors in any nesting of tuples, lists, mappings and dataclasses.
        samples: how many it holds.
    """
    runs = {1}
    others: dict[int, Any] = {}

    def note_runs(tensor: Any) -> Any:
        if tensor.dim() and tensor.shape[0] == samples:
            rest = tensor.shape[1:]
            runs.update(
                math.prod(rest[begin:end])
                for begin in range(len(rest))
                for end in range(begin + 1, len(rest) + 1)
            )
        return tensor

    def change(tensor: Any) -> Any:
        per_sample, left = divmod(tensor.shape[0], samples) if tensor.dim() else (0, 0)
        if left or per_sample not in runs:
            return tensor
        if id(tensor) not in others:
            others[id(tensor)] = _with_rows(tensor, per_sample * wanted)
        return others[id(tensor)]

    return _mapped(_mapped(batch, note_runs), change)


def _with_rows(tensor: Any, rows: int) -> Any:
    import torch

    had = tensor.shape[0]
    wanted = torch.arange(rows, device=tensor.device) % had
    taken = tensor.detach().index_select(0, wanted)
    inner = tensor.stride(0) * had
    strides = [
        stride // had * rows if d and stride >= inner else stride
        for d, stride in enumerate(tensor.stride())
    ]
    if 0 not in strides and taken.stride() != tuple(strides):
        like = torch.empty_strided(taken.shape, strides, dtype=taken.dtype, device=taken.device)
        taken = like.copy_(taken)
    return taken.requires_grad_(tensor.requires_grad)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor in it changed, in containers of the same types."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # A copy, so that what is more than a dictionary (a tokenizer's encoding) stays that.
        mapped: Any = copy.copy(value)
        for key, item in value.items():
            mapped[key] = _mapped(item, change)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: _mapped(getattr(value, field.name), change)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value
