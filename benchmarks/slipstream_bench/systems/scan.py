"""``slipstream bench scan``: backward passes of recurrences, compared with torch's.

Times are CPU time of one thread. The process keeps its memory pages, so that no arm includes page
faults. The training rows use the paper's task: bit-streams whose share of ones determines the
class.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.surgery import saved_bytes
from slipstream.techniques.scan import backprop, linear_recurrence, plan, rnn
from slipstream.techniques.scan import kernels as scan_kernels
from slipstream.techniques.scan.affine import dense_recurrence
from slipstream.techniques.scan.cells import Saved, chunked, tree
from slipstream.techniques.scan.jacobians import convolution_pattern, jacobian_transposed
from slipstream.techniques.scan.nn import CHUNK
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_BACKWARD = {
    (2, 20, 1000): 100.0, (1, 8, 4000): 400.0, (16, 20, 1000): 18.0, (16, 20, 10000): 15.0,
    (16, 64, 1000): 8.0,
}  # fmt: skip
_CELLS: dict[str, tuple[Callable[..., nn.RNNBase], float]] = {
    "GRU": (nn.GRU, 8.0),
    "LSTM": (nn.LSTM, 1.0),
}
_STEP = {16: 3.5, 2: 8.0}
_SHAPES = ((1, 8, 100), (4, 64, 50), (32, 128, 20), (64, 256, 10), (128, 512, 4))


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes two minutes: fewer blocks."""
    if not scan_kernels.available():
        yield not_judged("backward", "x", ">= 100", why_no_library() or "no kernel runs here")
        return
    keep_pages()
    blocks = 15 if options.full else 7
    with one_thread():
        yield from _gradient_rows(options)
        yield from _backward_rows(options, blocks)
        yield from _step_rows(options, blocks)
        yield from _auto_rows(options, blocks)
        yield from _planner_rows(options)
        yield from _primitive_rows(options, blocks)
        yield from _memory_row(options)
        yield from _jacobian_rows(options)
        yield from _pruned_rows(options)
    yield from _threads_rows(options, blocks)


def _gradient_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "gradients: largest difference from autograd, float64"
    if not options.wants(bar):
        return
    options.progress(bar)
    worst, count = 0.0, 0
    for make in (nn.RNN, nn.GRU, nn.LSTM):
        for steps in (1, 2, 31, 257):
            torch.manual_seed(steps)
            module = make(3, 20, 2).double()
            x = torch.randn(steps, 4, 3, dtype=torch.float64, requires_grad=True)
            sources = [x, *module.parameters()]
            expected = torch.autograd.grad(module(x)[0].sin().sum(), sources)
            for way in ("fused", "chunked", "tree"):
                gradients = torch.autograd.grad(
                    rnn(module, x, backward=way)[0].sin().sum(), sources
                )
                for gradient, reference in zip(gradients, expected, strict=True):
                    worst = max(worst, float((gradient - reference).norm() / reference.norm()))
                    count += 1
    yield at_most(bar, worst, 1e-10, "", n=count, detail="RNN, GRU, LSTM of 2 layers; three ways")


def _backward(module: nn.RNNBase, y: torch.Tensor) -> Callable[[], object]:
    loss, sources = y[-1].sum(), list(module.parameters())
    return lambda: torch.autograd.grad(loss, sources, retain_graph=True)


def _backward_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    cases: list[tuple[str, Callable[..., nn.RNNBase], tuple[int, int, int], float]]
    cases = [("RNN", nn.RNN, shape, bar) for shape, bar in _BACKWARD.items()]
    cases += [(name, make, (16, 20, 1000), bar) for name, (make, bar) in _CELLS.items()]
    for name, make, (batch, hidden, steps), target in cases:
        bar = f"backward over nn.{name}, batch {batch}, hidden {hidden}, {steps} steps"
        if not options.wants(bar):
            continue
        options.progress(bar)
        torch.manual_seed(0)
        module, x = make(1, hidden), torch.randn(steps, batch, 1)
        taken = paired(
            {
                "ours": _backward(module, rnn(module, x, backward="fused")[0]),
                "torch": _backward(module, module(x)[0]),
            },
            blocks=blocks,
        )
        yield taken.ratio("torch", "ours").at_least(bar, target, detail=f"loss at the end; {taken}")


