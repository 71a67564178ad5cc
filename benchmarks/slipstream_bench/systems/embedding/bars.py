"""``slipstream bench embedding``: compressed tables compared with torch's and with theory.

Module `tt` has the rows of tensor trains.

Times are CPU time of one thread. Every sample takes new batches, after an uncounted one, so that an
arm is timed with its own data in the caches, as in a server. Hashed rows have no signs, as in the
technique and in plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.techniques.embedding.formats.robe import (
    SIGN,
    ROBEEmbeddingBag,
    ROBEEmbeddingCollection,
)
from slipstream.techniques.embedding.formats.shared_array import SharedArray
from slipstream.techniques.embedding.kernels import robe as robe_kernels
from slipstream.techniques.embedding.kernels import robe_reference as reference
from slipstream_bench.harness import numbered, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.embedding import (
    device,
    memory,
    predictions,
    quality_bars,
    scaling,
    serving,
    theory,
    tt,
)
from slipstream_bench.systems.embedding.criteo import TERABYTE_ROWS, scaled_rows
from slipstream_bench.systems.embedding.growth import fits

_ROWS, _DIM = 11_000_000, 64
_BAGS, _IDS = 512, 10_240
_SPEED_BARS = {64: 5.0, 32: 3.1, 16: 2.0}
_BATCHES = 16
_MIN_P_VALUE = 0.001


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick uses smaller tables for 26 of them, and fewer draws."""
    yield from tt.bars(options)
    yield from device.bars(options)
    if not robe_kernels.kernels():
        reason = why_no_library() or "no kernel runs here"
        yield not_judged("look-up, block 32: over EmbeddingBag", "x", ">= 3.1", reason)
        return
    keep_pages()
    with one_thread():
        yield from _lookup_rows(options)
        yield from _collection_rows(options)
        yield from scaling.bars(options)
        yield from serving.bars(options)
        yield from predictions.bars(options)
    yield from _hash_rows(options)
    yield from _theory_rows(options)
    yield from memory.bars(options)
    yield from quality_bars.bars(options)


def _kernel() -> str:
    return next(iter(robe_kernels.kernels()))


def _lookup_rows(options: BenchOptions) -> Iterator[Bar]:
    names = {z: f"look-up, block {z}: over EmbeddingBag" for z in _SPEED_BARS}
    step = "train step with Adagrad, block 32: over EmbeddingBag with sparse gradients"
    if not any(map(options.wants, (*names.values(), step))):
        return
    if not fits(_ROWS * _DIM * 4):
        for z, name in names.items():
            yield not_judged(name, "x", f">= {_SPEED_BARS[z]}", "too little free memory")
        yield not_judged(step, "x", ">= 1.5", "too little free memory")
        return
    options.progress(f"a table of {_ROWS} x {_DIM}")
    table = torch.full((_ROWS, _DIM), 0.1)
    ids = [torch.randint(0, _ROWS, (_IDS,)) for _ in range(_BATCHES)]
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    shape = (_ROWS, _DIM)
    bags = {
        z: ROBEEmbeddingBag(
            *shape, SharedArray.compressing([shape], 1000, block=z, sign=SIGN), mode="sum"
        )
        for z in _SPEED_BARS
    }

    def of(bag: Any) -> Callable[[], object]:
        return numbered(lambda number: bag(ids[number % len(ids)], offsets))

    def dense(number: int) -> object:
        return functional.embedding_bag(ids[number % len(ids)], table, offsets, mode="sum")

    with torch.no_grad():
        arms = {"dense": numbered(dense), **{str(z): of(bag) for z, bag in bags.items()}}
        taken = paired(arms, blocks=30 if options.full else 12, warm=True)
    for z, name in names.items():
        if options.wants(name):
            detail = (
                f"{_ROWS} x {_DIM} at 1000x, {_IDS} uniform ids in {_BAGS} bags; ns per id: dense "
                f"{taken.median_s('dense') / _IDS * 1e9:.1f}, ours "
                f"{taken.median_s(str(z)) / _IDS * 1e9:.1f}; {_kernel()}"
            )
            ratio = taken.ratio("dense", str(z))
            yield ratio.at_least(name, _SPEED_BARS[z], detail=detail)
    if options.wants(step):
        options.progress(step)
        yield _train_row(step, table, bags[32], ids, offsets)


