"""A rank that runs collectives of every kind."""

from __future__ import annotations

from datetime import timedelta


def collectives(rank: int, ranks: int, address: str, elements: int) -> dict[str, object]:
    """Every kind of collective once, and one DDP step, over gloo; what was counted."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from slipstream_bench.payload import count_bytes

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    tensor = torch.ones(elements)
    parts = [torch.ones(elements) for _ in range(ranks)]
    model = torch.nn.Linear(64, 32, bias=False)
    with count_bytes() as traffic:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather(parts, tensor)
        dist.reduce(tensor, 0)
        dist.gather(tensor, parts if rank == 0 else None, 0)
        dist.scatter(tensor, parts if rank == 0 else None, 0)
        dist.all_to_all_single(torch.empty(ranks * 10), torch.ones(ranks * 10))
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        dist.barrier()
    found = [[collective.operation, collective.sent_bytes] for collective in traffic.collectives]
    wrapped = DistributedDataParallel(model)
    with count_bytes() as traffic:
        wrapped(torch.ones(4, 64)).sum().backward()
    ddp = [[collective.operation, collective.sent_bytes] for collective in traffic.collectives]
    dist.destroy_process_group()
    return {"collectives": found, "ddp": ddp}
