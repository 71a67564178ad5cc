"""Resize batches by truncating or repeating samples."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


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


class TokenBatch(NamedTuple):
    """Tensors of a batch of token sequences.

    Attributes:
        labels: int64 [batch, length], -100 for tokens without a loss; None without one.
        mask: [batch, length], 0 for padding and 1 for tokens; None without one.
    """

    labels: Any
    mask: Any

    def describe(self) -> dict[str, Any]:
        """Return ``shape``, number of ``labelled`` tokens and ``lengths`` without padding, as JSON.

        Empty if there are neither labels nor a mask.
        """
        present = [tensor for tensor in self if tensor is not None]
        if not present:
            return {}
        labelled = None if self.labels is None else int((self.labels != -100).sum())
        lengths = None if self.mask is None else (self.mask != 0).sum(1).tolist()
        return {"shape": list(present[0].shape), "labelled": labelled, "lengths": lengths}


def find_tokens(batch: Any) -> TokenBatch:
    """Return labels and mask of padding among the integer tensors [batch, length] of `batch`.

    A mask has only 0 and 1, with a 1 in every row, and the name ``...mask`` if tensors have names.
    """
    import torch

    labels, mask, shapes = None, None, {}

    def visit(value: Any, name: str) -> None:
        nonlocal labels, mask
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, str(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item, name)
        elif isinstance(value, torch.Tensor) and value.dim() in (1, 2) and value.numel():
            whole = not (value.is_floating_point() or value.is_complex())
            if value.dim() == 2:
                shapes[value.numel()] = value.shape
            if whole and bool((value == -100).any()):
                labels = value
            elif value.dim() == 1:
                return
            elif (name.endswith("mask") or (whole and not name)) and bool(
                ((value == 0) | (value == 1)).all()
            ):
                mask = value if bool((value != 0).any(1).all()) else mask

    visit(batch, "")
    if labels is not None and labels.dim() == 1:
        shape = shapes.get(labels.numel())
        labels = None if shape is None else labels.view(shape)
    return TokenBatch(labels, mask)


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
