"""Resize batches by truncating or repeating samples."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any


def resized(batch: Any, samples: int, target: int) -> Any:
    """Return `batch` with `target` samples, repeated if it has fewer.

    A tensor holds samples if its first dimension has size `samples`, or that times consecutive
    dimensions of another such tensor: targets of shape [8 * 128] for tokens of [8, 128]. Other
    values are unchanged. A tensor that occurs several times, such as inputs that are also targets,
    remains one tensor. The order and padding of strides are preserved.

    Args:
        batch: tensors in any nesting of tuples, lists, mappings and dataclasses.
        samples: the number of samples of `batch`.
        target: the number of samples to return.
    """
    runs = {1}
    resized_by_id: dict[int, Any] = {}

    def note_runs(tensor: Any) -> Any:
        if tensor.dim() and tensor.shape[0] == samples:
            inner = tensor.shape[1:]
            runs.update(
                math.prod(inner[begin:end])
                for begin in range(len(inner))
                for end in range(begin + 1, len(inner) + 1)
            )
        return tensor

    def change(tensor: Any) -> Any:
        per_sample, remainder = divmod(tensor.shape[0], samples) if tensor.dim() else (0, 0)
        if remainder or per_sample not in runs:
            return tensor
        if id(tensor) not in resized_by_id:
            resized_by_id[id(tensor)] = _with_rows(tensor, per_sample * target)
        return resized_by_id[id(tensor)]

    return _mapped(_mapped(batch, note_runs), change)


def _with_rows(tensor: Any, rows: int) -> Any:
    import torch

    previous = tensor.shape[0]
    indices = torch.arange(rows, device=tensor.device) % previous
    taken = tensor.detach().index_select(0, indices)
    inner = tensor.stride(0) * previous
    strides = [
        stride // previous * rows if d and stride >= inner else stride
        for d, stride in enumerate(tensor.stride())
    ]
    if 0 not in strides and taken.stride() != tuple(strides):
        like = torch.empty_strided(taken.shape, strides, dtype=taken.dtype, device=taken.device)
        taken = like.copy_(taken)
    return taken.requires_grad_(tensor.requires_grad)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every tensor in `value`, in containers of the same types."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # A copy retains the attributes of subclasses, such as a tokenizer's encoding.
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
