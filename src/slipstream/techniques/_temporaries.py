"""The most memory a piece of PyTorch code needs for a while: results of operators, added up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def most_temporary_bytes(work: Callable[[], object]) -> int:
    """The peak of the results of the operators that `work` calls, in bytes."""
    results = _Results()
    with results, torch.no_grad():
        work()
    return results.most


class _Results(TorchDispatchMode):
    """Adds up the storages that operators return and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0
        self._now: int = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            key = id(storage)
            if key not in given and key not in self._alive:
                self._alive.add(key)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.most = max(self.most, self._now)
        return results

    def _free(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self._now -= nbytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]
