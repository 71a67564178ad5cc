"""Measure the bytes that autograd saves in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def saved_bytes(run: Callable[[], object], parameters: Iterable[Any] = ()) -> int:
    """Return the bytes of storages saved for the backward pass of `run`, each counted once.

    Args:
        run: computes with gradients enabled; its result stays alive during the measurement.
        parameters: tensors that are not counted.
    """
    import torch

    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    del output
    return sum(sizes.values())