def _stream(batch: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    kinds = torch.randint(0, 10, (batch,))
    bits = torch.rand(steps, batch) < 0.05 + 0.1 * kinds
    return bits.float().unsqueeze(-1), kinds


class _Trainer:
    """A classifier of bit-streams with its optimizer and a batch; a call is a training step."""

    def __init__(self, batch: int, way: str) -> None:
        torch.manual_seed(0)
        self._rnn, self._head, self._way = nn.RNN(1, 20), nn.Linear(20, 10), way
        parameters = [*self._rnn.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=1e-5)
        self._x, self._kinds = _stream(batch, 1000)
        self.losses: list[float] = []

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        states = rnn(self._rnn, self._x, backward=self._way)[0]  # type: ignore[arg-type]
        loss = cross_entropy(self._head(states[-1]), self._kinds)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def _step_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for batch, target in _STEP.items():
        bar = f"training step over nn.RNN, batch {batch}, hidden 20, 1000 steps"
        if not options.wants(bar):
            continue
        options.progress(bar)
        ours, theirs = _Trainer(batch, "auto"), _Trainer(batch, "framework")
        taken = paired({"ours": ours, "torch": theirs}, blocks=blocks)
        yield taken.ratio("torch", "ours").at_least(bar, target, detail=f"with Adam; {taken}")
        bar = f"the same loss, batch {batch}"
        pairs = list(zip(ours.losses, theirs.losses, strict=False))
        worst = max(abs(a - b) / b for a, b in pairs)
        yield at_most(bar, worst, 1e-4, "", n=len(pairs), detail="largest relative difference")


def _auto_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for name, make in (("RNN", nn.RNN), ("GRU", nn.GRU), ("LSTM", nn.LSTM)):
        for batch, hidden, steps in _SHAPES:
            bar = f"auto is never slower: {name}, batch {batch}, hidden {hidden}, {steps} steps"
            if not options.wants(bar):
                continue
            options.progress(bar)
            module, x = make(hidden, hidden), torch.randn(steps, batch, hidden)
            arms = {way: functools.partial(_train, module, x, way) for way in ("auto", "framework")}
            taken = paired(arms, blocks=blocks, budget_s=8.0)
            yield taken.ratio("framework", "auto").at_least(bar, 0.95, detail=f"{taken}")


def _train(module: nn.RNNBase, x: torch.Tensor, way: str) -> None:
    y = rnn(module, x, backward=way)[0]  # type: ignore[arg-type]
    torch.autograd.grad(y.sum(), list(module.parameters()))


_GRID = tuple(itertools.product((1, 2, 8, 32, 128), (8, 20, 64, 128, 256), (8, 64, 512, 4096)))
# From this width on a batched method needs this many times the arithmetic of the loop: it is never
# the fastest on one thread, and takes minutes.
_WIDE, _MAX_MULTIPLICATIONS = 64, 1 << 32


def _planner_rows(options: BenchOptions) -> Iterator[Bar]:
    """Check whether the method that `auto` chooses is fastest, and its time as predicted."""
    choice = "cells where the way chosen is within 1.15x of the best"
    predicted = "cells where it takes what was told within 25 %"
    if not (options.wants(choice, 400) or options.wants(predicted, 400)):
        return
    cells = [
        (batch, hidden, steps)
        for batch, hidden, steps in (_GRID if options.full else _GRID[1::7])
        if batch * hidden**2 * steps <= (_MAX_MULTIPLICATIONS if options.full else 1 << 28)
    ]
    over, off = {}, {}
    seconds = plan.stopwatch("cpu")
    for batch, hidden, steps in cells:
        options.progress(f"choice for batch {batch}, hidden {hidden}, {steps} steps")
        module, x = nn.RNN(hidden, hidden), torch.randn(steps, batch, hidden)
        shape = plan.Shape("tanh", batch, hidden, hidden, x.dtype, True, 1)
        chosen = plan.choose(shape, steps, rnn)
        ways = [way for way in plan.WAYS if way in ("fused", "framework") or hidden < _WIDE]
        least = dict.fromkeys(ways, float("inf"))
        for sample in range(6):
            for way in ways:
                duration_s = seconds(functools.partial(_train, module, x, way))
                if sample:  # the first one includes one-time work
                    least[way] = min(least[way], duration_s)
        cell = f"{batch}, {hidden}, {steps}"
        over[cell] = least[chosen] / min(least.values())
        off[cell] = 100 * abs(plan.paces(shape, rnn)[chosen].seconds(steps) / least[chosen] - 1)
    for bar, values, limit in ((choice, over, 1.15), (predicted, off, 25.0)):
        if options.wants(bar, 400):
            beyond = {cell: value for cell, value in values.items() if value > limit}
            shown = "; ".join(f"{cell}: {value:.3g}" for cell, value in beyond.items())
            yield at_least(
                bar, 100 * (1 - len(beyond) / len(cells)), 95.0, "%", n=len(cells),
                detail=f"RNN, batch, hidden, steps; median {np.median(list(values.values())):.3g}"
                + f"; beyond: {shown}" * bool(beyond), data=values,
            )  # fmt: skip


def _primitive_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    from torch._higher_order_ops.associative_scan import associative_scan

    for hidden in (8, 20, 64):
        bar = f"tree over associative_scan, dense, hidden {hidden}, 256 steps"
        if options.wants(bar):
            options.progress(bar)
            a, b = torch.randn(256, 2, hidden, hidden) / hidden, torch.randn(256, 2, hidden)

            def combine(
                first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
            ) -> tuple[torch.Tensor, torch.Tensor]:
                (a, b), (later_a, later_b) = first, second
                return later_a @ a, (later_a @ b.unsqueeze(-1)).squeeze(-1) + later_b

            taken = paired(
                {
                    "ours": functools.partial(dense_recurrence, a, b),
                    "torch": functools.partial(
                        associative_scan, combine, (a, b), dim=0, combine_mode="generic"
                    ),
                },
                blocks=blocks,
            )
            yield taken.ratio("torch", "ours").at_least(bar, 2.5, detail=f"affine pairs; {taken}")
    yield from _diagonal_rows(options, blocks)
    yield from _batched_rows(options, blocks)


def _diagonal_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    speed, back = "diagonal: time of a sweep", "diagonal: backward over forward"
    if not (options.wants(speed) or options.wants(back)):
        return
    options.progress(speed)
    a, b = torch.rand(20_000, 256), torch.randn(20_000, 256)
    a.requires_grad_()
    out = torch.empty_like(b)
    made = linear_recurrence(a, b, structure="diag")
    gradient = torch.ones_like(made)
    taken = paired(
        {
            "forward": lambda: linear_recurrence(a.detach(), b, structure="diag"),
            "sweep": lambda: torch.mul(a.detach(), b, out=out),
            "backward": lambda: torch.autograd.grad(made, a, gradient, retain_graph=True),
        },
        blocks=blocks,
    )
    detail = f"20,000 steps of 256; {taken}"
    if options.wants(speed):
        yield taken.ratio("forward", "sweep").at_most(speed, 1 / 0.6, detail=detail)
    if options.wants(back):
        yield taken.ratio("backward", "forward").at_most(back, 2.5, detail=detail)


def _batched_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    torch.manual_seed(0)
    module, x = nn.RNN(1, 20), torch.randn(1000, 2, 1)
    y = module(x)[0]
    saved, dy, zero = _saved(module, x)
    arms: dict[str, Callable[[], object]] = {
        "chunks of 32": lambda: chunked(saved, dy, zero, None, CHUNK),
        "tree": lambda: tree(saved, dy, zero, None),
    }
    for name, run in arms.items():
        bar = f"{name} over nn.RNN backward, batch 2, hidden 20, 1000 steps"
        if options.wants(bar):
            options.progress(bar)
            taken = paired({"ours": run, "torch": _backward(module, y)}, blocks=blocks)
            yield taken.ratio("torch", "ours").reported(bar, detail=f"{taken}")


def _saved(module: nn.RNN, x: torch.Tensor) -> tuple[Saved, torch.Tensor, torch.Tensor]:
    """Return inputs of a backward pass of `module`, the last state's gradient, and a zero state."""
    states = module(x)[0].detach()
    none, zero = states[:0], torch.zeros_like(states[0])
    weight = dict(module.named_parameters())["weight_hh_l0"].detach()
    gradient = torch.zeros_like(states)
    gradient[-1] = 1.0
    return Saved("tanh", weight, states, none, none, zero, None), gradient, zero


def _memory_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "chunks: peak beyond what is saved, over what nn.RNN saves"
    if not options.wants(bar):
        return
    options.progress(bar)
    module, x = nn.RNN(1, 20), torch.randn(10_000, 16, 1)
    theirs = saved_bytes(functools.partial(module, x), module.parameters())
    saved, gradient, zero = _saved(module, x)
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        chunked(saved, gradient, zero, None, CHUNK)
    results = profiled.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in events))
    detail = f"tensors, {peak / 1e6:.1f} of {theirs / 1e6:.1f} MB; batch 16, hidden 20, 10,000"
    yield at_most(bar, peak / theirs, 2.0, "x", detail=f"{detail} steps")


