"""``slipstream bench lowbit``: low-bit matmuls compared with 8-bit and float libraries.

Everything runs on one thread, in CPU time. Weights are packed beforehand, activations within the
timed call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from slipstream.native import InstructionSet, cpu_features, library, why_no_library
from slipstream.techniques.lowbit.bindings import lowbit_library
from slipstream.techniques.lowbit.dispatch import Shape, candidates
from slipstream.techniques.lowbit.kernels import linear, matmul, pack_weights
from slipstream_bench.harness import Paired, one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, not_judged
from slipstream_bench.systems.lowbit import decoding, models, peers, predictions, whole
from slipstream_bench.systems.lowbit.peers import Peer, Run

_SIDE = 512
# Matmuls are short, so this time suffices for the requested number of blocks.
_BUDGET_S = 6.0
_WIDE = 8192
# Reasons why rows that need an instruction are measured, but not judged, without it.
_NO_COUNT = (
    "the bar is for processors that count bits in vectors (VPOPCNTDQ), which this one does not"
)
_NO_PERMUTE = "the bar is for processors that permute words at one instruction a cycle (with VBMI)"
_ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows.

    Quick measures 8 of the 56 pairs of widths and takes fewer turns; sizes stay the same.
    """
    if library() is None:
        yield not_judged("low-bit kernels", "", "available", str(why_no_library()))
        return
    with one_thread():
        yield from _grid_rows(options)
        yield from _square_rows(options)
        yield from _vector_rows(options)
    yield from models.bars(options)
    yield from whole.bars(options)
    yield from decoding.bars(options)
    yield from predictions.bars(options)


def _ours(
    shape: tuple[int, int, int], w: int, a: int, scheme: str = "auto", level: str = "auto"
) -> tuple[Run, str]:
    """Return a matmul of random integers, and the name of its kernel."""
    m, n, k = shape
    weight = torch.randint(0, 2**w, (n, k), dtype=torch.uint8)
    x = torch.randint(0, 2**a, (m, k), dtype=torch.uint8)
    packed = pack_weights(weight, w, activation_bits=a, rows=m, scheme=scheme, level=level)
    out = torch.empty((m, n), dtype=torch.int32)
    return lambda: matmul(x, packed, out=out), f"{packed.scheme} on {packed.level}"


def _taken(arms: Mapping[str, Run], blocks: int) -> Paired:
    """Run matmuls against each other, with operands in the caches."""
    return paired(arms, blocks=blocks, budget_s=_BUDGET_S, settle_s=0.05, warm=True)


def _peak_rate() -> float | None:
    """Return the best level's multiply rate on registers, in byte products per second, or None."""
    bound = lowbit_library()
    assert bound is not None
    kernel = candidates(Shape(None, _SIDE, _SIDE, 8, 8), cpu_features().levels)["dense"].index
    rounds, products = 20_000, 0

    def spin() -> None:
        nonlocal products
        products = int(bound.slipstream_lowbit_spin(kernel, rounds))

    shortest_s = float(times_s(spin, 5).min())
    return products / shortest_s or None


def _clock_ghz() -> float:
    """Return the current clock rate, from dependent additions."""
    bound = lowbit_library()
    assert bound is not None
    count = 200_000
    return count / 1e9 / float(times_s(lambda: bound.slipstream_spin(count), 3).min())


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
        taken = _taken(arms, 25 if options.full else 8)
        ours_s = taken.median_s("ours")
        best = min(fastest, key=taken.median_s) if fastest else None
        run()
        clock, peak = _clock_ghz(), _peak_rate()
        rate = work / ours_s
        share = f" of {peak / 1e9 / clock:.0f} for products of bytes" if peak else ""
        note = f"{kernel}; {rate / clock:.0f} MAC/cycle{share} at {clock:.2f} GHz; "
        note += f"{taken.median_s('fp32') / ours_s:.1f}x fp32"
        if best:
            note += f", {taken.median_s(best) / ours_s:.2f}x {best}"
        blocks = len(taken.times_s("ours"))
        yield Bar(bar, rate, "GMAC/s", "reported", None, blocks, f"no bar; {note}")


