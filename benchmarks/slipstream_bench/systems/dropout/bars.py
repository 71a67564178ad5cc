"""``slipstream bench dropout``: speed and randomness of the fused dropout.

Times are CPU time of one thread. The process keeps its memory pages, so that no arm includes page
faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.techniques.dropout import kernels as dropout_kernels
from slipstream.techniques.dropout.nn import dropout
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.dropout.independence import (
    TESTS,
    Mask,
    correlation_test,
    keep_rate_deviation,
)

_ELEMENTS = 1 << 22
_P = 0.1
_PROBABILITIES = (0.1, 0.25, 0.5, 0.9)
_BLOCKS = 30
_MIN_P_VALUE = 0.001


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes half a minute: fewer seeds; speeds keep their full size."""
    if not dropout_kernels.kernels():
        yield not_judged("fused dropout", "x", ">= 12", why_no_library() or "no kernel runs here")
        return
    yield from _speed_rows(options)
    yield from _random_rows(options)
    yield from _level_rows(options)


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    keep_pages()
    with one_thread():
        yield from _forward_rows(options, torch.float32)
        yield from _forward_rows(options, torch.bfloat16)
        yield from _backward_rows(options)


def _forward_rows(options: BenchOptions, dtype: torch.dtype) -> Iterator[Bar]:
    kind = str(dtype).removeprefix("torch.")
    over, sweep = f"speed, {kind}: over F.dropout", f"speed, {kind}: time of a scaling sweep"
    if not (options.wants(over) or options.wants(sweep)):
        return
    options.progress(over)
    x = torch.randn(_ELEMENTS).to(dtype)
    taken = paired(
        {
            "ours": lambda: dropout(x, _P),
            "torch": lambda: functional.dropout(x, _P),
            "sweep": lambda: x * 1.1,
        },
        blocks=_BLOCKS,
    )
    each = {name: taken.median_s(name) / _ELEMENTS * 1e9 for name in taken.arms}
    detail = (
        f"{_ELEMENTS} elements, p = {_P}, forward; ns per element: F.dropout {each['torch']:.2f}, "
        f"ours {each['ours']:.2f}, sweep {each['sweep']:.2f}; "
        f"{next(iter(dropout_kernels.kernels()))}"
    )
    faster, slower = taken.ratio("torch", "ours"), taken.ratio("ours", "sweep")
    judged = dtype is torch.float32
    if options.wants(over):
        yield (
            faster.at_least(over, 12.0, detail=detail)
            if judged
            else faster.reported(over, detail=detail)
        )
    if options.wants(sweep):
        yield (
            slower.at_most(sweep, 2.0, detail=detail)
            if judged
            else slower.reported(sweep, detail=detail)
        )


def _backward_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "speed, float32: forward and backward over F.dropout"
    if not options.wants(bar):
        return
    options.progress(bar)
    x = torch.randn(_ELEMENTS, requires_grad=True)
    gradient = torch.ones(_ELEMENTS)

    def both(drop: Callable[[torch.Tensor, float], torch.Tensor]) -> Any:
        return torch.autograd.grad(drop(x, _P), x, gradient)

    arms = {"torch": lambda: both(functional.dropout), "ours": lambda: both(dropout)}
    ratio = paired(arms, blocks=_BLOCKS).ratio("torch", "ours")
    yield ratio.reported(bar, detail="the backward pass draws the mask again instead of storing it")


def mask(seed: int, p: float, elements: int) -> Mask:
    """Return the elements that are not dropped with this seed, bool [elements]."""
    words = dropout_kernels.draw_seed(torch.Generator().manual_seed(seed))
    retained: Mask = (dropout_kernels.dropout(torch.ones(elements), words, p) != 0).numpy()
    return retained


def _random_rows(options: BenchOptions) -> Iterator[Bar]:
    seeds = 50 if options.full else 10
    size = f"{seeds} masks of {_ELEMENTS} elements for each p of {_PROBABILITIES}"
    bar = "keep rate: all masks together, from the probability"
    if options.wants(bar):
        options.progress(bar)
        deviations = [
            keep_rate_deviation(
                np.concatenate([mask(seed, p, _ELEMENTS) for seed in range(seeds)]), p
            )
            for p in _PROBABILITIES
        ]
        worst = max(map(abs, deviations))
        yield at_most(bar, worst, 3.0, "sigma", n=len(deviations), detail=f"largest; {size}")
    for name, test in TESTS.items():
        bar = f"independence: {name}"
        if options.wants(bar):
            options.progress(bar)
            values = [
                test(mask(seed, p, _ELEMENTS), p) for p in _PROBABILITIES for seed in range(seeds)
            ]
            yield _p_value(bar, values, size)
    bar = "independence: masks of neighbouring seeds"
    if options.wants(bar):
        options.progress(bar)
        yield _p_value(bar, list(_neighbours(seeds)), "seeds that differ in one of 128 bits")


def _neighbours(seeds: int) -> Iterator[float]:
    x = torch.ones(_ELEMENTS)
    for number in range(seeds):
        words = dropout_kernels.draw_seed(torch.Generator().manual_seed(number))
        for word in range(2):
            neighbour = words.clone()
            neighbour[word] ^= 1 << (number * 7 % 63)
            masks = [
                (dropout_kernels.dropout(x, drawn, _P) != 0).numpy() for drawn in (words, neighbour)
            ]
            yield correlation_test(*masks)


def _p_value(bar: str, values: list[float], detail: str) -> Bar:
    """Return a row of the minimum of many p-values, corrected for their number (Bonferroni)."""
    corrected = min(1.0, min(values) * len(values))
    note = f"least p-value of {len(values)}, times their number; {detail}"
    return at_least(bar, corrected, _MIN_P_VALUE, "", n=len(values), detail=note)


def _level_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "every instruction set equals the reference to the bit"
    if not options.wants(bar):
        return
    options.progress(bar)
    rounds = 200 if options.full else 20
    checked = same = 0
    for number in range(rounds):
        generator = torch.Generator().manual_seed(number)
        size = int(torch.randint(1, 300_000 if number % 10 == 0 else 400, (), generator=generator))
        p = float(torch.rand((), generator=generator))
        for dtype in dropout_kernels.KERNEL_DTYPES:
            checked += 1
            same += _equals_reference(torch.randn(size, generator=generator).to(dtype), p)
    detail = f"random sizes, probabilities and dtypes; {', '.join(dropout_kernels.kernels())}"
    yield at_least(bar, same, checked, f"of {checked}", n=checked, detail=detail)


def _equals_reference(x: torch.Tensor, p: float) -> bool:
    seed = dropout_kernels.draw_seed(torch.Generator().manual_seed(x.numel()))
    expected = dropout_kernels.run_reference(x, seed, p).view(torch.uint8)
    made = []
    for kernel in dropout_kernels.kernels().values():
        y = torch.empty_like(x)
        dropout_kernels.run_kernel(x, y, seed, p, kernel)
        made.append(y.view(torch.uint8))
    return all(torch.equal(y, expected) for y in made)
