"""Adasum of gradients, for a model in ``DistributedDataParallel``.

For stateless optimizers only: Adam and similar ones would normalise its effect away. For these,
`AdasumOptimizer` combines updates instead.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import CommunicationError, InvalidArgumentError
from slipstream.ranks.buckets import BucketThread
from slipstream.ranks.buffers import limit_buffers
from slipstream.ranks.group import (
    PATIENCE_S,
    TIMEOUT_S,
    ProcessGroup,
    need_processes,
    process_group,
)
from slipstream.techniques.distributed.adasum.exchange import check, check_algorithm, exchange


class AdasumState:
    """State of `adasum_hook`: ``model.register_comm_hook(AdasumState(), adasum_hook)``.

    Args:
        group: the model's process group; None for the default group.
        algorithm: see `exchange`.
        per_node: number of consecutive ranks whose gradients are averaged first; it divides the
            ranks. The learning rate is then that of one node, not of one worker.
        timeout_s: time limit of one communication.
        patience_s: time limit, after a failure, for every rank to report that it is alive.
        model: the hooked model; its buffers are then broadcast within the same limits.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: the algorithm or `per_node` does not support this number of ranks,
            or a time limit is not positive.
    """

    def __init__(
        self, group: Any = None, *, algorithm: str = "auto", per_node: int = 1,
        timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S,
        model: DistributedDataParallel | None = None,
    ) -> None:  # fmt: skip
        need_processes("Adasum")
        size = dist.get_world_size(group)
        check_algorithm(algorithm, size, per_node)
        self.algorithm, self.per_node = algorithm, per_node
        self.ranks = ProcessGroup(group, timeout_s, patience_s, "adasum_hook")
        self.wire = self.ranks.wire
        self.ranks.agree(f"{algorithm} {per_node}", "setting of Adasum")
        self._thread = BucketThread("adasum")
        if model is not None:
            limit_buffers(model, self.ranks)

    def submit(self, flat: torch.Tensor, starts: Any, last: bool) -> Any:
        """Combine a bucket over all ranks; a bucket that is not finite becomes NaN."""

        def work() -> None:
            with self.ranks.named_errors("a bucket of gradients"):
                if not exchange(flat, starts, self.wire, self.algorithm, self.per_node):
                    flat.fill_(torch.nan)

        return self._thread.submit(flat, work, last)


def adasum_hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    """Combine a bucket's gradients by Adasum, per parameter.

    Raises:
        CommunicationError: from ``backward``: a rank exited, or made a different call.
    """
    if not isinstance(state, AdasumState):
        raise InvalidArgumentError("state", f"is a {type(state).__name__}, not an AdasumState")
    lengths = [gradient.numel() for gradient in bucket.gradients()]
    return state.submit(bucket.buffer(), np.cumsum([0, *lengths]), bucket.is_last())


def adasum_all_reduce(
    tensor: torch.Tensor, layers: Any = None, *, group: Any = None, algorithm: str = "auto",
    per_node: int = 1,
) -> None:  # fmt: skip
    """Combine all ranks' tensors by Adasum, in place, with the same bits on all ranks.

    Args:
        tensor: contiguous on CPU, float32, float64, float16 or bfloat16.
        layers: offsets of layers in it, ascending from 0; None for a single layer.
        group: process group; None for the default group.
        algorithm: ``gram``, ``rvh`` or ``auto``; see `exchange`.
        per_node: number of consecutive ranks that are averaged first.

    Raises:
        InvalidArgumentError: an argument is not one of these.
        UsageError: no process group is initialised.
        CommunicationError: on every rank: ranks disagree on shape, dtype or settings; an element
            is not finite (the tensors' content is then undefined); or a rank exited or hung
            (after 25 s at most).
    """
    ranks = process_group(group)
    wire = ranks.wire
    starts = check(tensor, layers, algorithm, wire.size, per_node)
    layout = zlib.crc32(np.ascontiguousarray(starts[:-1]).tobytes())
    ranks.need_same_call("adasum_all_reduce", tensor, f"{algorithm} {per_node} {layout}")
    flat = tensor.detach().view(-1)
    if not ranks.run(
        "adasum_all_reduce", lambda: exchange(flat, starts, wire, algorithm, per_node)
    ):
        raise CommunicationError("the tensor of a rank is not finite", remedy="skip the step")
