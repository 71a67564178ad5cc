"""``slipstream bench fusion``: fused steps compared with eager, torch.compile and a ceiling.

CPU time of one thread, forward and backward, dropout 0.1, with what ``-t fusion`` runs: the kernels
that speed up the step, or none. The ceiling is the time of the step's matmuls alone, on their
inputs in the step.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.child import Child
from slipstream.codegen import why_no_compiler
from slipstream.heap import keep_pages
from slipstream.technique import parse
from slipstream.techniques.fusion.backend import FusionBackend, use_fused
from slipstream.techniques.fusion.technique import Fusion
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import Predicted
from slipstream.workload import Workload, build_from
from slipstream_bench.harness import Paired, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.fusion import on_cuda
from slipstream_bench.systems.fusion.workloads import WORKLOADS
from slipstream_bench.systems.movement.layers import EncoderLayer

_CASES = (
    (4, 128, torch.float32, 1.10), (1, 512, torch.float32, 1.18),
    (4, 128, torch.bfloat16, 1.18), (1, 512, torch.bfloat16, 1.28),
)  # fmt: skip
_WIDTH, _HEADS = 768, 12
# Maximum wall time of a comparison: CPU time counts, and other programs share the core.
_BUDGET_S = 60.0
# Time of torch.compile, at 4 x 128.
_AT_LARGE = 1.25
# The sign of smaller effects is not judged.
_EFFECT = 0.03
# Error of kernels in Triton's interpreter, relative: float32 sums in another order.
_INTERPRETED = 1e-5
_ON_DEVICES = "slipstream_bench.systems.fusion.on_devices"
_CHILD_S = 900.0
_STEPS = 200
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: ten blocks per case, and of the six models those that `only` selects.

    torch.compile takes a minute per model. Full: thirty blocks.
    """
    if (reason := why_no_compiler()) is not None:
        yield not_judged("fused over eager", "x", ">= 1.10", reason)
        return
    bar = "gradients in float64 against autograd"
    if options.wants(bar):
        options.progress(bar)
        yield at_most(bar, _difference(), 1e-10, "relative", detail="dropout 0, every parameter")
    bar = "losses of 200 steps apart"
    if options.wants(bar, 15):
        options.progress(bar)
        losses = (
            _trained(lambda model: model),
            _trained(
                lambda model: torch.compile(
                    model, backend=FusionBackend(tuned=False), dynamic=False
                )
            ),
        )
        difference = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
        detail = f"dropout 0, AdamW; from {losses[0][0]:.3f} to {losses[0][-1]:.3f}"
        yield at_most(bar, 100 * difference, 1.0, "%", n=len(losses[0]), detail=detail)
    yield from _on_devices(options)
    yield from on_cuda.bars(options)
    keep_pages()
    with one_thread():
        for case in _CASES:
            yield from _case_rows(options, *case)
        yield from _against_compile(options)
        yield from _prediction_row(options)


