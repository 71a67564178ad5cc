"""``slipstream bench fusion``: a layer's step fused, over eager, torch.compile and its ceiling.

CPU time of one thread, forward and backward, dropout 0.1. The ceiling is the step's matrix products
alone, run on what they are given in the step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.codegen import why_no_compiler
from slipstream.heap import keep_pages
from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.selection import Factor, select
from slipstream_bench.harness import Paired, one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.fusion.networks import exhaustive, in_order, network
from slipstream_bench.systems.movement.layers import EncoderLayer

_CASES = (
    (4, 128, torch.float32, 1.10), (1, 512, torch.float32, 1.18),
    (4, 128, torch.bfloat16, 1.18), (1, 512, torch.bfloat16, 1.28),
)  # fmt: skip
_WIDTH, _HEADS = 768, 12
_DRAWN = 200
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: ten blocks a case, without torch.compile, which takes minutes; full: thirty."""
    if (reason := why_no_compiler()) is not None:
        yield not_judged("fused over eager", "x", ">= 1.10", reason)
        return
    bar = "gradients in float64 against autograd"
    if options.wants(bar):
        options.progress(bar)
        yield at_most(bar, _difference(), 1e-10, "relative", detail="dropout 0, every parameter")
    yield from _selection_rows(options)
    keep_pages()
    with one_thread():
        for case in _CASES:
            yield from _case_rows(options, *case)


def _selection_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "layouts chosen at the exhaustive optimum's cost"
    if options.wants(bar):
        options.progress(bar)
        rows = [(select(n).cost, exhaustive(n), in_order(n)) for n in map(network, range(_DRAWN))]
        equal = sum(ours == best or abs(ours - best) <= 1e-12 * best for ours, best, _ in rows)
        possible = [(best, greedy) for _, best, greedy in rows if math.isfinite(best)]
        reached = sum(greedy <= best * (1 + 1e-12) for best, greedy in possible)
        nowhere = sum(not math.isfinite(greedy) for _, greedy in possible)
        detail = (
            f"networks with residuals, shared weights and equal ends; operator by operator "
            f"{reached} of {len(possible)} are at the optimum, {nowhere} end where nothing fits"
        )
        yield at_least(bar, equal, _DRAWN, f"of {_DRAWN}", n=_DRAWN, detail=detail)
    bar = "layouts of 40 operators, 200 configurations each"
    if options.wants(bar):
        rng = np.random.default_rng(0)
        drawn = [Factor((n, n + 1, n // 4 * 4 - 1), rng.random((6, 6, 6))) for n in range(40)]
        taken = times_s(lambda: select(drawn), 3)
        yield at_most(bar, float(np.median(taken)), 10, "s", n=len(taken))


def _difference() -> float:
    """The largest relative difference of any gradient of a layer in float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = EncoderLayer(128, 4, 512, 0.0).double()
    x = torch.randn(2, 64, 128, dtype=torch.float64)
    twin = copy.deepcopy(model)
    fused = torch.compile(twin, backend=FusionBackend(), dynamic=False)
    for call in (model, fused):
        made = call(x)
        made.backward(torch.ones_like(made) + torch.linspace(0, 1, 128, dtype=torch.float64))
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    # The gradient of the keys' bias is zero but for rounding: softmax does not see it.
    return max(
        float((a.grad - b.grad).abs().max() / a.grad.abs().max())
        for (name, a), b in pairs
        if name != "key.bias" and a.grad is not None and b.grad is not None
    )


class _Products(TorchDispatchMode):
    """Keeps every matrix product of a step with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            given = tuple(one.detach() if isinstance(one, Tensor) else one for one in args)
            self.calls.append((func, given))
        return func(*args, **(kwargs or {}))


def _case_rows(
    options: BenchOptions, batch: int, length: int, dtype: torch.dtype, target: float
) -> Iterator[Bar]:
    size = f"{str(dtype).removeprefix('torch.')}, {batch} x {length}"
    over, share, peer = (
        f"{size}: fused over eager", f"{size}: share of the ceiling",
        f"{size}: fused over torch.compile",
    )  # fmt: skip
    compiled = options.full and options.wants(peer)
    if not (options.wants(over) or options.wants(share) or compiled):
        return
    options.progress(size)
    taken = _measured(batch, length, dtype, compiled, 30 if options.full else 10)
    each = ", ".join(f"{name} {1e3 * taken.median_s(name):.1f} ms" for name in taken.arms)
    detail = f"BERT-base layer, dropout 0.1; {each}"
    if options.wants(over):
        yield taken.ratio("eager", "fused").at_least(over, target, detail=detail)
    if options.wants(share):
        eager, fused, products = map(taken.median_s, ("eager", "fused", "products"))
        reached = (eager - fused) / (eager - products)
        bound = f"the products alone would be {eager / products:.2f}x"
        yield at_least(share, reached, 0.75, "of the gain", detail=f"{bound}; {each}")
    if compiled:
        bar = 1.25 if dtype is torch.float32 and batch == 4 else 1.0
        yield taken.ratio("compile", "fused").at_least(peer, bar, detail=detail)


def _measured(batch: int, length: int, dtype: torch.dtype, compiled: bool, blocks: int) -> Paired:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = EncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH).to(dtype)
    x = torch.randn(batch, length, _WIDTH, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, length, _WIDTH, dtype=dtype)

    def step(call: Callable[[Tensor], Tensor], owner: nn.Module) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            for parameter in owner.parameters():
                parameter.grad = None
            call(x).backward(gradient)

        return run

    with _Products() as kept:
        model(x).backward(gradient)

    def products() -> None:
        for operator, given in kept.calls:
            operator(*given)

    twin = copy.deepcopy(model)
    # What `-t fusion` runs: with the gate.
    fused = torch.compile(twin, backend="slipstream_fusion", dynamic=False)
    arms: dict[str, Callable[[], object]] = {
        "eager": step(model, model), "fused": step(fused, twin), "products": products,
    }  # fmt: skip
    if compiled:
        third = copy.deepcopy(model)
        arms["compile"] = step(torch.compile(third, dynamic=False), third)
    for arm in arms.values():
        arm()
    return paired(arms, blocks=blocks)
