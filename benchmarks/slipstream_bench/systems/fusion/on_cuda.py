"""Rows of ``slipstream bench fusion`` on a CUDA device: Triton compared with torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from slipstream.techniques.fusion.backend import use_fused
from slipstream_bench.harness import on_cuda, paired
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.fusion.workloads import WORKLOADS

# The number of items of a CPU bench would leave a GPU idle.
_TIMES = 32
_QUICK = ("BERT", "Llama")
_BUDGET_S = 12.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: two of the six models; torch.compile takes half a minute for each."""
    for name, make in WORKLOADS.items():
        bar = f"{name} on a CUDA device: fused over torch.compile"
        requested = bool(options.only) or options.full or name in _QUICK
        if not (requested and options.wants(bar)):
            continue
        if not torch.cuda.is_available():
            yield not_judged(bar, "x", ">= 1", "no CUDA device")
            continue
        options.progress(bar)
        yield _row(bar, make)


def _row(bar: str, make: Callable[[], tuple[nn.Module, Tensor]]) -> Bar:
    """Compare steps in bfloat16, forward and backward, until the device is done."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = make()
    model = model.to("cuda", torch.bfloat16)
    x = x.repeat(_TIMES, *[1] * (x.dim() - 1)).to("cuda", torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(model(x).detach())
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    use_fused(ours)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
        "eager": (model, model),
        "fused": (ours, ours),
        "compile": (torch.compile(theirs, dynamic=False), theirs),
    }

    def step(call: Callable[[Tensor], Tensor], owner: nn.Module) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(call(x), [x, *owner.parameters()], gradient)

        return run

    arms = {name: step(*of_arm) for name, of_arm in calls.items()}
    for arm in arms.values():
        arm()  # compiles
    taken = paired(arms, clock="wall", blocks=40, budget_s=_BUDGET_S)
    over = taken.ratio("eager", "fused").value
    detail = f"bfloat16, {tuple(x.shape)}; over eager {over:.2f}; {taken}"
    return on_cuda(taken.ratio("compile", "fused").at_least(bar, 1.0, detail=detail))