def _jacobian_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare sparse Jacobians with a loop of autograd, one call per output, some of them timed."""
    calls = 200
    convolution = nn.Conv2d(3, 64, 3, padding=1)
    cases: tuple[tuple[str, nn.Module, torch.Tensor, float], ...] = (
        ("convolution of 3 to 64, 32 x 32", convolution, torch.randn(3, 32, 32), 3e3),
        ("ReLU of 64 x 32 x 32", nn.ReLU(), torch.randn(64, 32, 32), 1e5),
    )
    for name, layer, x, target in cases:
        bar = f"Jacobian over a loop of autograd: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        x.requires_grad_()
        y = layer(x)
        rows = torch.eye(calls, y.numel()).reshape(calls, *y.shape)

        def loop(y: Any = y, x: Any = x, rows: Any = rows) -> None:
            for row in rows:
                torch.autograd.grad(y, x, row, retain_graph=True)

        def generate(layer: Any = layer, x: Any = x) -> None:
            convolution_pattern.cache_clear()
            jacobian_transposed(layer, x.detach())

        taken = paired({"ours": generate, f"{calls} of autograd": loop}, blocks=9)
        whole = y.numel() / calls * taken.ratio(f"{calls} of autograd", "ours").value
        yield at_least(bar, whole, target, "x", n=9, detail=f"{y.numel():,} calls; {taken}")
    bar = "Jacobian of a convolution: first over with other weights"
    if options.wants(bar):
        options.progress(bar)
        x = torch.randn(3, 32, 32)
        matrix = jacobian_transposed(convolution, x)

        def first() -> None:
            convolution_pattern.cache_clear()
            jacobian_transposed(convolution, x)

        taken = paired(
            {"again": lambda: jacobian_transposed(convolution, x, matrix), "first": first},
            blocks=15,
        )
        yield taken.ratio("first", "again").at_least(bar, 5.0, detail=f"{taken}")


def _threads_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    """Compare two threads with one, by wall time, since other programs on that core count."""
    module, x = nn.RNN(1, 20), torch.randn(1000, 16, 1)
    run = _backward(module, rnn(module, x, backward="fused")[0])
    a, b = torch.rand(20_000, 256), torch.randn(20_000, 256)
    cases: dict[str, tuple[Callable[[], object], float]] = {
        "two threads over one, RNN backward, batch 16, hidden 20, 1000 steps": (run, 1.7),
        "two threads over one, diagonal, batch 1, 256 wide, 20,000 steps": (
            lambda: linear_recurrence(a, b, structure="diag"), 1.5,
        ),
    }  # fmt: skip
    for bar, (function, target) in cases.items():
        if not options.wants(bar):
            continue
        options.progress(bar)

        def on(threads: int, function: Callable[[], object] = function) -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                for _ in range(10):
                    function()
            finally:
                torch.set_num_threads(before)

        arms = {f"{n} threads": functools.partial(on, n) for n in (2, 1)}
        taken = paired(arms, clock="wall", blocks=blocks)
        yield taken.ratio("1 threads", "2 threads").at_least(bar, target, detail=f"{taken}")


def _pruned_chain(width: int) -> list[nn.Module]:
    """Return VGG-11 for 32 x 32 images, with 97 % of its convolutions' weights zero; width 64."""
    layers: list[nn.Module] = []
    inputs = 3
    for times, pool in ((1, 1), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1), (8, 0), (8, 1)):
        outputs = times * width
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * pool
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(inputs, 10)]
    for layer in layers:
        layer.double()
        if isinstance(layer, nn.Conv2d):
            with torch.no_grad():
                # Remaining weights are scaled, so that activations keep their size.
                layer.weight *= (torch.rand_like(layer.weight) < 0.03) * (6 / 0.03) ** 0.5
    return layers


