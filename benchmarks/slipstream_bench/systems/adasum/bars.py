"""``slipstream bench adasum``: correctness and cost of the rule, and its effect on training.

Real ranks are processes on this machine (gloo), in its memory and on shaped links; training is
simulated, with many workers in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from slipstream.measure.memory import resettable
from slipstream.ranks import Netlab, why_no_netlab
from slipstream.techniques.distributed.adasum import kernels
from slipstream.techniques.distributed.adasum.rule import weights
from slipstream_bench.harness import Paired, guarded, one_thread, paired, times_s
from slipstream_bench.lab import MBIT, Turn, Where, arms_on_ranks, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.adasum import rank, training
from slipstream_bench.systems.adasum.reference import adasum_of

_NUMBERS = 25_000_000
# The rate that four links carry here without using the ranks' cores.
_SHAPED = 400
# Timeout of a communication, and seconds after which no further turn begins.
_TIMEOUT_S, _BUDGET_S = 300.0, 120.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: one seed, and fewer learning rates for 64 workers."""
    with one_thread():
        yield from _algebra(options)
        yield from _cost(options)
        yield from _memory(options)
        yield from _growth(options)
        yield from training.bars(options)


def _algebra(options: BenchOptions) -> Iterator[Bar]:
    bar = "identities and scaled vectors, 1e-18 to 1e18"
    if not options.wants(bar):
        return
    options.progress(bar)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for exponent in range(-18, 19, 6):
        scale = 10.0**exponent
        a, b = (scale * torch.randn(1000, generator=generator) for _ in range(2))
        exact = a.double()
        orthogonal = b.double() - (b.double() @ exact) / (exact @ exact) * exact
        cases = [
            (adasum_of([a, 3 * a]), 2 * a),
            (adasum_of([a, -0.5 * a]), 0.25 * a),
            (adasum_of([exact, orthogonal]), exact + orthogonal),
            (adasum_of([a, b]) / scale, adasum_of([a / scale, b / scale])),
        ]
        for result, expected in cases:
            worst = max(worst, float((result - expected).norm() / expected.norm()))
    yield at_most(bar, worst, 1e-6, "relative", n=28)


def _cost(options: BenchOptions) -> Iterator[Bar]:
    repeats = 9 if options.full else 5
    for megabits, where in ((0, "loopback"), (_SHAPED, f"cables of {_SHAPED} Mbit/s")):
        for size, most in ((2, 1.1), (4, 1.5)):
            bar = f"Adasum against all_reduce, 25 M float32, {size} ranks"
            bar += f", {where}" if megabits else ""
            if not options.wants(bar):
                continue
            if megabits and (reason := why_no_netlab()) is not None:
                yield not_judged(bar, "x", f"<= {most}", reason)
                continue
            options.progress(bar)
            numbers = _NUMBERS if options.full else _NUMBERS // (20 if megabits else 4)
            with contextlib.ExitStack() as stack:
                network: Where = size
                if megabits:
                    network = stack.enter_context(Netlab(size, megabits * MBIT))
                runs = _run_arms(
                    network, rank.against_all_reduce, repeats, numbers=numbers, layers=54
                )
            yield runs.ratio("adasum", "all_reduce").at_most(
                bar, most, detail=f"{runs}; {numbers / 1e6:g} M, {where}, slowest rank of each "
                f"turn, {size} processes on this machine's cores",
            )  # fmt: skip


def _run_arms(
    where: Where, build: Callable[..., Mapping[str, Turn]], blocks: int, **arguments: Any
) -> Paired:
    """Run arms of ranks against each other."""
    with arms_on_ranks(where, build, timeout_s=_TIMEOUT_S, **arguments) as arms:
        return paired(arms, clock="wall", blocks=blocks, settle_s=0.0, budget_s=_BUDGET_S)


def _most(function: Callable[..., Any], **arguments: Any) -> dict[str, float]:
    """Return by case the maximum over four ranks."""
    results = on_ranks(4, function, timeout_s=_TIMEOUT_S, **arguments)
    return {name: max(result[name] for result in results) for name in results[0]}


