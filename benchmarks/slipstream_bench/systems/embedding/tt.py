"""Rows of tensor trains in ``slipstream bench embedding``.

The shape is the published one: 11,000,000 x 64 as (200, 220, 250) x (4, 4, 4), ranks 32, 10,240 ids
in 512 bags. Peers: slices gathered and multiplied by torch's operators, tensorly-torch, the rate of
``torch.mm``, and ``F.embedding_bag`` over a dense table.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from slipstream.heap import keep_pages
from slipstream.native import why_no_library
from slipstream.techniques.embedding.formats.tt import TTEmbedding, TTEmbeddingBag
from slipstream.techniques.embedding.kernels import tt as tt_kernels
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream_bench.harness import Paired, guarded, numbered, one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.embedding.criteo import KAGGLE_ROWS, TERABYTE_ROWS
from slipstream_bench.systems.embedding.growth import growth_mib

_ROWS, _DIM, _RANK = 11_000_000, 64, 32
_FACTORS = ((200, 220, 250), (4, 4, 4))
_BAGS, _IDS, _BATCHES = 512, 10_240, 6
_MEMORY_MIB = 64.0
_MEMORY_IDS = (50_000, 200_000, 800_000)
_PEERS = ("naive torch", "tensorly-torch")
_INSTALL = (
    "tensorly-torch is not installed: pip install --no-deps tensorly==0.10.0 tensorly-torch==0.5.0"
)
_PREFIXES = (1_000, 2_000, 4_000, 8_000)

_KAGGLE_FACTORS = (
    (200, 220, 250), (200, 200, 209), (200, 200, 200), (166, 175, 188), (125, 130, 136),
    (53, 72, 75), (50, 52, 55),
)  # fmt: skip
_PUBLISHED = (
    ("Criteo Kaggle, 3 tables, rank 32", 3, 32, 4.1),
    ("Criteo Kaggle, 5 tables, rank 32", 5, 32, 48.3),
    ("Criteo Kaggle, 7 tables, rank 32", 7, 32, 117.4),
    ("Criteo Kaggle, 7 tables, rank 8", 7, 8, 221.9),
    ("Criteo Terabyte, 7 tables, rank 8", 7, 8, 112.5),
)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes fewer rounds.

    Call it before this process is set to keep its pages: naive products request hundreds of MB from
    the system in each call, and that costs time in a user's process too.
    """
    yield from _ratio_rows(options)
    yield from _first_number_rows(options)
    if not tt_kernels.kernels():
        reason = why_no_library() or "no kernel runs here"
        yield not_judged("tensor train, look-up: over naive torch", "x", ">= 30", reason)
        return
    with one_thread():
        yield from _memory_row(options)
        yield from _lookup_rows(options)
        keep_pages()
        yield from _kept_row(options)
        yield from _reuse_rows(options)
        yield from _cache_rows(options)
        yield from _refresh_row(options)
        yield from _trained_rows(options)
        yield from _bits_row(options)
        yield from _thread_row(options)


def _ratio_rows(options: BenchOptions) -> Iterator[Bar]:
    for name, tables, rank, published in _PUBLISHED:
        bar = f"tensor train, {name}: from the published ratio"
        if not options.wants(bar):
            continue
        kaggle = "Kaggle" in name
        counts = sorted(KAGGLE_ROWS if kaggle else TERABYTE_ROWS, reverse=True)
        dim = 16 if kaggle else 64
        trains = [
            TTShape.of(
                rows, dim, (rank, rank), (_KAGGLE_FACTORS[t], (2, 2, 4)) if kaggle else None
            ).numbers
            for t, rows in enumerate(counts[:tables])
        ]
        ratio = sum(counts) * dim / (sum(trains) + sum(counts[tables:]) * dim)
        # 4.06 was published as 4.1, so compare after rounding.
        off = abs(round(ratio, 1) / published - 1) * 100
        yield at_most(bar, off, 0.5, "%", detail=f"{ratio:.3f}, published {published}")