def _pruned_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare multiplications of a scan over the paper's chain with back-propagation's."""
    exact = "pruned chain: largest difference from autograd, float64"
    path = "pruned chain: critical path of a scan over back-propagation"
    if not (options.wants(exact) or options.wants(path)):
        return
    torch.manual_seed(0)
    width = 64 if options.full else 16
    layers = _pruned_chain(width)
    activations = [torch.randn(1, 3, 32, 32, dtype=torch.float64, requires_grad=True)]
    for layer in layers:
        activations.append(layer(activations[-1]))
    gradient = torch.randn(1, 10, dtype=torch.float64)
    expected = torch.autograd.grad(activations[-1], activations, gradient)
    chains = {}
    for levels in (1, 2, 3):
        options.progress(f"{path}: {levels} levels")
        chains[levels] = backprop(layers, activations[0][0].detach(), gradient[0], levels)
    worst = max(
        float(abs(gradient - reference.numpy().reshape(-1)).max() / reference.abs().max())
        for chain in chains.values()
        for gradient, reference in zip(chain.gradients, reversed(expected), strict=True)
    )
    shape = f"VGG-11 of width {width}, 32 x 32, 97 % of weights zero"
    if options.wants(exact):
        yield at_most(exact, worst, 1e-10, "", n=len(chains) * len(expected), detail=shape)
    if options.wants(path):
        levels = min(chains, key=lambda count: chains[count].critical)
        best = chains[levels]
        by_levels = "; ".join(
            f"{count} levels: {chain.critical / 1e6:.3f} M, by level "
            + ", ".join(f"{sum(level) / 1e6:.3f}" for level in chain.operations if level)
            for count, chain in chains.items()
        )
        verdict = "scan" if best.pays else "back-propagation"
        detail = f"{shape}; verdict: {verdict}; sequential {best.sequential / 1e6:.3f} M "
        yield Bar(
            path, best.critical / best.sequential, "x", "reported", None, len(chains),
            f"no bar; {detail}multiplications; {by_levels}",
        )  # fmt: skip
