"""Broadcast of DistributedDataParallel's buffers with our time-outs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from slipstream.ranks.group import ProcessGroup


def limit_buffers(model: DistributedDataParallel, ranks: ProcessGroup) -> None:
    """Let `ranks` broadcast the model's buffers, such as batch norm statistics, from rank 0.

    DDP's own broadcast has the time-out of its group, half an hour by default, and does not name
    missing ranks. It remains for groups other than gloo, and if the user registered a hook.

    Raises:
        CommunicationError: in the forward pass, as for `ProcessGroup.run`.
    """
    if hasattr(model, "buffer_hook") or dist.get_backend(model.process_group) != "gloo":
        return

    def broadcast(ranks: ProcessGroup, buffers: Mapping[str, torch.Tensor]) -> None:
        def work() -> None:
            _broadcast_coalesced(ranks.group, [*buffers.values()], size, 0)
            # In a broadcast only the receivers notice a missing rank.
            dist.all_reduce(torch.zeros(1), group=ranks.group)

        size = model.broadcast_bucket_size
        ranks.run("the model's buffers", work)

    model._register_buffer_comm_hook(ranks, broadcast, _BufferCommHookLocation.PRE_FORWARD)
