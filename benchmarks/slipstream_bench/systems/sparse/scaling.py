"""Rows of ``slipstream bench sparse``: threads, predicted work, memory, GPUs."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from slipstream.sparse.kernels import AT_ONCE
from slipstream.sparse.matrix import Floats
from slipstream.sparse.pairwise import distance_tiles
from slipstream.sparse.search import SearchRun
from slipstream_bench.harness import on_cuda, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.sparse.samples import heavy_row, prepared, sample, skewed_rows

_NEIGHBOURS = 10
# Level-2 cache of a core of most server processors.
_SECOND_LEVEL_BYTES = 2**20
# Rows that torch's product on a GPU takes as a dense matrix, 2 GB of 20 Newsgroups.
_BLOCK = 4096


def threads_bars(options: BenchOptions, rows: sp.csr_matrix | str | None) -> Iterator[Bar]:
    cases: list[tuple[str, Callable[[], sp.csr_matrix], float]] = [
        ("two threads over one: a row of half density among 20,000", heavy_row, 1.7)
    ]
    if rows is not None and not isinstance(rows, str):
        real = rows
        cases.insert(0, ("two threads over one: 20 Newsgroups", lambda: real, 1.8))
    for bar, make, target in cases:
        if not options.wants(bar):
            continue
        options.progress(bar)
        matrix = make()
        queries = matrix if "density" in bar else sample(matrix, 2000)
        single, double = (prepared(queries, matrix, "cosine", threads) for threads in (1, 2))
        arms = {
            "one": functools.partial(single.nearest, _NEIGHBOURS),
            "two": functools.partial(double.nearest, _NEIGHBOURS),
        }
        taken = paired(arms, clock="wall", blocks=8, budget_s=60.0)
        detail = f"kNN of {queries.shape[0]} queries, wall time; both processors must be idle"
        yield taken.ratio("one", "two").at_least(bar, target, detail=detail)


def work_law_bars(options: BenchOptions) -> Iterator[Bar]:
    bar, error = "time follows the predicted work: R2", "time follows the predicted work: error"
    if not (options.wants(bar) or options.wants(error)):
        return
    options.progress(bar)
    sizes = (1_000, 5_000, 20_000, 100_000) if options.full else (1_000, 3_000, 10_000)
    runs = []
    for size in sizes:
        for skew in (0.8, 1.0, 1.2):
            rows = skewed_rows(size, 30_000, skew, seed=size)
            runs.append(prepared(sample(rows, 200), rows, "cosine"))
    measured = _least_in_turns(runs, 20 if options.full else 10)
    table = np.array([_costs(run) for run in runs])
    predicted = _each_from_the_others(table, measured)
    residual = float(np.square(measured - predicted).sum())
    r2 = 1 - residual / float(np.square(measured - measured.mean()).sum())
    off = np.abs(predicted / measured - 1)
    work = [float(run.work().sum()) for run in runs]
    detail = f"{len(runs)} matrices, n {sizes[0]:,} to {sizes[-1]:,}, skew 0.8 to 1.2, "
    detail += f"{min(work):.1e} to {max(work):.1e} multiply-adds in {1e3 * measured.min():.1f} to "
    detail += f"{1e3 * measured.max():.1f} ms; each predicted from a fit to the others, median "
    detail += f"error {100 * float(np.median(off)):.0f} %"
    if options.wants(bar):
        data = {"measured_s": measured.tolist(), "predicted_s": predicted.tolist()}
        yield at_least(bar, r2, 0.97, "", n=len(runs), detail=detail, data=data)
    if options.wants(error):
        worst = 100 * float(off.max())
        yield at_most(error, worst, 25.0, "% at most", n=len(runs), detail=detail)


def _least_in_turns(runs: Sequence[SearchRun], rounds: int) -> Floats:
    """Return the minimum time of a search of each run, [runs], measured alternately."""
    arms = {
        str(number): functools.partial(run.nearest, _NEIGHBOURS) for number, run in enumerate(runs)
    }
    with one_thread():
        # The previous search left other rows in the cache.
        taken = paired(arms, blocks=rounds, warm=True, once=True)
    return np.array([taken.minimum_s(name) for name in arms])


def _costs(run: SearchRun) -> list[float]:
    """Return the costs that a search's time is fitted to.

    Listed additions, lists started, dense sweeps, pairs, pairs whose sums leave the level-2 cache
    before they are read again, replacements among the nearest, and the call.
    """
    index = run.index
    assert index is not None
    queries, rows = len(run.left), len(run.right)
    columns = run.left.indices
    in_head = index.head_of[columns] >= 0
    listed = float(run.right.frequency[columns[~in_head]].sum())
    tiles = index.list_start.shape[0]
    begun = float((~in_head).sum() * tiles)
    swept = float(in_head.sum()) * rows
    pairs = float(queries * rows)
    sums = min(queries, AT_ONCE) * min(index.tile_rows, rows) * index.dtype.itemsize
    far = pairs if sums > _SECOND_LEVEL_BYTES else 0.0
    # In random order the n-th row is among the k nearest so far with probability k / n.
    replacements = queries * _NEIGHBOURS * (1 + np.log(max(rows / _NEIGHBOURS, 1.0)))
    return [listed, begun, swept, pairs, far, replacements, 1.0]


def _each_from_the_others(table: Floats, measured: Floats) -> Floats:
    """Predict times from a fit of the costs of all *other* matrices, [matrices].

    Args:
        table: `_costs` of each matrix, [matrices, costs].
        measured: times, [matrices].
    """
    predicted = np.empty(len(measured))
    for held_out in range(len(measured)):
        others = np.arange(len(measured)) != held_out
        # Relative errors, so that small matrices count as much as large ones.
        relative = table[others] / measured[others, None]
        predicted[held_out] = table[held_out] @ _non_negative_fit(relative)
    return predicted


def _non_negative_fit(table: Floats) -> Floats:
    """Return non-negative weights of the columns, such that all rows sum to about 1."""
    from scipy.optimize import nnls

    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1  # a cost that none of these has gets no weight
    return np.asarray(nnls(table / scale, np.ones(len(table)))[0] / scale)


def device_bars(options: BenchOptions, rows: sp.csr_matrix | str | None) -> Iterator[Bar]:
    of_torch = "CUDA device over torch's sparse product: dot, all rows of 20 Newsgroups"
    yield from _device_bar(options, rows, of_torch, "inner_product", 1.0, _sparse_product)
    for metric in ("manhattan", "cosine"):
        bar = f"CUDA device over two threads: {metric}, all rows of 20 Newsgroups"
        yield from _device_bar(options, rows, bar, metric, 50.0, _two_threads)


def _device_bar(
    options: BenchOptions,
    rows: sp.csr_matrix | str | None,
    bar: str,
    metric: str,
    least: float,
    other: Callable[[sp.csr_matrix, str], tuple[Callable[[], None], str]],
) -> Iterator[Bar]:
    """Compare all distances of `rows` on a GPU with `other`, which also describes both sides."""
    import torch

    if not options.wants(bar):
        return
    if rows is None or isinstance(rows, str) or not torch.cuda.is_available():
        why = "no CUDA device" if not torch.cuda.is_available() else str(rows)
        yield not_judged(bar, "x", f">= {least:g}", why)
        return
    options.progress(bar)
    on_gpu = _on_device(rows)
    theirs, note = other(rows, metric)

    def ours() -> None:
        for tile in distance_tiles(on_gpu, metric=metric, block_bytes=2**31):
            del tile
        torch.cuda.synchronize()

    taken = paired({"ours": ours, "theirs": theirs}, clock="wall", blocks=8, budget_s=60.0)
    yield on_cuda(taken.ratio("theirs", "ours").at_least(bar, least, detail=f"{note}; {taken}"))


def _two_threads(rows: sp.csr_matrix, metric: str) -> tuple[Callable[[], None], str]:
    def run() -> None:
        for tile in distance_tiles(rows, metric=metric, n_jobs=2):
            del tile

    return run, "copies and row terms included"


def _sparse_product(rows: sp.csr_matrix, metric: str) -> tuple[Callable[[], None], str]:
    """Return rows times a dense block of them, since cuSPARSE cannot hold such a full product."""
    import torch

    on_gpu = _on_device(rows)
    starts = range(0, rows.shape[0], _BLOCK)
    blocks = [_on_device(rows[begin : begin + _BLOCK]) for begin in starts]

    def run() -> None:
        for block in blocks:
            torch.sparse.mm(on_gpu, block.to_dense().t())
        torch.cuda.synchronize()

    run()
    return run, f"theirs with {_BLOCK:,} dense rows at a time"


def _on_device(rows: sp.csr_matrix) -> Any:
    import torch

    starts, columns, values = map(torch.from_numpy, (rows.indptr, rows.indices, rows.data))
    return torch.sparse_csr_tensor(starts, columns, values, size=rows.shape).cuda()


def memory_bars(options: BenchOptions) -> Iterator[Bar]:
    bar = "memory: kNN of 200,000 x 100,000, 10^7 entries"
    budget = "memory: working memory over the block budget"
    if not (options.wants(bar) or options.wants(budget)):
        return
    options.progress(bar)
    rows = 200_000 if options.full else 50_000
    target = 600.0 if options.full else 150.0
    code = f"from slipstream_bench.systems.sparse.samples import peak; peak({rows}, {2**24})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode:
        yield not_judged(bar, "MiB", f"<= {target:g}", run.stderr.strip().splitlines()[-1])
        return
    whole, working, entries = (int(word) for word in run.stdout.split())
    detail = f"{rows:,} rows, {entries:,} entries, 500 queries, index included"
    if not options.full:
        detail += "; quick: a quarter of the rows and of the target"
    if options.wants(bar):
        yield at_most(bar, whole / 2**20, target, "MiB", detail=detail)
    if options.wants(budget):
        detail = "beyond matrix, index and result, by tracemalloc; budget 16 MiB"
        yield at_most(budget, working / 2**24, 1.1, "x", detail=detail)
