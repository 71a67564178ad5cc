"""DistributedDataParallel as a plan of `PriorityDDP`, with the same errors and time-outs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.ranks.group import ProcessGroup
from slipstream.techniques.distributed.exposed import put_hook


class Buckets:
    """All-reduces of a backward pass, in a group whose waits time out."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self.ranks = ranks
        self._pending: list[tuple[Any, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def submit(self, flat: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; with the last one, wait for all, so that ``backward`` raises errors.

        Raises:
            CommunicationError: a rank ended, hung, or ran another operation.
        """
        ranks = self.ranks
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with ranks.named_errors("a bucket of gradients"):
            work = dist.all_reduce(flat.mul_(1.0 / ranks.size), group=ranks.group, async_op=True)
            self._pending.append((work, flat, result))
            if last:
                pending, self._pending = self._pending, []
                for work, bucket, future in pending:
                    work.wait()
                    future.set_result(bucket)
        return result


def replicated(
    model: nn.Module, ranks: ProcessGroup, parent: Any, bucket_mb: float | None, unused: bool
) -> DistributedDataParallel:
    """Wrap `model`, whose replicas are already equal, in DistributedDataParallel.

    Args:
        ranks: the group that exchanges buckets.
        parent: process group for DistributedDataParallel's other messages, None for all.
        bucket_mb: bucket size in MiB; None for the default.
        unused: whether some parameters may have no gradient.
    """
    with warnings.catch_warnings():
        # The argument that torch recommends instead would broadcast running statistics here.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        replica = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, process_group=parent, find_unused_parameters=unused,
            init_sync=False, broadcast_buffers=False,
        )  # fmt: skip
    buckets = Buckets(ranks)
    put_hook(replica, lambda bucket: buckets.submit(bucket.buffer(), bucket.is_last()))
    return replica