def _must(peer: Peer) -> Run:
    assert not isinstance(peer, str)
    return peer


def _int8_engines(shape: tuple[int, int, int]) -> dict[str, Run]:
    """Return PyTorch's 8-bit arms that run here, without qnnpack, which x86 does not use."""
    found: dict[str, Peer] = {"torch._int_mm": peers.int_mm(*shape)}
    for engine in _ENGINES[:3]:
        found[f"torch {engine}"] = peers.quantized(engine, *shape)
    return {name: peer for name, peer in found.items() if not isinstance(peer, str)}


# ---- 512^3 ------------------------------------------------------------------------------------


def _square_rows(options: BenchOptions) -> Iterator[Bar]:
    shape = (_SIDE, _SIDE, _SIDE)
    blocks = 30 if options.full else 12
    here = cpu_features()
    counts = here.runs(InstructionSet.AVX512)
    engines = _int8_engines(shape)
    for w, a, target in ((1, 1, 4.5), (1, 2, 2.3), (2, 2, 1.3)):
        bar = f"512^3 W{w}A{a}, times the fastest torch int8"
        why = "" if counts or w * a > 2 else _NO_COUNT
        yield from _against_engines(options, bar, shape, (w, a), engines, target, blocks, why)
    for w, a, target in ((1, 8, 1.4), (1, 4, 1.6)):
        bar = f"512x1024x1024 W{w}A{a}, times the fastest torch int8"
        wide = (_SIDE, 1024, 1024)
        why = "" if counts or a < 8 else _NO_PERMUTE
        yield from _against_engines(
            options, bar, wide, (w, a), _int8_engines(wide), target, blocks, why
        )
    bar = "512^3 W7A7 with VNNI, times torch._int_mm"
    if not here.runs(InstructionSet.AVX512VNNI):
        if options.wants(bar):
            why = f"needs AVX-512 VNNI; this processor has {here.best}"
            yield not_judged(bar, "x", ">= 1", why)
    else:
        yield from _versus(options, bar, shape, (7, 7), peers.int_mm(*shape), 1.0, blocks)
    bar = "AVX2 only, W3A3: deferred widening, times our three-instruction int8"
    yield from _between(options, bar, shape, ("deferred", "avx2"), ("int8", "avx2"), 1.4, blocks)
    bar = "VNNI without VBMI, W3A3, times AVX-512 BW"
    arms = ("dense", "avx512vnni"), ("dense", "avx512bw")
    yield from _between(options, bar, shape, *arms, 1.2, blocks)
    bar = "512^3 W3A3 with AMX, times AVX-512"
    arms = ("tiles", "amx"), ("dense", "avx512")
    yield from _between(options, bar, shape, *arms, 2.0, blocks)
    bar = "512^3 W3A3, times our bit-serial"
    yield from _between(options, bar, shape, ("auto", "auto"), ("bit_serial", "auto"), 1.6, blocks)
    for bar, level, target in (
        ("AVX2 only, W3A3, times gemmlowp", "avx2", 4.0),
        ("512^3 W3A3, times gemmlowp", "auto", 5.0),
    ):
        if options.wants(bar):
            options.progress(bar)
            peer = peers.gemmlowp(*shape)
            yield from _versus(options, bar, shape, (3, 3), peer, target, blocks, level)
    bar = "512^3 W3A3, times torch qnnpack"
    yield from _versus(
        options, bar, shape, (3, 3), peers.quantized("qnnpack", *shape), 10.0, blocks
    )


def _against_engines(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    bits: tuple[int, int],
    engines: dict[str, Run],
    target: float,
    blocks: int,
    why_not: str,
) -> Iterator[Bar]:
    if not options.wants(bar):
        return
    options.progress(bar)
    if not engines:
        yield not_judged(bar, "x", f">= {target:g}", "this PyTorch runs no 8-bit product")
        return
    run, kernel = _ours(shape, *bits)
    taken = _taken({"ours": run, **engines}, blocks)
    best = min(engines, key=taken.median_s)
    row = taken.ratio(best, "ours").at_least(bar, target, detail=f"{kernel} against {best}")
    if why_not:
        row = replace(row, holds=None, detail=f"{why_not}; {row.detail}")
    yield row


