"""``slipstream bench lowbit``: products of a few bits beside 8-bit and float libraries.

Everything runs on one thread. Arms that are compared take turns in one process and are timed in CPU
time, so that a busy machine disturbs both; a row's value is the median over the turns. Weights are
packed before, activations inside what is timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from slipstream.native import InstructionSet, cpu_features, library, why_no_library
from slipstream.techniques.lowbit._bindings import levels, lowbit_library
from slipstream.techniques.lowbit.dispatch import Shape, candidates
from slipstream.techniques.lowbit.kernels import linear, matmul, pack_weights
from slipstream_bench.rows import Bar, BenchOptions, at_least, not_judged
from slipstream_bench.systems.lowbit import models as bench_models
from slipstream_bench.systems.lowbit import peers
from slipstream_bench.systems.lowbit import predictions as bench_predictions
from slipstream_bench.systems.lowbit.peers import Peer, Run

_SIDE = 512
_TURN_NS = 1_000_000
_WIDE = 8192
# Why rows that need an instruction are measured, but not judged, without it.
_NO_COUNT = (
    "the bar is for processors that count bits in vectors (VPOPCNTDQ), which this one does not"
)
_NO_PERMUTE = "the bar is for processors that permute words at one instruction a cycle (with VBMI)"
_ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows of the low-bit bench.

    Quick measures 8 of the 56 pairs of widths and takes fewer turns; sizes stay as they are.
    """
    if library() is None:
        yield not_judged("low-bit kernels", "", "available", str(why_no_library()))
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _grid_rows(options)
        yield from _square_rows(options)
        yield from _vector_rows(options)
    finally:
        torch.set_num_threads(threads)
    yield from bench_models.bars(options)
    yield from bench_predictions.bars(options)


def _ours(
    shape: tuple[int, int, int], w: int, a: int, scheme: str = "auto", level: str = "auto"
) -> tuple[Run, str]:
    """A product of random integers, and the kernel it takes."""
    m, n, k = shape
    weight = torch.randint(0, 2**w, (n, k), dtype=torch.uint8)
    x = torch.randint(0, 2**a, (m, k), dtype=torch.uint8)
    packed = pack_weights(weight, w, activation_bits=a, rows=m, scheme=scheme, level=level)
    out = torch.empty((m, n), dtype=torch.int32)
    return lambda: matmul(x, packed, out=out), f"{packed.scheme} on {packed.level}"


def _seconds(arms: Mapping[str, Run], turns: int, *, warm: bool = True) -> dict[str, list[float]]:
    """CPU seconds of a call of each arm, turn by turn; the first turn is not counted.

    Args:
        warm: in its turn an arm runs once uncounted, then for a millisecond, and the mean counts:
            caches hold what it left there. Else one call, behind those of all others.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, run in arms.items():
            if warm:
                run()
            calls, before = 0, time.thread_time_ns()
            while calls == 0 or (warm and time.thread_time_ns() - before < _TURN_NS):
                run()
                calls += 1
            if turn:
                taken[name].append((time.thread_time_ns() - before) / 1e9 / calls)
    return taken


def _ratio(slow: list[float], fast: list[float]) -> tuple[float, str]:
    """How many times faster, turn by turn: the median, and the quarters around it."""
    ratios = [s / f for s, f in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, f"quarters {low:.2f} to {high:.2f}"


def _peak_rate() -> float | None:
    """Products of bytes a second that the best level makes of registers alone; None: unknown."""
    bound = lowbit_library()
    assert bound is not None
    found = candidates(Shape(None, _SIDE, _SIDE, 8, 8), levels())["dense"].index
    best, rounds = 0.0, 20_000
    for _ in range(5):
        before = time.thread_time_ns()
        products = int(bound.slipstream_lowbit_spin(found, rounds))
        best = max(best, products / (time.thread_time_ns() - before) * 1e9)
    return best or None


def _clock_ghz() -> float:
    """What the clock is just now, from additions that wait for each other."""
    bound = lowbit_library()
    assert bound is not None
    best = float("inf")
    count = 200_000
    for _ in range(3):
        before = time.thread_time_ns()
        bound.slipstream_spin(count)
        best = min(best, (time.thread_time_ns() - before) / count)
    return 1.0 / best


# ---- the grid ---------------------------------------------------------------------------------


def _grid_rows(options: BenchOptions) -> Iterator[Bar]:
    full = list(itertools.product(range(1, 8), range(1, 9)))
    quick = [(1, 1), (1, 2), (1, 4), (2, 2), (3, 3), (4, 4), (4, 8), (7, 8)]
    shape = (_SIDE, _SIDE, _SIDE)
    work = _SIDE**3 / 1e9
    fastest = _int8_engines(shape)
    for w, a in full if options.full else quick:
        bar = f"512^3 W{w}A{a}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        run, kernel = _ours(shape, w, a)
        arms: dict[str, Run] = {"ours": run, "fp32": _must(peers.float32(*shape)), **fastest}
        taken = _seconds(arms, 25 if options.full else 5)
        middle = {name: statistics.median(times) for name, times in taken.items()}
        best = min(fastest, key=lambda name: middle[name]) if fastest else None
        run()
        clock, peak = _clock_ghz(), _peak_rate()
        rate = work / middle["ours"]
        share = f" of {peak / 1e9 / clock:.0f} for products of bytes" if peak else ""
        said = f"{kernel}; {rate / clock:.0f} MAC/cycle{share} at {clock:.2f} GHz; "
        said += f"{middle['fp32'] / middle['ours']:.1f}x fp32"
        if best:
            said += f", {middle[best] / middle['ours']:.2f}x {best}"
        turns = len(taken["ours"])
        yield Bar(bar, rate, "GMAC/s", "reported", None, turns, f"no bar; {said}")


def _must(peer: Peer) -> Run:
    assert not isinstance(peer, str)
    return peer


def _int8_engines(shape: tuple[int, int, int]) -> dict[str, Run]:
    """PyTorch's 8-bit arms that run here, without qnnpack, which no x86 user would take."""
    found: dict[str, Peer] = {"torch._int_mm": peers.int_mm(*shape)}
    for engine in _ENGINES[:3]:
        found[f"torch {engine}"] = peers.quantized(engine, *shape)
    return {name: peer for name, peer in found.items() if not isinstance(peer, str)}