def _first_number_rows(options: BenchOptions) -> Iterator[Bar]:
    for cores in (2, 3, 4):
        spread, peak = (
            f"tensor train, first numbers, {cores} cores: {what}"
            for what in ("standard deviation, from 1/sqrt(3E)", "excess kurtosis")
        )
        if not (options.wants(spread) or options.wants(peak)):
            continue
        off, kurtosis, count = [], {}, 100_000
        for rank in (2, 8, 32, 64):
            torch.manual_seed(rank)
            # Take many rows, which share little: a hundred per slice would share its random
            # numbers.
            drawn: list[torch.Tensor] = []
            while sum(part.numel() for part in drawn) < count:
                train = TTEmbedding(10_000_000, 16, (rank,) * (cores - 1))
                rows = train(torch.randint(0, 10_000_000, (count // 160,))).detach()
                drawn.append(rows.flatten().double() * math.sqrt(3 * 10_000_000))
            made = torch.cat(drawn)
            off.append(abs(float(made.std()) - 1) * 100)
            kurtosis[rank] = float((made**4).mean() / (made**2).mean() ** 2 - 3)
        worst = max(kurtosis.values(), key=abs)
        note = "ranks 2, 8, 32, 64: " + ", ".join(f"{value:.2f}" for value in kurtosis.values())
        if options.wants(spread):
            yield at_most(spread, max(off), 2.0, "%", n=count)
        if options.wants(peak):
            yield at_most(peak, abs(worst), 0.3, "", n=count, detail=note)


def _naive(cores: list[torch.Tensor], ids: torch.Tensor, bags: int) -> torch.Tensor:
    """Return the usual implementation: gathered slices, two batched products, a sum over bags."""
    return reference.rows_of(cores, ids).view(bags, -1, _DIM).sum(1)


def _tensorly() -> Any:
    """Return tensorly-torch's module of the same shape, or None."""
    try:
        module: Any = importlib.import_module("tltorch")
    except ImportError:
        return None
    return module.FactorizedEmbedding(
        _ROWS, _DIM, auto_tensorize=False, tensorized_num_embeddings=_FACTORS[0],
        tensorized_embedding_dim=_FACTORS[1], factorization="blocktt", rank=_RANK,
    )  # fmt: skip


def _train(**settings: Any) -> TTEmbeddingBag:
    torch.manual_seed(0)
    return TTEmbeddingBag(_ROWS, _DIM, (_RANK, _RANK), _FACTORS, **settings)


def _kernel() -> str:
    return next(iter(tt_kernels.kernels()))


def _lookup_rows(options: BenchOptions) -> Iterator[Bar]:
    naive, other = (f"tensor train, look-up: over {name}" for name in _PEERS)
    if options.wants(naive) or options.wants(other):
        options.progress(naive)
        taken = _against_peers(12 if options.full else 8)
        for bar, name, target in ((naive, _PEERS[0], 30.0), (other, _PEERS[1], 50.0)):
            if not options.wants(bar):
                continue
            if name not in taken.arms:
                yield not_judged(bar, "x", f">= {target:g}", _INSTALL)
                continue
            yield taken.ratio(name, "ours").at_least(bar, target, detail=_us_per_id(taken))
    yield from _rate_rows(options)


def _kept_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "tensor train, look-up: over naive torch that keeps its pages"
    if options.wants(bar):
        taken = _against_peers(12 if options.full else 8)
        ratio = taken.ratio(_PEERS[0], "ours")
        yield ratio.reported(bar, detail=f"the gain without page faults; {_us_per_id(taken)}")


def _us_per_id(taken: Paired) -> str:
    """Describe the times of all arms."""
    times = ", ".join(f"{name} {taken.median_s(name) / _IDS * 1e6:.2f}" for name in taken.arms)
    return f"us per id: {times}; {_kernel()}"


def _against_peers(blocks: int) -> Paired:
    """Run ours against the installed peers."""
    bag = _train()
    cores = [core.detach() for core in bag.cores]
    ids = [torch.randint(0, _ROWS, (_IDS,)) for _ in range(_BATCHES)]
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    arms = {
        "ours": numbered(lambda number: bag(ids[number % _BATCHES], offsets)),
        _PEERS[0]: numbered(lambda number: _naive(cores, ids[number % _BATCHES], _BAGS)),
    }
    peer = _tensorly()
    if peer is not None:
        arms[_PEERS[1]] = numbered(lambda number: peer(ids[number % _BATCHES]))
    with torch.no_grad():
        return paired(arms, blocks=blocks, warm=True)


def _rate_rows(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "tensor train, look-up: of torch.mm's rate",
        "tensor train, forward, backward and SGD: over forward",
    )
    if not any(map(options.wants, names)):
        return
    bag = _train()
    ids = [torch.randint(0, _ROWS, (_IDS,)) for _ in range(_BATCHES)]
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    left, right = torch.randn(_IDS, _RANK), torch.randn(_RANK, 4 * _RANK)
    out, gradient = torch.empty(_IDS, 4 * _RANK), torch.randn(_BAGS, _DIM)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1e-6)

    def ours(number: int) -> None:
        with torch.no_grad():
            bag(ids[number % _BATCHES], offsets)

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(bag(ids[number % _BATCHES], offsets), gradient)
        optimizer.step()

    arms = {
        "forward": numbered(ours),
        "mm": lambda: torch.mm(left, right, out=out),
        "step": numbered(step),
    }
    taken = paired(arms, blocks=20 if options.full else 8, warm=True)
    if options.wants(names[0]):
        ratio = taken.ratio("mm", "forward")
        # Time of mm over ours, times our work over that of mm.
        share = bag.shape.flops / (2 * _RANK * 4 * _RANK) * ratio.value
        rates = (
            bag.shape.flops * _IDS / taken.median_s("forward") / 1e9,
            2 * _IDS * _RANK * 4 * _RANK / taken.median_s("mm") / 1e9,
        )
        detail = (
            f"GFLOP/s: ours {rates[0]:.0f}, torch.mm of {_IDS} x {_RANK} x {4 * _RANK} "
            f"{rates[1]:.0f}; time {ratio}; {_kernel()}"
        )
        row = at_least(names[0], share, 0.9, "x", n=ratio.n, detail=detail)
        yield guarded(row, {"mm over forward": ratio})
    if options.wants(names[1]):
        ratio = taken.ratio("step", "forward")
        yield ratio.at_most(names[1], 4.0, detail=_us_per_id(taken))


def _zipf(count: int, exponent: float, rows: int) -> torch.Tensor:
    """Draw ids 0 (the most frequent) to rows - 1 by Zipf's law, inverting its continuous form."""
    drawn = torch.rand(count, dtype=torch.float64)
    end = math.exp(math.log(rows) * (1 - exponent))
    return (((end - 1) * drawn + 1) ** (1 / (1 - exponent))).long().clamp(1, rows) - 1


def _reuse_rows(options: BenchOptions) -> Iterator[Bar]:
    sorted_ = "tensor train, Zipf ids sorted by frequency: over uniform ids"
    slope = "tensor train, time by distinct prefixes: R^2 of a line"
    if not (options.wants(sorted_) or options.wants(slope)):
        return
    options.progress(sorted_)
    bag = _train()
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    uniform = [torch.randint(0, _ROWS, (_IDS,)) for _ in range(_BATCHES)]
    zipf = [_zipf(_IDS, 1.05, _ROWS) for _ in range(_BATCHES)]

    def of(ids: list[torch.Tensor]) -> Callable[[], object]:
        return numbered(lambda number: bag(ids[number % _BATCHES], offsets))

    # The same number of ids with a varying number of prefixes; their last digits all differ.
    grouped = {
        str(count): [
            torch.randperm(44_000)[:count].repeat(-(-_IDS // count))[:_IDS] * 250
            + torch.arange(_IDS) // count
            for _ in range(_BATCHES)
        ]
        for count in _PREFIXES
    }
    arms = {"uniform": of(uniform), "zipf": of(zipf)}
    with torch.no_grad():
        zipf_taken = paired(arms, blocks=12, warm=True)
        taken = paired({name: of(ids) for name, ids in grouped.items()}, blocks=12, warm=True)
    if options.wants(sorted_):
        yield zipf_taken.ratio("uniform", "zipf").at_least(sorted_, 2.0, detail=_kernel())
    if options.wants(slope):
        times_us = {count: taken.median_s(str(count)) * 1e6 for count in _PREFIXES}
        pairs = torch.tensor([list(times_us), list(times_us.values())])
        square = float(torch.corrcoef(pairs)[0, 1]) ** 2
        detail = "us per batch: " + ", ".join(f"{c}: {time:.0f}" for c, time in times_us.items())
        data = {"prefixes": list(times_us), "us": list(times_us.values())}
        yield at_least(slope, square, 0.95, "", n=len(_PREFIXES), detail=detail, data=data)


def _cache_rows(options: BenchOptions) -> Iterator[Bar]:
    hits = "tensor train, cache of 0.1 %, Zipf ids: hit rate, from the best possible"
    costs = {
        False: "tensor train, cached ids: over EmbeddingBag",
        True: "tensor train, cached ids that are counted for training: over EmbeddingBag",
    }
    if not any(map(options.wants, (hits, *costs.values()))):
        return
    options.progress(hits)
    bag = _train(cache_rows=_ROWS // 1000, cache_policy="manual")
    assert bag.hot is not None
    scramble = torch.randperm(_ROWS)
    warm, late = (scramble[_zipf(count, 1.05, _ROWS)] for count in (3_000_000, 500_000))
    bag.hot.record(warm)
    bag.refresh()
    if options.wants(hits):
        best = torch.isin(late, scramble[: _ROWS // 1000]).double().mean()
        rate = torch.isin(late, bag.hot.ids).double().mean()
        detail = f"{float(rate):.1%} of {float(best):.1%}, 3,000,000 ids before"
        yield at_most(hits, float(best - rate) * 100, 2.0, "points", n=len(late), detail=detail)
    for counted, bar in costs.items():
        if options.wants(bar):
            yield _cached_row(bar, bag.train(counted))


def _cached_row(bar: str, bag: TTEmbeddingBag) -> Bar:
    assert bag.hot is not None
    table, hot = torch.full((2_000_000, _DIM), 0.1), bag.hot.ids
    ours = [hot[torch.randint(0, len(hot), (_IDS,))] for _ in range(_BATCHES)]
    ids = [torch.randint(0, len(table), (_IDS,)) for _ in range(_BATCHES)]
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    arms = {
        "dense": numbered(
            lambda n: functional.embedding_bag(ids[n % _BATCHES], table, offsets, mode="sum")
        ),
        "ours": numbered(lambda n: bag(ours[n % _BATCHES], offsets)),
    }
    with torch.no_grad():
        taken = paired(arms, blocks=20, warm=True)
    return taken.ratio("ours", "dense").at_most(bar, 2.0, detail=_us_per_id(taken))


def _refresh_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "tensor train, 20 refreshes of the cache: mean change of the loss"
    if not options.wants(bar):
        return
    options.progress(bar)
    torch.manual_seed(0)
    rows, dim = 20_000, 16
    targets = torch.randn(rows, dim)
    train = TTEmbedding(rows, dim, (16, 16), init_std=0.5, cache_rows=200, cache_policy="manual")
    optimizer = torch.optim.Adagrad(train.parameters(), lr=0.05)
    scramble = torch.randperm(rows)
    fixed = scramble[_zipf(20_000, 1.05, rows)]

    def loss(ids: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = train(ids) - targets[ids]
        return error.square().mean()

    changes, moved = [], 0
    for _ in range(20):
        for _ in range(25):
            optimizer.zero_grad()
            torch.autograd.backward(loss(scramble[_zipf(1024, 1.05, rows)]))
            optimizer.step()
        train.eval()
        with torch.no_grad():
            before = float(loss(fixed))
        moved += len(train.refresh(optimizer))
        with torch.no_grad():
            changes.append(abs(float(loss(fixed)) / before - 1) * 100)
        train.train()
    detail = f"largest {max(changes):.2f} %; {moved} rows moved; final loss {before:.3f}"
    yield at_most(bar, statistics.mean(changes), 0.5, "%", n=20, detail=detail)


def _trained_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare the loss with the hottest hundredth of the rows cached, and without a cache."""
    rates = {"SGD": 1.0, "Adagrad": 0.05, "Adam": 0.01}
    rows = {f"tensor train, training with a cache, {name}: loss over that without": name
            for name in rates}  # fmt: skip
    for bar, name in rows.items():
        if not options.wants(bar):
            continue
        options.progress(bar)
        ratios, losses_by_seed = [], []
        for seed in range(3 if options.full else 1):
            losses = [_trained(name, rates[name], cached, seed) for cached in (0, 200)]
            ratios.append(losses[1] / losses[0])
            losses_by_seed.append(f"{losses[1]:.4f} and {losses[0]:.4f}")
        detail = f"worst of the seeds; with and without: {', '.join(losses_by_seed)}"
        yield at_most(bar, max(ratios), 1.0, "x", n=len(ratios), detail=detail)


def _trained(optimizer: str, rate: float, cached: int, seed: int) -> float:
    """Return the loss after 500 steps with automatic caching, on the same distribution."""
    torch.manual_seed(seed)
    rows, dim = 20_000, 16
    targets, scramble = torch.randn(rows, dim), torch.randperm(rows)
    batches = [scramble[_zipf(1024, 1.05, rows)] for _ in range(500)]
    fixed = scramble[_zipf(20_000, 1.05, rows)]
    train = TTEmbedding(rows, dim, (16, 16), init_std=0.5, cache_rows=cached)
    step = getattr(torch.optim, optimizer)(train.parameters(), lr=rate)
    for ids in batches:
        step.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(train(ids), targets[ids]))
        step.step()
    train.eval()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(train(fixed), targets[fixed]))


def _memory_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "tensor train, forward and backward: growth of memory"
    if not options.wants(bar):
        return
    bag = _train()
    grown = [_growth_mib(bag, count) for count in _MEMORY_IDS]
    if None in grown:
        yield not_judged(bar, "MiB", f"<= {_MEMORY_MIB:g}", "this system does not report it")
        return
    by_ids = ", ".join(f"{c:,}: {g:.0f}" for c, g in zip(_MEMORY_IDS, grown, strict=True))
    yield at_most(bar, max(g for g in grown if g is not None), _MEMORY_MIB, "MiB", n=len(grown),
                  detail=f"by ids: {by_ids}; includes gradients of the cores (4 MiB)")  # fmt: skip


def _growth_mib(bag: TTEmbeddingBag, count: int) -> float | None:
    """Return memory growth of a forward and backward pass of `count` ids, in bags of 2,000."""
    ids = torch.randint(0, _ROWS, (count,))
    offsets = torch.arange(0, len(ids), 2_000)
    gradient = torch.randn(len(offsets), _DIM)
    grown = growth_mib(lambda: torch.autograd.backward(bag(ids, offsets), gradient))
    bag.zero_grad()
    return grown


def _bits_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "tensor train, gradients of 1000 equal ids: runs with other bits"
    if not options.wants(bar):
        return
    bag = _train()
    ids = torch.cat([torch.full((1000,), 12345), torch.randint(0, _ROWS, (9_240,))])
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)
    gradient, first, others = torch.randn(_BAGS, _DIM), None, 0
    for _ in range(10):
        bag.zero_grad()
        torch.autograd.backward(bag(ids, offsets), gradient)
        made = [core.grad.clone() for core in bag.cores if core.grad is not None]
        first = first or made
        others += not all(map(torch.equal, first, made))
    yield at_most(bar, others, 0, "of 10", n=10)


def _thread_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "tensor train, look-up by 2 threads: over 1"
    if not options.wants(bar):
        return
    if torch.get_num_threads() != 1 or len(os.sched_getaffinity(0)) < 2:
        yield not_judged(bar, "x", ">= 1.7", "one core")
        return
    bag, ids = _train(), torch.randint(0, _ROWS, (_IDS,))
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)

    def by(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        rows: torch.Tensor = bag(ids, offsets)
        return rows

    with torch.no_grad():
        same = all(torch.equal(by(1), by(2)) for _ in range(30))
        taken = paired({"1": lambda: by(1), "2": lambda: by(2)}, clock="wall", blocks=30)
    torch.set_num_threads(1)
    row = taken.ratio("1", "2").at_least(bar, 1.7, detail="wall times")
    yield replace(
        row, target=f"{row.target}, same bits", holds=row.holds if same else False,
        detail=f"{row.detail}; {'same' if same else 'other'} bits",
    )  # fmt: skip