def _versus(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    bits: tuple[int, int],
    peer: Peer,
    target: float,
    blocks: int,
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
    taken = _taken({"ours": run, "peer": peer}, blocks)
    yield taken.ratio("peer", "ours").at_least(bar, target, detail=kernel)


def _between(
    options: BenchOptions,
    bar: str,
    shape: tuple[int, int, int],
    fast: tuple[str, str],
    slow: tuple[str, str],
    target: float,
    blocks: int,
) -> Iterator[Bar]:
    """Compare two of our kernels, each a scheme and a level, at W3A3."""
    if not options.wants(bar):
        return
    options.progress(bar)
    for scheme, level in (fast, slow):
        levels = cpu_features().levels if level == "auto" else [InstructionSet(level)]
        if scheme not in ("auto", *candidates(Shape(None, *shape[1:], 3, 3), levels)):
            yield not_judged(bar, "x", f">= {target:g}", f"no {scheme} for {levels[0]} here")
            return
    first, kernel = _ours(shape, 3, 3, *fast)
    second, other = _ours(shape, 3, 3, *slow)
    taken = _taken({"fast": first, "slow": second}, blocks)
    yield taken.ratio("slow", "fast").at_least(bar, target, detail=f"{kernel} against {other}")


# ---- matrix times vector ----------------------------------------------------------------------


def _layer(shape: tuple[int, int, int], w: int) -> Run:
    """Return a layer from floats to floats, like its peers, with activations of 8 bits."""
    m, n, k = shape
    weight = torch.randint(0, 2**w, (n, k), dtype=torch.uint8)
    packed = pack_weights(weight, w, zero_points=2 ** (w - 1), rows=m)
    x, scale = torch.rand(m, k), torch.ones(n)
    return lambda: linear(x, packed, scale, activation_scale=1 / 255)


def _vector_rows(options: BenchOptions) -> Iterator[Bar]:
    shape = (1, _WIDE, _WIDE)
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
    # Large enough to come from memory: four times the size of any processor's cache.
    read = torch.ones(1 << 26, dtype=torch.float32)
    arms["read"] = read.sum
    theirs = {w: peers.onnxruntime(w, *shape) for w, bar in ort_names.items() if options.wants(bar)}
    arms |= {f"ort W{w}": run for w, run in theirs.items() if not isinstance(run, str)}
    taken = paired(arms, blocks=40 if options.full else 12, spoil=read.sum, once=True)
    ms = {name: 1e3 * taken.median_s(name) for name in taken.arms}
    for w, other in theirs.items():
        bar, target = ort_names[w], against_ort[w]
        if isinstance(other, str):
            yield not_judged(bar, "x", f">= {target:g}", other)
            continue
        detail = f"MatMulNBits {ms[f'ort W{w}']:.2f} ms"
        yield taken.ratio(f"ort W{w}", f"W{w}").at_least(bar, target, detail=detail)
    for w, bar in names.items():
        if not options.wants(bar):
            continue
        if isinstance(peer, str):
            yield not_judged(bar, "x", f">= {targets[w]:g}", peer)
            continue
        detail = f"dense; {ms[f'W{w}']:.2f} ms"
        yield taken.ratio("fbgemm", f"W{w}").at_least(bar, targets[w], detail=detail)
    blocks = len(taken.times_s("read"))
    times = [ms[f"W{w}"] for w in range(2, 9)]
    if options.wants(law):
        r2 = float(np.corrcoef(range(2, 9), times)[0, 1] ** 2)
        shown = ", ".join(f"W{w} {t:.2f}" for w, t in zip(range(2, 9), times, strict=True))
        yield at_least(law, r2, 0.97, "", n=blocks, detail=f"ms: {shown}", data={"ms": times})
    if options.wants(stream):
        bandwidth = read.nbytes / ms["read"] / 1e6
        ours = _WIDE * _WIDE / ms["W8"] / 1e6
        detail = f"{ours:.1f} of {bandwidth:.1f} GB/s, a sum of 256 MiB by torch"
        yield at_least(stream, ours / bandwidth, 0.85, "x", n=blocks, detail=detail)