# ---- 512^3 ------------------------------------------------------------------------------------


def _square_rows(options: BenchOptions) -> Iterator[Bar]:
    shape = (_SIDE, _SIDE, _SIDE)
    turns = 60 if options.full else 12
    best = cpu_features().best
    counts = best is InstructionSet.AVX512
    engines = _int8_engines(shape)
    for w, a, target in ((1, 1, 4.5), (1, 2, 2.3), (2, 2, 1.3)):
        bar = f"512^3 W{w}A{a}, times the fastest torch int8"
        why = "" if counts or w * a > 2 else _NO_COUNT
        yield from _against_engines(options, bar, shape, (w, a), engines, target, turns, why)
    for w, a, target in ((1, 8, 1.4), (1, 4, 1.6)):
        bar = f"512x1024x1024 W{w}A{a}, times the fastest torch int8"
        wide = (_SIDE, 1024, 1024)
        why = "" if counts or a < 8 else _NO_PERMUTE
        yield from _against_engines(
            options, bar, wide, (w, a), _int8_engines(wide), target, turns, why
        )
    bar = "512^3 W7A7 with VNNI, times torch._int_mm"
    if not counts:
        if options.wants(bar):
            yield not_judged(bar, "x", ">= 1", f"needs AVX-512 VNNI; this processor has {best}")
    else:
        yield from _versus(options, bar, shape, (7, 7), peers.int_mm(*shape), 1.0, turns)
    bar = "AVX2 only, W3A3: deferred widening, times our three-instruction int8"
    yield from _between(options, bar, shape, "deferred", "int8", "avx2", 1.4, turns)
    bar = "512^3 W3A3, times our bit-serial"
    yield from _between(options, bar, shape, "auto", "bit_serial", "auto", 1.6, turns)
    for bar, level, target in (
        ("AVX2 only, W3A3, times gemmlowp", "avx2", 4.0),
        ("512^3 W3A3, times gemmlowp", "auto", 5.0),
    ):
        if options.wants(bar):
            options.progress(bar)
            peer = peers.gemmlowp(*shape)
            yield from _versus(options, bar, shape, (3, 3), peer, target, turns, level)
    bar = "512^3 W3A3, times torch qnnpack"
    yield from _versus(options, bar, shape, (3, 3), peers.quantized("qnnpack", *shape), 10.0, turns)


def _against_engines(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    bits: tuple[int, int],
    engines: dict[str, Run],
    target: float,
    turns: int,
    why_not: str,
) -> Iterator[Bar]:
    if not options.wants(bar):
        return
    options.progress(bar)
    if not engines:
        yield not_judged(bar, "x", f">= {target:g}", "this PyTorch runs no 8-bit product")
        return
    run, kernel = _ours(shape, *bits)
    taken = _seconds({"ours": run, **engines}, turns)
    best = min(engines, key=lambda name: statistics.median(taken[name]))
    value, spread = _ratio(taken[best], taken["ours"])
    said = f"{kernel} against {best}; {spread}"
    if why_not:
        yield Bar(bar, value, "x", f">= {target:g}", None, turns, f"{why_not}; {said}")
    else:
        yield at_least(bar, value, target, "x", n=turns, detail=said)


def _versus(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    bits: tuple[int, int],
    peer: Peer,
    target: float,
    turns: int,
    level: str = "auto",
) -> Iterator[Bar]:
    if not options.wants(bar):
        return
    options.progress(bar)
    if isinstance(peer, str):
        yield not_judged(bar, "x", f">= {target:g}", peer)
        return
    if level != "auto" and not cpu_features().runs(InstructionSet(level)):
        yield not_judged(bar, "x", f">= {target:g}", f"this processor has no {level}")
        return
    run, kernel = _ours(shape, *bits, level=level)
    taken = _seconds({"ours": run, "peer": peer}, turns)
    value, spread = _ratio(taken["peer"], taken["ours"])
    yield at_least(bar, value, target, "x", n=turns, detail=f"{kernel}; {spread}")


