"""Adasum of gradients, for a model in ``DistributedDataParallel``.

The variant for optimizers without state: to put Adam or the like after it would normalise away what
it does; `AdasumOptimizer` combines their updates instead.
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
    """What `adasum_hook` keeps: ``model.register_comm_hook(AdasumState(), adasum_hook)``.

    Args:
        group: the model's processes; None: all.
        algorithm: see `exchange`.
        per_node: neighbours in rank whose gradients are averaged first; their number divides that
            of all. The learning rate then is one node's, not one worker's.
        timeout_s: how long a rank waits for the others in one communication.
        patience_s: how long, after a failure, all are given to say that they live.
        model: that the hook is for; its buffers are then broadcast within the same limits.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: the algorithm or `per_node` is none for so many ranks; no time to
            wait.
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
        """Combine a bucket over all ranks; one with numbers that are not finite becomes NaN."""

        def work() -> None:
            with self.ranks.named_errors("a bucket of gradients"):
                if not exchange(flat, starts, self.wire, self.algorithm, self.per_node):
                    flat.fill_(torch.nan)

        return self._thread.submit(flat, work, last)


def adasum_hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    """Adasum of a bucket's gradients, parameter by parameter.

    Raises:
        CommunicationError: from ``backward``: a rank ended, or does something else than the others.
    """
    if not isinstance(state, AdasumState):
        raise InvalidArgumentError("state", f"is a {type(state).__name__}, not an AdasumState")
    lengths = [gradient.numel() for gradient in bucket.gradients()]
    return state.submit(bucket.buffer(), np.cumsum([0, *lengths]), bucket.is_last())


def adasum_all_reduce(
    tensor: torch.Tensor, layers: Any = None, *, group: Any = None, algorithm: str = "auto",
    per_node: int = 1,
) -> None:  # fmt: skip
    """Adasum of all ranks' tensors, in place, the same bits on all ranks.

    Args:
        tensor: contiguous on a processor, float32, float64, float16 or bfloat16.
        layers: where layers begin in it, ascending from 0; None: it is one.
        group: the processes; None: all.
        algorithm: ``gram``, ``rvh`` or ``auto``; see `exchange`.
        per_node: neighbours in rank that are averaged first.

    Raises:
        InvalidArgumentError: an argument that is none of these.
        UsageError: no process group is initialised.
        CommunicationError: on every rank: they disagree on shape, dtype or settings; somebody's
            numbers are not finite (the tensors then are of no use); or one of them ended or hung
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
        raise CommunicationError("a rank's numbers are not finite", remedy="skip the step")