def _train_row(
    bar: str, table: torch.Tensor, bag: Any, ids: list[torch.Tensor], offsets: torch.Tensor
) -> Bar:
    # Torch's sparse Adagrad, with its row sums updated in place so that a second table fits.
    table.requires_grad_()
    if not fits(table.nbytes):
        return not_judged(bar, "x", ">= 1.5", "too little free memory for Adagrad's sums")
    gradient = torch.randn(_BAGS, _DIM)

    def trains(run: Callable[[int], torch.Tensor], parameter: torch.Tensor) -> Callable[[], object]:
        optimizer = torch.optim.Adagrad([parameter], lr=1e-3)

        def step(number: int) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(run(number), gradient)
            optimizer.step()

        return numbered(step)

    def dense(number: int) -> torch.Tensor:
        return functional.embedding_bag(
            ids[number % len(ids)], table, offsets, mode="sum", sparse=True
        )

    def ours(number: int) -> torch.Tensor:
        made: torch.Tensor = bag(ids[number % len(ids)], offsets)
        return made

    arms = {"dense": trains(dense, table), "ours": trains(ours, bag.pool.array)}
    taken = paired(arms, blocks=8, warm=True)
    detail = (
        f"ns per id: dense {taken.median_s('dense') / _IDS * 1e9:.0f}, ours "
        f"{taken.median_s('ours') / _IDS * 1e9:.0f}; {_kernel()}"
    )
    return taken.ratio("dense", "ours").at_least(bar, 1.5, detail=detail)


def _collection_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "26 tables in one call: over 26 calls of EmbeddingBag"
    if not options.wants(bar):
        return
    dim, batch, nbytes = 128, 2048, (12 if options.full else 3) * 10**9
    rows = scaled_rows(TERABYTE_ROWS, nbytes / (dim * 4))
    if not fits(nbytes):
        yield not_judged(bar, "x", ">= 4", f"needs {nbytes / 1e9:.0f} GB of free memory")
        return
    options.progress(bar)
    tables = [torch.full((count, dim), 0.1) for count in rows]
    named = {f"C{number}": (count, dim) for number, count in enumerate(rows)}
    pool = SharedArray.compressing(list(named.values()), 1000, block=64, sign=SIGN)
    together = ROBEEmbeddingCollection(named, pool)
    ids = [
        torch.stack([torch.randint(0, count, (batch, 1)) for count in rows])
        for _ in range(_BATCHES // 2)
    ]

    def apart(number: int) -> object:
        own = ids[number % len(ids)]
        return [functional.embedding_bag(own[i], t, mode="sum") for i, t in enumerate(tables)]

    with torch.no_grad():
        arms = {
            "dense": numbered(apart),
            "ours": numbered(lambda number: together(ids[number % len(ids)].view(-1, 1))),
        }
        taken = paired(arms, blocks=12, warm=True)
    detail = (
        f"{nbytes / 1e9:.0f} GB of {dim} columns at 1000x, block 64, bags of one, batch {batch}; "
        f"us per batch: dense {taken.median_s('dense') * 1e6:.0f}, ours "
        f"{taken.median_s('ours') * 1e6:.0f}; {_kernel()}"
    )
    yield taken.ratio("dense", "ours").at_least(bar, 4.0, detail=detail)


def _hash_rows(options: BenchOptions) -> Iterator[Bar]:
    keys, size, block = 10**6, 27_000_000, 32
    kinds = {
        "sequential ids": torch.arange(keys // 4),
        "multiples of 4096": torch.arange(keys // 4) * 4096,
        "ids beyond 2^31": torch.arange(keys // 4) * 3 + 2**31,
    }
    for name, ids in kinds.items():
        bar = f"hashes of {name}: uniform"
        if options.wants(bar):
            options.progress(bar)
            starts = torch.cat([_starts(t, ids, size) for t in range(2)])
            p = theory.uniformity(starts, size)
            detail = "chi-square, 1024 buckets, 2 tables, 2 blocks of each row; and p <= 0.999"
            yield Bar(bar, p, "p", ">= 0.001", _MIN_P_VALUE <= p <= 1 - _MIN_P_VALUE,
                      len(starts), detail)  # fmt: skip
        bar = f"hashes of {name}: overlap of blocks, from theory"
        if options.wants(bar):
            starts = torch.cat([_starts(t, ids, 10**6) for t in range(2)])
            off = abs(theory.overlaps(starts, 10**6, block) - 1) * 100
            yield at_most(bar, off, 3.0, "%", n=len(starts), detail="blocks of 32 in 10^6 numbers")


def _starts(table: int, ids: torch.Tensor, size: int) -> torch.Tensor:
    key = reference.table_key(0, table)
    return reference.starts(key, ids[:, None], torch.arange(2)[None], size).flatten()


def _theory_rows(options: BenchOptions) -> Iterator[Bar]:
    draws, dim, size = 200_000, 64, 256
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((2, dim))
    for block in (1, 4, 16, 64):
        names = (f"inner products, block {block}: mean", f"inner products, block {block}: variance")
        if not any(map(options.wants, names)):
            continue
        options.progress(names[0])
        made = theory.estimates(x, y, size, block, draws)
        expected = theory.variance(x, y, size, block)
        error = abs(made.mean() - x @ y) / max(made.std() / np.sqrt(draws), 1e-12 * abs(x @ y))
        detail = f"{draws} draws, {dim} columns in {size} numbers"
        if options.wants(names[0]):
            yield at_most(names[0], float(error), 3.0, "sigma", n=draws, detail=detail)
        if options.wants(names[1]):
            off = abs(made.var() - expected) / expected * 100 if expected else made.var()
            note = f"from V_Z = {expected:.4g}; {detail}"
            yield at_most(names[1], float(off), 3.0, "%", n=draws, detail=note)
