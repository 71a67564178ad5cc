"""Buffers that DistributedDataParallel sends around before each forward pass, within our limits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from slipstream.ranks.group import ProcessGroup


def limit_buffers(model: DistributedDataParallel, ranks: ProcessGroup) -> None:
    """Let `ranks` broadcast the model's buffers (batch normalisation's statistics) from rank 0.

    DDP's own broadcast waits for as long as its group does, half an hour by default, and does not
    name who is missing. A hook of the user's stays; so does the broadcast of groups other than
    gloo's, as NCCL's, which another kind of process would do slowly.

    Raises:
        CommunicationError: from the forward pass: a rank ended or hung; as of `ProcessGroup.run`.
    """
    if hasattr(model, "buffer_hook") or dist.get_backend(model.process_group) != "gloo":
        return

    def broadcast(ranks: ProcessGroup, buffers: Mapping[str, torch.Tensor]) -> None:
        def work() -> None:
            _broadcast_coalesced(ranks.group, [*buffers.values()], size, 0)
            # Nobody hears in a broadcast of those who take no part but whom it sends to.
            dist.all_reduce(torch.zeros(1), group=ranks.group)

        size = model.broadcast_bucket_size
        ranks.run("the model's buffers", work)

    model._register_buffer_comm_hook(ranks, broadcast, _BufferCommHookLocation.PRE_FORWARD)