def _memory(options: BenchOptions) -> Iterator[Bar]:
    for name, dtypes in (("float32", ["float32"]), ("16 bits", ["bfloat16", "float16"])):
        bar = f"peak memory of an exchange besides its buffer, 4 ranks, {name}"
        if not options.wants(bar):
            continue
        if not resettable():
            yield not_judged(bar, "x the gradients", "<= 1", "this system resets no peak")
            continue
        options.progress(bar)
        numbers = _NUMBERS // (1 if options.full else 5)
        shares = {
            f"{how}, {dtype}": share
            for how in ("gram", "rvh")
            for dtype, share in _most(
                rank.memory, numbers=numbers, layers=54, algorithm=how, dtypes=dtypes
            ).items()
        }
        note = "; ".join(f"{case} {share:.2f}" for case, share in shares.items())
        yield at_most(
            bar, max(shares.values()), 1.0, "x the gradients", n=len(shares),
            detail=f"{note}; {numbers / 1e6:g} M, resident size of the rank with the most",
        )  # fmt: skip
    bar = "peak memory of a step of AdasumOptimizer, 4 ranks, SGD"
    if not options.wants(bar):
        return
    if not resettable():
        yield not_judged(bar, "x the gradients", "<= 1", "this system resets no peak")
        return
    options.progress(bar)
    steps = {
        how: _most(rank.memory_of_a_step, numbers=_NUMBERS, layers=54, algorithm=how)
        for how in ("gram", "rvh")
    }
    with_momentum = ", ".join(f"{how} {share['0.9']:.2f}" for how, share in steps.items())
    yield at_most(
        bar, max(share["0"] for share in steps.values()), 1.0, "x the gradients", n=len(steps),
        detail="the larger of gram and rvh, beyond gradients and weights; with momentum 0.9, where "
        f"old weights are kept, {with_momentum}; {_NUMBERS / 1e6:g} M float32",
    )  # fmt: skip


def _growth(options: BenchOptions) -> Iterator[Bar]:
    bar = "computing, time per number from 1e5 to 5e7 numbers"
    if options.wants(bar):
        options.progress(bar)
        small, large = (
            _computing(100_000, 1),
            _computing(50_000_000 // (1 if options.full else 5), 1),
        )
        yield at_most(bar, large / small, 4.0, "x", detail="2 rows, one thread; the cache's share")
    bar = "computing, time per layer and level beyond its numbers"
    if options.wants(bar):
        options.progress(bar)
        numbers = 1_000_000
        many, few = (_computing(numbers, layers) * numbers for layers in (10_000, 10))
        yield at_most(bar, (many - few) / 9_990 * 1e6, 1.0, "us", detail="10 to 10,000 layers")
    for size, levels in ((2, 1), (4, 2)):
        bar = f"an exchange, time per layer and level beyond its numbers, {size} ranks"
        if not options.wants(bar):
            continue
        options.progress(bar)
        layers = (10, 10_000)
        blocks = 31 if options.full else 7
        taken = _run_arms(size, rank.of_layers, blocks, numbers=1_000_000, layers=layers)
        little_s, much_s = (taken.times_s(str(count)) for count in layers)
        apart = (np.median(much_s) - np.median(little_s)) / (layers[1] - layers[0]) / levels * 1e6
        row = at_most(
            bar, float(apart), 1.0, "us", n=len(much_s),
            detail=f"10 to 10,000 layers of 1 M numbers, {size} processes on this machine's cores",
        )  # fmt: skip
        yield guarded(row, {bar: taken.ratio("10000", "10")})


def _computing(numbers: int, layers: int) -> float:
    """Return seconds per number to weigh and combine two rows; the minimum of several."""
    rows = [torch.randn(numbers) for _ in range(2)]
    starts = np.linspace(0, numbers, layers + 1).astype(np.int64)
    out = torch.empty(numbers)

    def combine() -> None:
        kernels.combine(rows, starts, weights(kernels.products(rows, starts)), out)

    return float(times_s(combine, 9).min()) / numbers
