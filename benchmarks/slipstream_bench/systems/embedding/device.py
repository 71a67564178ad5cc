"""Rows of ``slipstream bench embedding`` on a CUDA device: a tensor train's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from slipstream.techniques.embedding.formats.tt import TTEmbeddingBag
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream_bench.harness import Paired, on_cuda, paired
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_ROWS, _FACTORS, _RANK = 11_000_000, ((200, 220, 250), (4, 4, 4)), 32
_BAGS, _IDS = 512, 10_240
_OVER = "tensor train on a CUDA device, forward and backward: over torch's batched products"
_TIME = "tensor train on a CUDA device, forward and backward: time"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows, with the shape of the published kernel."""
    if not (options.wants(_OVER) or options.wants(_TIME)):
        return
    if not torch.cuda.is_available():
        yield not_judged(_OVER, "x", ">= 10", "no CUDA device")
        yield not_judged(_TIME, "us per id", "<= 0.05", "no CUDA device")
        return
    options.progress(_OVER)
    device = torch.device("cuda")
    taken = steps(device, _ROWS, _FACTORS, _RANK, (_BAGS, _IDS), 12 if options.full else 8)
    us = {arm: taken.median_s(arm) / _IDS * 1e6 for arm in taken.arms}
    detail = "us per id: " + ", ".join(f"{arm} {value:.4f}" for arm, value in us.items())
    ratio = taken.ratio("products", "ours")
    if options.wants(_OVER):
        yield on_cuda(ratio.at_least(_OVER, 10.0, detail=detail))
    if options.wants(_TIME):
        row = at_most(_TIME, us["ours"], 0.05, "us per id", n=ratio.n, detail=detail, data=us)
        yield on_cuda(row)


def steps(
    device: torch.device,
    rows: int,
    factors: tuple[Sequence[int], Sequence[int]],
    rank: int,
    batch: tuple[int, int],
    blocks: int,
) -> Paired:
    """Return a forward and backward pass of each arm.

    Args:
        factors: three factors each of the table's rows and columns.
        batch: number of bags of equal size, and of ids in all of them.

    Returns:
        ``ours``, ``products`` (slices gathered and multiplied by torch's operators) and ``dense``
        (`functional.embedding_bag` with sparse gradients).
    """
    bags, count = batch
    ids = torch.randint(0, rows, (count,), device=device)
    offsets = torch.arange(0, count, count // bags, device=device)
    dim = factors[1][0] * factors[1][1] * factors[1][2]
    bag = TTEmbeddingBag(rows, dim, (rank, rank), factors, device=device)
    cores = [core.detach().clone().requires_grad_() for core in bag.cores]
    table = torch.full((rows, dim), 0.1, device=device, requires_grad=True)
    gradient = torch.randn(bags, dim, device=device)

    def ours() -> None:
        torch.autograd.grad(bag(ids, offsets), list(bag.cores), gradient)

    def products() -> None:
        made = reference.rows_of(cores, ids).view(bags, -1, dim).sum(1)
        torch.autograd.grad(made, cores, gradient)

    def dense() -> None:
        made = functional.embedding_bag(ids, table, offsets, mode="sum", sparse=True)
        torch.autograd.grad(made, table, gradient)

    arms = {"ours": ours, "products": products, "dense": dense}
    return paired(arms, clock="wall", blocks=blocks)