def _difference() -> float:
    """Return the largest relative difference of any gradient of a layer in float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = EncoderLayer(128, 4, 512, 0.0).double()
    x = torch.randn(2, 64, 128, dtype=torch.float64)
    twin = copy.deepcopy(model)
    fused = torch.compile(twin, backend=FusionBackend(tuned=False), dynamic=False)
    for call in (model, fused):
        made = call(x)
        made.backward(torch.ones_like(made) + torch.linspace(0, 1, 128, dtype=torch.float64))
    pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
    # The gradient of the keys' bias is zero except for rounding, since softmax is invariant to it.
    return max(
        float((a.grad - b.grad).abs().max() / a.grad.abs().max())
        for (name, a), b in pairs
        if name != "key.bias" and a.grad is not None and b.grad is not None
    )


def _trained(prepared: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> list[float]:
    """Return losses of a layer that learns to return its inputs in another order."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = EncoderLayer(128, 4, 512, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call, losses = prepared(model), []
    for _ in range(_STEPS):
        x = torch.randn(4, 32, 128)
        loss = nn.functional.mse_loss(call(x), x.flip(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _on_devices(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows. Quick: two of the six models; full: all, compiled in two types.

    Without a device they check whether kernels are correct and compile, not their speed.
    """
    equal, code = "Triton kernels equal to torch's in its interpreter", "Triton kernels for sm_90"
    names = list(WORKLOADS) if options.full else ["ViT", "conv-norm net"]
    dtypes = ("float32", "bfloat16") if options.full else ("float32",)
    for bar, unit, cost in ((equal, "of their size", 120), (code, "that fail", 120)):
        if not options.wants(bar, cost):
            continue
        if importlib.util.find_spec("triton") is None:
            yield not_judged(bar, unit, "all", "triton is not installed")
            continue
        interpreted = {"TRITON_INTERPRET": "1"} if bar == equal else {}
        task = "apart" if bar == equal else "compiled"
        answers: list[Any] = []
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            variables = {"TRITON_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "", **interpreted}
            for name in names:
                for dtype in ("float32",) if bar == equal else dtypes:
                    options.progress(f"{bar}: {name}, {dtype}")
                    with Child("Triton", environment=variables) as child:
                        answers += child.call(
                            f"{_ON_DEVICES}:{task}", timeout_s=_CHILD_S, name=name, dtype=dtype
                        )
        models = f"regions of {', '.join(names)}, forward and backward; not run on a device"
        if bar == equal:
            detail = f"the largest of {len(answers)} {models}"
            yield at_most(bar, max(answers), _INTERPRETED, unit, n=len(answers), detail=detail)
        else:
            bad = [answer for answer in answers if answer.get("trouble") or answer["spilled_bytes"]]
            most = max(answer.get("registers", 0) for answer in answers)
            detail = f"{len(answers)} {models}; no spills, at most {most} registers"
            yield at_most(bar, len(bad), 0, unit, n=len(answers), detail=detail)


class _Products(TorchDispatchMode):
    """Records every matmul of a step with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            arguments = tuple(
                argument.detach() if isinstance(argument, Tensor) else argument for argument in args
            )
            self.calls.append((func, arguments))
        return func(*args, **(kwargs or {}))


def _case_rows(
    options: BenchOptions, batch: int, length: int, dtype: torch.dtype, target: float
) -> Iterator[Bar]:
    size = f"{str(dtype).removeprefix('torch.')}, {batch} x {length}"
    over, share = f"{size}: fused over eager", f"{size}: share of the ceiling"
    if not (options.wants(over) or options.wants(share)):
        return
    options.progress(size)
    taken = _measured(batch, length, dtype, 30 if options.full else 10)
    each = ", ".join(f"{name} {1e3 * taken.median_s(name):.1f} ms" for name in taken.arms)
    detail = f"BERT-base layer, dropout 0.1; {each}"
    if options.wants(over):
        yield taken.ratio("eager", "fused").at_least(over, target, detail=detail)
    if options.wants(share):
        eager, fused, products = map(taken.median_s, ("eager", "fused", "products"))
        reached = (eager - fused) / (eager - products)
        bound = f"the matmuls alone give {eager / products:.2f}x"
        yield at_least(share, reached, 0.75, "of the gain", detail=f"{bound}; {each}")


def _measured(batch: int, length: int, dtype: torch.dtype, blocks: int) -> Paired:
    _fresh()
    model = EncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH).to(dtype)
    x = torch.randn(batch, length, _WIDTH, dtype=dtype, requires_grad=True)
    eager = _step(model, model, x)
    with _Products() as recorded:
        eager()

    def products() -> None:
        for operator, arguments in recorded.calls:
            operator(*arguments)

    return _in_turns({"eager": eager, "fused": _fused(model, x), "products": products}, blocks)


def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def _step(call: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass of `call` with the parameters of `owner`."""
    gradient = torch.randn_like(owner(x).detach())

    def run() -> None:
        x.grad = None
        for parameter in owner.parameters():
            parameter.grad = None
        call(x).backward(gradient)

    return run


def _fused(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return the step of a copy as ``-t fusion`` runs it."""
    twin = copy.deepcopy(model)
    use_fused(twin)
    return _step(twin, twin, x)


def _in_turns(arms: Mapping[str, Callable[[], object]], blocks: int) -> Paired:
    for arm in arms.values():
        arm()  # compiles
    return paired(arms, blocks=blocks, budget_s=_BUDGET_S)


def _against_compile(options: BenchOptions) -> Iterator[Bar]:
    """Compare six models, each compiled by slipstream and by torch in one run."""
    for name, make in WORKLOADS.items():
        bar = f"{name}: fused over torch.compile"
        named = bool(options.only) and options.wants(bar)
        if not (named or (options.full and options.wants(bar, 120))):
            continue
        options.progress(bar)
        _fresh()
        model, x = make()
        x.requires_grad_()
        twin = copy.deepcopy(model)
        theirs = _step(torch.compile(twin, dynamic=False), twin, x)
        arms = {"eager": _step(model, model, x), "fused": _fused(model, x), "compile": theirs}
        taken = _in_turns(arms, 30 if options.full else 10)
        over = taken.ratio("eager", "fused").value
        detail = f"over eager {over:.2f}; {taken}"
        target = _AT_LARGE if name == "BERT" else 1.0
        yield taken.ratio("compile", "fused").at_least(bar, target, detail=detail)


def _prediction_row(options: BenchOptions) -> Iterator[Bar]:
    """Compare the speed-ups of six models predicted for fusion, in two precisions, with real
    ones."""
    bar, other = "predicted step, twelve cases", "sign of effects beyond 3 %"
    requested = bool(options.only) or options.full
    if not (requested and (options.wants(bar, 300) or options.wants(other, 300))):
        return
    cases = {
        f"{name}, {short}": _predicted_and_measured(make, dtype, options)
        for name, make in WORKLOADS.items()
        for short, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }  # fmt: skip
    errors = [abs(measured / predicted - 1) for predicted, measured in cases.values()]
    beyond = {n: pair for n, pair in cases.items() if abs(pair[1] - 1) > _EFFECT}
    wrong = [
        n for n, (predicted, measured) in beyond.items() if (predicted - 1) * (measured - 1) <= 0
    ]
    words = ", ".join(f"{n} {p:.3f}x and {m:.3f}x" for n, (p, m) in cases.items())
    detail = f"speed-up predicted and measured: {words}"
    median = float(np.median(errors))
    yield at_most(bar, median, 0.10, "relative", n=len(errors), detail=detail)
    missed = f"wrong: {', '.join(wrong) or 'none'}"
    yield at_most(other, len(wrong), 0, f"of {len(beyond)}", n=len(beyond), detail=missed)


def _predicted_and_measured(
    make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype, options: BenchOptions
) -> tuple[float, float]:
    """Return the predicted and measured speed-up of a training step."""
    _fresh()
    model, x = make()
    model, x = model.to(dtype), x.to(dtype)
    target = torch.randn_like(model(x).detach())

    def parts() -> tuple[Any, ...]:
        twin = copy.deepcopy(model)
        loss = nn.functional.mse_loss
        return twin, (x, target), loss, torch.optim.SGD(twin.parameters(), lr=1e-4)

    options.progress(f"predicting {type(model).__name__} in {dtype}")
    graph = profile(Workload.of(*parts()), threads=1)
    (prediction,) = predict(graph, parse("fusion"))
    plain, ours = build_from(parts(), [], 0, "plain"), build_from(parts(), [Fusion()], 0, "fused")
    taken = _in_turns({"eager": plain.step, "fused": ours.step}, 20 if options.full else 8)
    predicted = 1.0 / prediction.ratio if isinstance(prediction, Predicted) else 1.0
    return predicted, taken.ratio("eager", "fused").value
