"""``slipstream bench hfuse``: fused kernels compared with separate ones, and merged loops.

Fused CUDA kernels run in an emulated block and Triton's in its interpreter, which checks their
results, not their speed. Loops on a CPU are timed on one thread, in CPU time.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream.codegen import why_no_compiler
from slipstream.technique import parse
from slipstream.techniques.side_by_side import triton
from slipstream.techniques.side_by_side.cuda import (
    compile_fused,
    emulate,
    fuse,
    parse_launch,
    why_no_nvcc,
)
from slipstream.techniques.side_by_side.kernels import DISTANCES, Loop, alone, interleave, product
from slipstream.techniques.side_by_side.nn import InterleavedLinear
from slipstream.techniques.side_by_side.technique import SideBySide
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import Predicted
from slipstream.workload import Workload, build_from
from slipstream_bench.harness import one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.hfuse.kernels import PROGRAMS, SPLITS, launch, pairs, programs

_QUICK_PAIRS = 12
# Pairs of Triton's kernels that contain every kernel once.
_QUICK_PROGRAMS = tuple(zip(PROGRAMS[:6], PROGRAMS[6:], strict=True))
# Registers per thread that dispatching programs may take in addition to the larger kernel's; and
# registers that are free in any case at a multiprocessor's maximum number of threads.
_TO_DEAL, _FREE = 8, 32
_WITH_BARRIERS = ("block_sums", "warp_sums", "scan", "odd_even", "reverse")
_ARCHES = ("sm_80", "sm_90")
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW,
}  # fmt: skip
_RANDOM_STEPS, _WITHIN = 40, 0.98
_NETWORKS = ((512, 6, 64), (1024, 4, 32), (768, 6, 128), (512, 6, 256))


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: 12 pairs in one split, 2 compiled; full: 190 in three, all compiled
    twice.

    Of Triton's kernels 6 pairs, 2 compiled; full: all 66.
    """
    every = list(itertools.combinations(PROGRAMS, 2))
    yield from _programs_equal(options, every if options.full else list(_QUICK_PROGRAMS))
    yield from _programs_compile(options, every if options.full else list(_QUICK_PROGRAMS[:2]))
    if (reason := why_no_compiler()) is not None:
        yield not_judged("pairs equal byte by byte in the emulator", "of 190", ">= 190", reason)
        return
    chosen = list(pairs()) if options.full else list(pairs())[:: 190 // _QUICK_PAIRS][:_QUICK_PAIRS]
    yield from _equal(options, chosen)
    yield from _corrupted(options)
    yield from _compiles(options, chosen if options.full else chosen[:2])
    yield from _cost(options)
    with one_thread():
        yield from _interleaved(options)
        yield from _unbalanced(options)
        yield from _steps(options)
        yield from _random_steps(options)


def _equal(options: BenchOptions, chosen: list[tuple[str, str]]) -> Iterator[Bar]:
    bar = "pairs equal byte by byte in the emulator"
    if not options.wants(bar, 30):
        return
    splits = range(SPLITS if options.full else 1)
    good, wrong = 0, []
    for number, (first, second) in enumerate(chosen, 1):
        options.progress(f"pair {number} of {len(chosen)}")
        fused = [fuse([launch(first, s), launch(second, (s + 1) % SPLITS)]) for s in splits]
        if all(emulate(kernel).equal for kernel in fused):
            good += 1
        else:
            wrong.append(f"{first} and {second}")
    detail = f"{len(splits)} launches each, 11 orders of threads; sums by float atomics to 1e-6"
    yield at_least(
        bar, good, len(chosen), f"of {len(chosen)}", n=len(chosen),
        detail="; ".join([detail, *wrong[:5]]),
    )  # fmt: skip


def _no_triton(bar: str, unit: str, target: int) -> Bar | None:
    """Return the row without Triton; None if it is installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return not_judged(bar, unit, f">= {target}", "triton is not installed")


def _programs_equal(options: BenchOptions, chosen: list[tuple[str, str]]) -> Iterator[Bar]:
    bar, unit = "Triton pairs equal byte by byte in its interpreter", f"of {len(chosen)}"
    if not options.wants(bar, 40):
        return
    if (reason := _no_triton(bar, unit, len(chosen))) is not None:
        yield reason
        return
    wrong = []
    for number, (first, second) in enumerate(chosen, 1):
        options.progress(f"Triton: pair {number} of {len(chosen)}")
        outcome = triton.emulate(triton.fuse([programs(first), programs(second, 1)]))
        if not outcome.equal:
            wrong.append(f"{first} and {second}: {outcome}")
    detail = "2 orders of programs; sums by float atomics to 1e-6"
    yield at_least(
        bar, len(chosen) - len(wrong), len(chosen), unit, n=len(chosen),
        detail="; ".join([detail, *wrong[:5]]),
    )  # fmt: skip


def _programs_compile(options: BenchOptions, chosen: list[tuple[str, str]]) -> Iterator[Bar]:
    bar, unit = "Triton pairs in one machine code for sm_90", f"of {len(chosen)}"
    if not options.wants(bar, 30):
        return
    if (reason := _no_triton(bar, unit, len(chosen))) is not None:
        yield reason
        return
    wrong, more, registers = [], [], []
    for number, (first, second) in enumerate(chosen, 1):
        options.progress(f"Triton's compiler: pair {number} of {len(chosen)}")
        code = triton.compile_fused(triton.fuse([programs(first), programs(second, 1)]), "sm_90")
        most = max(kernel.registers for kernel in code.alone)
        more.append(code.evenly.registers - most)
        registers.append([*(kernel.registers for kernel in code.alone), code.evenly.registers])
        shared = max(kernel.shared_bytes for kernel in code.alone)
        crowded = code.evenly.registers > max(most + _TO_DEAL, _FREE)
        if crowded or code.evenly.spilled_bytes or code.evenly.shared_bytes > shared:
            wrong.append(f"{first} and {second}: {code}")
    detail = (
        f"no spills, shared memory the larger kernel's, registers {min(more)} to {max(more)} over "
        f"the larger kernel's, at most {_TO_DEAL} where they are more than {_FREE}"
    )
    yield at_least(
        bar, len(chosen) - len(wrong), len(chosen), unit, n=len(chosen),
        detail="; ".join([detail, *wrong[:5]]), data={"registers": registers},
    )  # fmt: skip


def _corrupted(options: BenchOptions) -> Iterator[Bar]:
    bar = "corrupted barriers found by the emulator"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    faults = 0
    missed = []
    for first, second in itertools.islice(itertools.permutations(_WITH_BARRIERS, 2), 0, None, 4):
        made = fuse([launch(first), launch(second, 1)])
        for old, new in (
            ("SLIP_BARRIER(2, 256)", "SLIP_BARRIER(1, 128)"),
            ("SLIP_BARRIER(1, 128)", "SLIP_BARRIER(3, 128)"),
            ("SLIP_BARRIER(2, 256)", "SLIP_BARRIER(2, 288)"),
            ("SLIP_BARRIER(1, 128)", "__syncthreads()"),
        ):
            faults += 1
            if emulate(replace(made, source=made.source.replace(old, new))).equal:
                missed.append(f"{first} and {second}: {new}")
    found = faults - len(missed)
    yield at_least(
        bar, found, faults, f"of {faults}", n=faults,
        detail="; ".join(["another id, another's id, another count, all threads", *missed[:5]]),
    )  # fmt: skip


def _compiles(options: BenchOptions, chosen: list[tuple[str, str]]) -> Iterator[Bar]:
    bar, words = "fused kernels that nvcc takes", f">= {len(chosen)}"
    if not options.wants(bar, 60):
        return
    if (reason := why_no_nvcc()) is not None:
        yield not_judged(bar, f"of {len(chosen)}", words, reason)
        return
    good, wrong = 0, []
    for number, (first, second) in enumerate(chosen, 1):
        options.progress(f"nvcc: pair {number} of {len(chosen)}")
        fused = fuse([launch(first), launch(second, 1)])
        for arch in _ARCHES if options.full else _ARCHES[1:]:
            code = compile_fused(fused, arch)
            most = max(kernel.registers for kernel in code.alone) + 8
            trouble = code.barrier_trouble(fused)
            if code.free.registers > most:
                trouble = f"{code.free.registers} registers, {most - 8} alone"
            if code.capped.registers > code.cap:
                trouble = f"{code.capped.registers} registers over the bound of {code.cap}"
            if code.free.shared_bytes < max(kernel.shared_bytes for kernel in code.alone):
                trouble = "shared memory is missing"
            if trouble:
                wrong.append(f"{first} and {second}, {arch}: {trouble}")
                break
        else:
            good += 1
    detail = "registers at most 8 over the larger kernel's, within the bound, each its own barrier"
    yield at_least(
        bar, good, len(chosen), f"of {len(chosen)}", n=len(chosen),
        detail="; ".join([detail, *wrong[:5]]),
    )  # fmt: skip


def _cost(options: BenchOptions) -> Iterator[Bar]:
    bar = "to fuse two kernels of 200 lines"
    if not options.wants(bar):
        return
    options.progress(bar)
    times = {}
    with TemporaryDirectory() as folder:
        for lines in (200, 2000):
            body = "\n".join(f"  x[i + {n}] = x[i] * {n}.5f + threadIdx.x;" for n in range(lines))
            path = Path(folder) / f"long{lines}.cu"
            path.write_text(f"__global__ void k(float* x) {{\n  int i = blockIdx.x;\n{body}\n}}\n")
            launches = [parse_launch(f"{path}:k")] * 2
            times[lines] = float(np.median(times_s(functools.partial(fuse, launches), 3)))
    per_line = times[2000] / times[200] / 10
    detail = f"2,000 lines take {per_line:.2f} times as long per line"
    yield at_most(bar, times[200], 1.0, "s", n=3, detail=detail)


def _interleaved(options: BenchOptions) -> Iterator[Bar]:
    torch.manual_seed(0)
    count = 4 << 20
    arrays = [torch.randn(count) for _ in range(3)]
    settings = torch.tensor([0.01, 0.9, 0.0])
    update = Loop("Descent", (*arrays, settings), (count,))
    x, weight = torch.randn(768, 256), torch.randn(512, 256)
    tile = product(x, weight, None, torch.empty(768, 512))
    sweep = Loop("Sweep", (arrays[0], arrays[1]), (count,))
    busy = _as_long(sweep, count // 16)
    for bar, memory, compute, target in (
        ("a sweep beside arithmetic, over one after the other", sweep, busy, 1.40),
        ("an optimizer's step beside a product, over one after the other", update, tile, 1.15),
    ):
        if not options.wants(bar, 10):
            continue
        options.progress(bar)
        ahead = _fastest(memory)
        first, second = alone(memory, ahead), alone(compute)
        arms: dict[str, Callable[[], object]] = {
            "apart": functools.partial(_one_after_the_other, first, second),
            "together": interleave(memory, compute), "memory": first, "compute": second,
        }  # fmt: skip
        taken = paired(arms, blocks=30 if options.full else 10)
        whole, longest = taken.median_s("apart"), max(map(taken.median_s, ("memory", "compute")))
        detail = f"{taken}; at most {whole / longest:.2f}x"
        yield taken.ratio("apart", "together").at_least(bar, target, detail=detail)


def _as_long(memory: Loop, turns: int, times: float = 1.0) -> Loop:
    """Return arithmetic that takes `times` as long as `memory`, which makes a balanced pair."""
    out = torch.empty(192)
    busy, sweep = alone(Loop("Arithmetic", (out,), (turns,))), alone(memory, _fastest(memory))
    share = times * np.median(times_s(sweep, 5)) / np.median(times_s(busy, 5))
    return Loop("Arithmetic", (out,), (max(1, round(turns * float(share))),))


def _unbalanced(options: BenchOptions) -> Iterator[Bar]:
    """Measure how close a pair is to its longer loop alone, the lower bound, at three ratios."""
    count = 4 << 20
    sweep = Loop("Sweep", (torch.randn(count), torch.randn(count)), (count,))
    for words, times in (("half", 0.5), ("as long", 1.0), ("twice", 2.0)):
        bar = f"a sweep beside arithmetic of {words}, the longer loop's share of it"
        if not options.wants(bar, 10):
            continue
        options.progress(bar)
        busy = _as_long(sweep, count // 16, times)
        arms: dict[str, Callable[[], object]] = {
            "together": interleave(sweep, busy),
            "memory": alone(sweep, _fastest(sweep)), "compute": alone(busy),
        }  # fmt: skip
        taken = paired(arms, blocks=30 if options.full else 10)
        longer = max("memory", "compute", key=taken.median_s)
        yield taken.ratio(longer, "together").at_least(bar, 0.85, detail=str(taken))


def _steps(options: BenchOptions) -> Iterator[Bar]:
    """Measure whole steps as `-t side_by_side` runs them, with the pairs that its gate accepts."""
    bar, other = "a step with its technique, over torch's", "a step's prediction beside it"
    if not (options.wants(bar, 60) or options.wants(other, 60)):
        return
    gains, errors, words = [], [], []
    for width, layers, rows in _NETWORKS if options.full else _NETWORKS[:1]:
        options.progress(f"a step of {layers} layers of {width}, {rows} rows")
        parts = functools.partial(_network, width, layers, rows)
        graph = profile(Workload.of(*parts()), threads=1)
        (prediction,) = predict(graph, parse("side_by_side"))
        plain, ours = (
            build_from(parts(), [], 0, "net"),
            build_from(parts(), [SideBySide()], 0, "net"),
        )
        ours.step()
        arms: dict[str, Callable[[], object]] = {"torch": plain.step, "fused": ours.step}
        gain = paired(arms, blocks=30 if options.full else 10).ratio("torch", "fused").value
        predicted = 1.0 / prediction.ratio if isinstance(prediction, Predicted) else 1.0
        gains.append(gain)
        errors.append(abs(predicted / gain - 1))
        pairs = any(isinstance(part, InterleavedLinear) for part in ours.model)
        words.append(
            f"{layers} x {width}, {rows} rows: {gain:.3f}x, predicted {predicted:.3f}x, "
            f"{'some' if pairs else 'no'} pairs selected"
        )
    detail = "AdamW, fused; " + "; ".join(words)
    yield at_least(bar, min(gains), 0.98, "x", n=len(gains), detail=detail)
    yield at_most(other, float(np.median(errors)), 0.12, "relative", n=len(errors), detail=detail)


def _random_steps(options: BenchOptions) -> Iterator[Bar]:
    """Check that the gate accepts nothing slower, for any shapes and optimizer."""
    bar = "random steps that are slower by over 2 % with side_by_side"
    if not (options.full and options.wants(bar, 300)):
        return
    draw = random.Random(0)
    slower, gains, paying = [], [], 0
    for number in range(_RANDOM_STEPS):
        width, rows = 32 * draw.randint(4, 32), 8 * draw.randint(1, 32)
        layers, optimizer = draw.randint(2, 5), draw.choice(sorted(_OPTIMIZERS))
        words = f"{layers} x {width}, {rows} rows, {optimizer}"
        options.progress(f"step {number + 1} of {_RANDOM_STEPS}: {words}")
        made = functools.partial(_network, width, layers, rows, _OPTIMIZERS[optimizer])
        plain, ours = build_from(made(), [], 0, "net"), build_from(made(), [SideBySide()], 0, "net")
        ours.step()
        arms: dict[str, Callable[[], object]] = {"torch": plain.step, "fused": ours.step}
        ratio = paired(arms, blocks=10).ratio("torch", "fused")
        gains.append(ratio.value)
        paying += any(isinstance(part, InterleavedLinear) for part in ours.model)
        if ratio.high < _WITHIN:
            slower.append(f"{words}: {ratio}")
    detail = f"{paying} with pairs; gains {min(gains):.3f} to {max(gains):.3f}"
    yield at_most(
        bar,
        len(slower),
        0,
        f"of {_RANDOM_STEPS}",
        n=len(gains),
        detail="; ".join([detail, *slower]),
    )


def _network(
    width: int, layers: int, rows: int, optimizer: Callable[..., Any] = torch.optim.AdamW
) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    each = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    model = nn.Sequential(*each)
    batch = torch.randn(rows, width), torch.randn(rows, width)
    return model, batch, nn.functional.mse_loss, optimizer(model.parameters(), fused=True)


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _fastest(memory: Loop) -> int:
    """Return the prefetch distance at which a loop alone is fastest."""
    made = {distance: alone(memory, distance) for distance in DISTANCES}
    return min(made, key=lambda distance: float(times_s(made[distance], 5).min()))
