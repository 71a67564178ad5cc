"""Speed of the encoders, real ranks on shaped links, and the study's set-ups.

Encoders are timed by CPU time of one thread, in a process that keeps its pages. Ranks run in a
network lab, which needs root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.techniques.distributed.compression import kernels
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.compression import convergence, ranks, utility

_NUMBERS = 4_000_000
_SIDE = 2000
_RANK = 4
_BLOCKS = 15
_SIZE = "16 MB, one thread"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer links and steps; encoders keep their full size."""
    yield from _encoders(options)
    yield from utility.bars(options)
    yield from convergence.bars(options)
    yield from ranks.bars(options)


def _encoders(options: BenchOptions) -> Iterator[Bar]:
    if not kernels.kernels():
        reason = why_no_library() or "no kernel runs here"
        yield not_judged("top-k 1 % against torch.topk", "x", ">= 8", reason)
        return
    keep_pages()
    with one_thread():
        drawn = torch.Generator().manual_seed(0)
        gradient = torch.randn(_NUMBERS, generator=drawn)
        # Rows have different sizes, as gradients do.
        gradient *= torch.rand(_SIDE, generator=drawn).repeat_interleave(_NUMBERS // _SIDE)
        yield from _top(options, gradient)
        yield from _blocks(options, gradient)
        yield from _low_rank(options, gradient)


def _top(options: BenchOptions, gradient: torch.Tensor) -> Iterator[Bar]:
    bar = "top-k 1 % against torch.topk"
    if not options.wants(bar):
        return
    options.progress(bar)
    residual, k = torch.zeros_like(gradient), _NUMBERS // 100
    indices, values = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
    arms = {
        "torch": lambda: torch.topk(gradient.abs(), k, sorted=False),
        "ours": lambda: kernels.top(gradient, residual, indices, values),
    }
    ratio = paired(arms, blocks=_BLOCKS).ratio("torch", "ours")
    detail = f"{_SIZE}; ours also adds and stores the residual"
    yield ratio.at_least(bar, 8.0, detail=detail)


def _blocks(options: BenchOptions, gradient: torch.Tensor) -> Iterator[Bar]:
    # A copy of 6 bytes per number touches as many as reading two and writing one of 4 bytes.
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
        arms = {"copy": lambda: target.copy_(source), "ours": encode}
        ratio = paired(arms, blocks=_BLOCKS).ratio("ours", "copy")
        yield ratio.at_most(bar, most, detail=_SIZE)


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

    ratio = paired({"torch": _torch_hook(matrix), "ours": ours}, blocks=_BLOCKS).ratio(
        "torch", "ours"
    )
    detail = (
        f"{_SIZE}; the operators of torch's hook with error feedback, in its order, without its "
        "collectives; encode and decode"
    )
    yield ratio.at_least(bar, 1.5, detail=detail)


def _torch_hook(matrix: torch.Tensor) -> Callable[[], Any]:
    """Return torch's ``powerSGD_hook`` of one matrix, with its QR, warm start and error."""
    state: dict[str, torch.Tensor] = {"error": torch.zeros_like(matrix)}
    q = torch.randn(1, _SIDE, _RANK)

    def run() -> None:
        compressed = matrix.clone()
        compressed.add_(state["error"])
        before = compressed.clone()
        batch = compressed.unsqueeze(0)
        p = torch.bmm(batch, q)
        p.copy_(torch.linalg.qr(p).Q)
        torch.bmm(batch.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=batch)
        state["error"] = before - compressed

    return run
