"""Gradients summed by an aggregator, in a script that torchrun starts on every host.

torchrun --nproc-per-node 2 examples/summed_gradients.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import slipstream as ss


def main(steps: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    # On a cluster: `slipstream cluster aggregate serve` on a machine at the switch.
    server = ss.aggregation.AggregationServer().__enter__() if rank == 0 else None
    place = [server and (server.address, server.token)]
    dist.broadcast_object_list(place)
    address, token = place[0]

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    hook = ss.aggregation.attach(model, address, token=token)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        inputs = torch.randn(64, 20, generator=generator)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :1] * inputs[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3} loss {loss.item():.4f}")
    if rank == 0:
        print(f"{hook.buckets} buckets summed by the aggregator; {hook.ring or 'no ring needed'}")
    hook.close()
    dist.barrier()
    if server is not None:
        server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
