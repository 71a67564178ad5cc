"""What techniques for NVIDIA GPUs share: is there one, and which kernels does a step launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import WorkloadError
from slipstream.graph import Graph, Kind
from slipstream.workload import BuiltWorkload


def not_on_gpu(graph: Graph, what: str) -> str | None:
    """Why `what` cannot matter where no kernel ran on a GPU; None where one did."""
    if (graph.tasks.kind == Kind.KERNEL).any():
        return None
    return f"{what}; this step ran on the {str(graph.meta.get('device', 'cpu')).upper()}"


def kernels(graph: Graph, wanted: Callable[[str, str], bool]) -> NDArray[np.int64]:
    """Tasks that compute on a GPU, and of whose name and scope `wanted` holds."""
    tasks = np.flatnonzero(graph.tasks.kind == Kind.KERNEL)
    both = zip(graph.texts("name", tasks), graph.texts("scope", tasks), strict=True)
    chosen: NDArray[np.int64] = tasks[[wanted(name, scope) for name, scope in both]]
    return chosen


def need_gpu(built: BuiltWorkload, name: str) -> None:
    """Check that `built` lives on an NVIDIA GPU.

    Raises:
        WorkloadError: this torch sees none, or the model is elsewhere.
    """
    import torch

    if not torch.cuda.is_available():
        raise WorkloadError(
            f"{name} needs an NVIDIA GPU, and torch sees none here",
            remedy="run it where torch.cuda.is_available() is True",
        )
    first = next(built.model.parameters(), None) if built.model is not None else None
    if first is not None and first.device.type != "cuda":
        raise WorkloadError(
            f"{name} needs the model on the GPU; it is on the device '{first.device}'",
            remedy="move model and batch with .cuda()",
        )