def _between(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    fast: str,
    slow: str,
    level: str,
    target: float,
    turns: int,
) -> Iterator[Bar]:
    """One scheme of ours against another at W3A3."""
    if not options.wants(bar):
        return
    options.progress(bar)
    wanted = cpu_features().best if level == "auto" else InstructionSet(level)
    able = candidates(Shape(None, *shape[1:], 3, 3), (wanted,))
    if slow not in able or (fast != "auto" and fast not in able):
        yield not_judged(bar, "x", f">= {target:g}", f"no such kernels for {wanted} here")
        return
    first, kernel = _ours(shape, 3, 3, fast, level)
    second, other = _ours(shape, 3, 3, slow, level)
    taken = _seconds({"fast": first, "slow": second}, turns)
    value, spread = _ratio(taken["slow"], taken["fast"])
    yield at_least(bar, value, target, "x", n=turns, detail=f"{kernel} against {other}; {spread}")


# ---- matrix times vector ----------------------------------------------------------------------


def _layer(shape: tuple[int, int, int], w: int) -> Run:
    """A layer from floats to floats, as its peers are, with activations of 8 bits."""
    m, n, k = shape
    weight = torch.randint(0, 2**w, (n, k), dtype=torch.uint8)
    packed = pack_weights(weight, w, zero_points=2 ** (w - 1), rows=m)
    x, scale = torch.rand(m, k), torch.ones(n)
    return lambda: linear(x, packed, scale, activation_scale=1 / 255)


def _vector_rows(options: BenchOptions) -> Iterator[Bar]:
    shape = (1, _WIDE, _WIDE)
    turns = 40 if options.full else 12
    targets = {4: 2.0, 3: 2.6, 2: 3.5}
    names = {w: f"8192^2 times a vector, W{w}, times torch dynamic int8" for w in targets}
    against_ort = {4: 1.3, 2: 2.5}
    ort_names = {w: f"8192^2 times a vector, W{w}, times ONNX Runtime" for w in against_ort}
    law = "8192^2 times a vector: time over bits, R^2 of a line, W2 to W8"
    stream = "8192^2 times a vector, W8, of the bandwidth of a plain read"
    if not any(options.wants(bar) for bar in (*names.values(), *ort_names.values(), law, stream)):
        return
    options.progress("8192^2 times a vector: packing")
    arms = {f"W{w}": _layer(shape, w) for w in range(1, 9)}
    peer = peers.quantized("fbgemm", *shape, dynamic=True)
    if not isinstance(peer, str):
        arms["fbgemm"] = peer
    # Long enough to come from memory: four times what a processor's cache may hold.
    read = torch.ones(1 << 26, dtype=torch.float32)
    arms["read"] = read.sum
    theirs = {w: peers.onnxruntime(w, *shape) for w, bar in ort_names.items() if options.wants(bar)}
    arms |= {f"ort W{w}": one for w, one in theirs.items() if not isinstance(one, str)}
    taken = _seconds(arms, turns, warm=False)
    middle = {name: statistics.median(times) for name, times in taken.items()}
    for w, other in theirs.items():
        bar, target = ort_names[w], against_ort[w]
        if isinstance(other, str):
            yield not_judged(bar, "x", f">= {target:g}", other)
            continue
        value, spread = _ratio(taken[f"ort W{w}"], taken[f"W{w}"])
        detail = f"MatMulNBits {middle[f'ort W{w}'] * 1e3:.2f} ms; {spread}"
        yield at_least(bar, value, target, "x", n=turns, detail=detail)
    for w, bar in names.items():
        if not options.wants(bar):
            continue
        if isinstance(peer, str):
            yield not_judged(bar, "x", f">= {targets[w]:g}", peer)
            continue
        value, spread = _ratio(taken["fbgemm"], taken[f"W{w}"])
        detail = f"dense; {middle[f'W{w}'] * 1e3:.2f} ms; {spread}"
        yield at_least(bar, value, targets[w], "x", n=turns, detail=detail)
    times = [middle[f"W{w}"] for w in range(2, 9)]
    if options.wants(law):
        r2 = float(np.corrcoef(range(2, 9), times)[0, 1] ** 2)
        shown = ", ".join(f"W{w} {t * 1e3:.2f}" for w, t in zip(range(2, 9), times, strict=True))
        yield at_least(law, r2, 0.97, "", n=turns, detail=f"ms: {shown}")
    if options.wants(stream):
        bandwidth = read.nbytes / middle["read"] / 1e9
        ours = _WIDE * _WIDE / middle["W8"] / 1e9
        detail = f"{ours:.1f} of {bandwidth:.1f} GB/s, a sum of 256 MiB by torch"
        yield at_least(stream, ours / bandwidth, 0.85, "x", n=turns, detail=detail)
