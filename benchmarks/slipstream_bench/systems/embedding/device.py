"""Rows of ``slipstream bench embedding`` that need a CUDA device: a tensor train's step there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional

from slipstream.techniques.embedding.formats.tt import TTEmbeddingBag
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_ROWS, _FACTORS, _RANK = 11_000_000, ((200, 220, 250), (4, 4, 4)), 32
_BAGS, _IDS = 512, 10_240
_STEPS = 20
_OVER = "tensor train on a CUDA device, forward and backward: over torch's batched products"
_TIME = "tensor train on a CUDA device, forward and backward: time"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of the bench; the shape is that of the published kernel."""
    if not (options.wants(_OVER) or options.wants(_TIME)):
        return
    if not torch.cuda.is_available():
        yield not_judged(_OVER, "x", ">= 10", "no CUDA device")
        yield not_judged(_TIME, "us per id", "<= 0.05", "no CUDA device")
        return
    options.progress(_OVER)
    rounds = 12 if options.full else 4
    times = step_seconds(torch.device("cuda"), _ROWS, _FACTORS, _RANK, (_BAGS, _IDS), rounds)
    us = {arm: statistics.median(own) / _IDS * 1e6 for arm, own in times.items()}
    detail = f"{torch.cuda.get_device_name()}; us per id: " + ", ".join(
        f"{arm} {value:.4f}" for arm, value in us.items()
    )
    ratios = [b / a for a, b in zip(times["ours"], times["products"], strict=True)]
    if options.wants(_OVER):
        yield at_least(_OVER, statistics.median(ratios), 10.0, "x", n=rounds, detail=detail)
    if options.wants(_TIME):
        yield at_most(_TIME, us["ours"], 0.05, "us per id", n=rounds, detail=detail)


def step_seconds(
    device: torch.device,
    rows: int,
    factors: tuple[Sequence[int], Sequence[int]],
    rank: int,
    batch: tuple[int, int],
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of a forward and a backward pass by arm, arms in turns.

    Args:
        factors: of the table's rows and columns, three each.
        batch: equal bags, and ids in all of them.

    Returns:
        for ``ours``, ``products`` (slices gathered and multiplied by torch's operators) and
        ``dense`` (`functional.embedding_bag` with sparse gradients) a time for each round.
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

    arms: dict[str, Callable[[], None]] = {"ours": ours, "products": products, "dense": dense}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, run in arms.items():
            spent = _seconds(run, device)
            if turn:  # in the first, kernels are compiled
                times[arm].append(spent)
    return times


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    _wait(device)
    before = time.perf_counter()
    for _ in range(_STEPS):
        run()
    _wait(device)
    return (time.perf_counter() - before) / _STEPS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
