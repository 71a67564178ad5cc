"""Helpers of techniques for NVIDIA GPUs: GPU checks, and kernels of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import WorkloadError
from slipstream.graph import Graph, Kind
from slipstream.workload import BuiltWorkload


def not_on_gpu(graph: Graph, what: str) -> str | None:
    """Return the reason `what` with the step's device if no kernel ran on a GPU; else None."""
    if (graph.tasks.kind == Kind.KERNEL).any():
        return None
    return f"{what}; this step ran on the {str(graph.meta.get('device', 'cpu')).upper()}"


def kernels(graph: Graph, predicate: Callable[[str, str], bool]) -> NDArray[np.int64]:
    """Return the GPU kernels whose name and scope satisfy `predicate`."""
    tasks = np.flatnonzero(graph.tasks.kind == Kind.KERNEL)
    texts = zip(graph.texts("name", tasks), graph.texts("scope", tasks), strict=True)
    chosen: NDArray[np.int64] = tasks[[predicate(name, scope) for name, scope in texts]]
    return chosen


def need_gpu(built: BuiltWorkload, name: str) -> None:
    """Check that `built` lives on an NVIDIA GPU.

    Raises:
        WorkloadError: torch finds no GPU, or the model is not on it.
    """
    import torch

    if not torch.cuda.is_available():
        raise WorkloadError(
            f"{name} needs an NVIDIA GPU, but torch finds none",
            remedy="run it where torch.cuda.is_available() is True",
        )
    first = next(built.model.parameters(), None) if built.model is not None else None
    if first is not None and first.device.type != "cuda":
        raise WorkloadError(
            f"{name} needs the model on the GPU, but it is on the device '{first.device}'",
            remedy="move model and batch with .cuda()",
        )
