"""DistributedDataParallel as a plan of `PriorityDDP`: with the same errors and the same limits."""

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
    """All-reduces of one backward pass, in a group whose every wait has a limit."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self.ranks = ranks
        self._pending: list[tuple[Any, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def submit(self, flat: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; with the last one, wait for all, so that ``backward`` raises what
        failed, as what it is.

        Raises:
            CommunicationError: a rank ended, hung, or does something else.
        """
        ranks = self.ranks
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with ranks.named_errors("a bucket of gradients"):
            work = dist.all_reduce(flat.mul_(1.0 / ranks.size), group=ranks.group, async_op=True)
            self._pending.append((work, flat, result))
            if last:
                pending, self._pending = self._pending, []
                for work, of, done in pending:
                    work.wait()
                    done.set_result(of)
        return result


def replicated(
    model: nn.Module, ranks: ProcessGroup, parent: Any, bucket_mb: float | None, unused: bool
) -> DistributedDataParallel:
    """`model`, whose weights are equal already, in DistributedDataParallel.

    Args:
        ranks: communicate buckets.
        parent: their group, None for all, for what DistributedDataParallel says besides.
        bucket_mb: None: its default.
        unused: some parameters have no gradient at times.
    """
    with warnings.catch_warnings():
        # What torch names as the successor would take over rank 0's running statistics here.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        replica = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, process_group=parent, find_unused_parameters=unused,
            init_sync=False, broadcast_buffers=False,
        )  # fmt: skip
    buckets = Buckets(ranks)
    put_hook(replica, lambda bucket: buckets.submit(bucket.buffer(), bucket.is_last()))
    return replica
