"""``slipstream bench compression``: speed of the encoders, real ranks on shaped links, the study.

Encoders are timed by CPU time of one thread in turns with what they are compared with, in a process
that keeps its pages. Ranks run in a network lab, which needs root.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.techniques.distributed.compression import kernels
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.compression import convergence as bench_convergence
from slipstream_bench.systems.compression import ranks as bench_ranks
from slipstream_bench.systems.compression import utility as bench_utility

_NUMBERS = 4_000_000
_SIDE = 2000
_RANK = 4
_REPEATS = 15


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of the bench. Quick: fewer links and steps; encoders keep their full size."""
    yield from _encoders(options)
    yield from bench_utility.bars(options)
    yield from bench_convergence.bars(options)
    yield from bench_ranks.bars(options)


def _ratio(theirs: Callable[[], object], ours: Callable[[], object]) -> tuple[float, str]:
    """How many times as long theirs takes: median of pairs, and its quartiles in words."""
    taken = []
    for repeat in range(_REPEATS + 2):
        pair = []
        for run in (theirs, ours):
            began = time.thread_time_ns()
            run()
            pair.append(time.thread_time_ns() - began)
        if repeat >= 2:
            taken.append(pair[0] / pair[1])
    first, middle, third = statistics.quantiles(taken, n=4)
    return middle, f"quartiles {first:.2f} to {third:.2f}; 16 MB, one thread"


def _encoders(options: BenchOptions) -> Iterator[Bar]:
    if not kernels.levels():
        reason = why_no_library() or "no kernel runs here"
        yield not_judged("top-k 1 % against torch.topk", "x", ">= 8", reason)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_pages()
    try:
        drawn = torch.Generator().manual_seed(0)
        gradient = torch.randn(_NUMBERS, generator=drawn)
        # Rows differ in size, as those of gradients do.
        gradient *= torch.rand(_SIDE, generator=drawn).repeat_interleave(_NUMBERS // _SIDE)
        yield from _top(options, gradient)
        yield from _blocks(options, gradient)
        yield from _low_rank(options, gradient)
    finally:
        torch.set_num_threads(threads)


def _top(options: BenchOptions, gradient: torch.Tensor) -> Iterator[Bar]:
    bar = "top-k 1 % against torch.topk"
    if not options.wants(bar):
        return
    options.progress(bar)
    residual, k = torch.zeros_like(gradient), _NUMBERS // 100
    indices, values = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
    value, said = _ratio(
        lambda: torch.topk(gradient.abs(), k, sorted=False),
        lambda: kernels.top(gradient, residual, indices, values),
    )
    yield at_least(
        bar, value, 8.0, "x", n=_REPEATS, detail=f"{said}; ours adds the residual and keeps it, too"
    )


def _blocks(options: BenchOptions, gradient: torch.Tensor) -> Iterator[Bar]:
    # A copy of 6 bytes a number touches as many as reading two and writing one of 4.
    source = torch.zeros(_NUMBERS * 3 // 2)
    target = torch.empty_like(source)
    for bits, size, most in ((1, 4096, 1.3), (4, 256, 1.5), (8, 256, 1.5)):
        name = "sign" if bits == 1 else f"int{bits}"
        bar = f"{name} with error feedback against copying the bytes it touches"
        if not options.wants(bar):
            continue
        options.progress(bar)
        blocks = kernels.Blocks.of([(0, _NUMBERS)], size, bits)
        residual, scales = torch.zeros_like(gradient), torch.zeros(len(blocks))
        codes = torch.zeros(blocks.nbytes, dtype=torch.uint8)
        encode = _encoding(blocks, gradient, residual, scales, codes)
        value, said = _ratio(encode, lambda: target.copy_(source))
        yield at_most(bar, value, most, "x", n=_REPEATS, detail=said)


def _encoding(blocks: kernels.Blocks, *tensors: torch.Tensor) -> Callable[[], None]:
    return lambda: blocks.encode(*tensors)


def _low_rank(options: BenchOptions, gradient: torch.Tensor) -> Iterator[Bar]:
    bar = "PowerSGD rank 4 against torch's hook"
    if not options.wants(bar):
        return
    options.progress(bar)
    matrix = gradient.view(_SIDE, _SIDE)
    residual, out = torch.zeros_like(matrix), torch.empty_like(matrix)
    p, q = torch.zeros(_RANK, _SIDE), torch.randn(_RANK, _SIDE)

    def ours() -> None:
        kernels.project(matrix, residual, q, p)
        kernels.orthonormalise(p)
        kernels.project_back(residual, p, q)
        kernels.reconstruct(p, q, residual, out)

    value, said = _ratio(_torch_hook(matrix), ours)
    yield at_least(
        bar, value, 1.5, "x", n=_REPEATS,
        detail=f"{said}; the operators of torch's hook with error feedback, in its order, without "
        "its collectives; encode and decode",
    )  # fmt: skip


def _torch_hook(matrix: torch.Tensor) -> Callable[[], Any]:
    """What torch's ``powerSGD_hook`` computes for one matrix, with its QR, warm start and error."""
    kept: dict[str, torch.Tensor] = {"error": torch.zeros_like(matrix)}
    q = torch.randn(1, _SIDE, _RANK)

    def run() -> None:
        given = matrix.clone()
        given.add_(kept["error"])
        before = given.clone()
        batch = given.unsqueeze(0)
        p = torch.bmm(batch, q)
        p.copy_(torch.linalg.qr(p).Q)
        torch.bmm(batch.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=batch)
        kept["error"] = before - given

    return run
