"""How much autograd keeps of a forward pass: bytes of storages, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def saved_bytes(run: Callable[[], object], parameters: Iterable[Any] = ()) -> int:
    """Bytes that the backward pass of what `run` computes will read, `parameters` left out.

    Args:
        run: computes with gradients recorded; what it returns is kept until all is counted.
        parameters: tensors that are there anyway.

    Raises:
        whatever `run` raises.
    """
    import torch

    known = {one.untyped_storage().data_ptr() for one in parameters}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    del output
    return sum(sizes.values())
