"""``slipstream bench hfuse``: fused kernels against their kernels apart, and loops in one.

Fused CUDA kernels run in an emulated block: whether they compute the same, not how fast. Loops on a
processor are timed, one thread, CPU time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from slipstream.codegen import why_no_compiler
from slipstream.techniques.side_by_side.cuda import (
    compiled,
    emulate,
    fuse,
    parse_launch,
    why_no_nvcc,
)
from slipstream.techniques.side_by_side.kernels import DISTANCES, Loop, alone, interleave, product
from slipstream_bench.harness import one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.hfuse.kernels import SPLITS, launch, pairs

_QUICK_PAIRS = 12
_WITH_BARRIERS = ("block_sums", "warp_sums", "scan", "odd_even", "reverse")
_ARCHES = ("sm_80", "sm_90")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: 12 pairs in one split, 2 compiled; full: 190 in three, all compiled twice."""
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


def _equal(options: BenchOptions, chosen: list[tuple[str, str]]) -> Iterator[Bar]:
    bar = "pairs equal byte by byte in the emulator"
    if not options.wants(bar, 30):
        return
    splits = range(SPLITS if options.full else 1)
    good, wrong = 0, []
    for number, (first, second) in enumerate(chosen, 1):
        options.progress(f"pair {number} of {len(chosen)}")
        made = [fuse([launch(first, s), launch(second, (s + 1) % SPLITS)]) for s in splits]
        if all(emulate(one).equal for one in made):
            good += 1
        else:
            wrong.append(f"{first} and {second}")
    detail = f"{len(splits)} launches each, 11 orders of threads; sums by float atomics to 1e-6"
    yield at_least(
        bar, good, len(chosen), f"of {len(chosen)}", n=len(chosen),
        detail="; ".join([detail, *wrong[:5]]),
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
        made = fuse([launch(first), launch(second, 1)])
        for arch in _ARCHES if options.full else _ARCHES[1:]:
            found = compiled(made, arch)
            most = max(one.registers for one in found.alone) + 8
            trouble = found.barrier_trouble(made)
            if found.free.registers > most:
                trouble = f"{found.free.registers} registers, {most - 8} alone"
            if found.capped.registers > found.cap:
                trouble = f"{found.capped.registers} registers over the bound of {found.cap}"
            if found.free.shared_bytes < max(one.shared_bytes for one in found.alone):
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
    taken = {}
    with TemporaryDirectory() as folder:
        for lines in (200, 2000):
            body = "\n".join(f"  x[i + {n}] = x[i] * {n}.5f + threadIdx.x;" for n in range(lines))
            path = Path(folder) / f"long{lines}.cu"
            path.write_text(f"__global__ void k(float* x) {{\n  int i = blockIdx.x;\n{body}\n}}\n")
            given = [parse_launch(f"{path}:k")] * 2
            taken[lines] = float(np.median(times_s(functools.partial(fuse, given), 3)))
    per_line = taken[2000] / taken[200] / 10
    detail = f"2,000 lines take {per_line:.2f} times as long a line"
    yield at_most(bar, taken[200], 1.0, "s", n=3, detail=detail)


def _interleaved(options: BenchOptions) -> Iterator[Bar]:
    torch.manual_seed(0)
    count = 4 << 20
    arrays = [torch.randn(count) for _ in range(3)]
    update = Loop("Update", (arrays[0], arrays[1], arrays[2]), (count,))
    x, weight = torch.randn(768, 256), torch.randn(512, 256)
    tile = product(x, weight, None, torch.empty(768, 512))
    sweep = Loop("Sweep", (arrays[0], arrays[1]), (count,))
    busy = Loop("Arithmetic", (torch.empty(192),), (count // 16 * 2,))
    for bar, memory, compute, target in (
        ("a sweep beside arithmetic, over one after the other", sweep, busy, 1.40),
        ("an optimizer's step beside a product, over one after the other", update, tile, 1.15),
    ):
        if not options.wants(bar, 10):
            continue
        options.progress(bar)
        distance = _fastest(memory, compute)
        ahead = _fastest(memory, None)
        first, second = alone(memory, ahead), alone(compute)
        arms: dict[str, Callable[[], object]] = {
            "apart": functools.partial(_one_after_the_other, first, second),
            "together": interleave(memory, compute, distance), "memory": first, "compute": second,
        }  # fmt: skip
        taken = paired(arms, blocks=30 if options.full else 10)
        whole, longest = taken.median_s("apart"), max(map(taken.median_s, ("memory", "compute")))
        detail = f"{taken}; at most {whole / longest:.2f}x; memory {distance} items ahead"
        yield taken.ratio("apart", "together").at_least(bar, target, detail=detail)


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _fastest(memory: Loop, compute: Loop | None) -> int:
    """The distance at which it takes least."""
    if compute is None:
        made = {d: alone(memory, d) for d in DISTANCES}
    else:
        made = {d: interleave(memory, compute, d) for d in DISTANCES}
    return min(made, key=lambda d: float(times_s(made[d], 5).min()))
