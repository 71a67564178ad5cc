"""Bars on size: tables of 96 GB train in a gigabyte, and no index is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from slipstream.native import why_no_library
from slipstream.techniques.embedding.formats.robe import ROBEEmbeddingBag
from slipstream.techniques.embedding.formats.shared_array import SharedArray
from slipstream.techniques.embedding.kernels.robe import kernels
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.embedding.criteo import TERABYTE_40M_ROWS
from slipstream_bench.systems.embedding.growth import growth_mib

_DIM, _NUMBERS, _BATCH = 128, 27_000_000, 256
_STEPS = {True: 200, False: 10}
_LIMIT_S = 3000


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield two rows; quick takes fewer steps, which need the same memory."""
    yield from _index_row(options)
    bar = "96.1 GB of tables in 27M numbers: peak memory of training"
    if not options.wants(bar):
        return
    if not kernels():
        yield not_judged(bar, "GiB", "<= 1", why_no_library() or "no kernel runs here")
        return
    steps = _STEPS[options.full]
    options.progress(f"{bar}, {steps} steps")
    ran = subprocess.run(
        [sys.executable, "-m", __name__, str(steps)],
        capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if ran.returncode:
        errors = ran.stderr.strip().splitlines() or ["without a message"]
        yield not_judged(bar, "GiB", "<= 1", f"it ended with {ran.returncode}: {errors[-1]}")
        return
    found = json.loads(ran.stdout)
    detail = (
        f"{sum(TERABYTE_40M_ROWS):,} x {_DIM} in float32 are {found['dense'] / 1e9:.1f} GB; DLRM "
        f"13-512-256-128 and 1024-1024-512-256-1, batch {_BATCH}, Adagrad, {steps} steps; losses "
        f"{found['first']:.3f} to {found['last']:.3f}; before the model {found['before']:.2f} GiB"
    )
    yield at_most(bar, found["peak"], 1.0, "GiB", n=steps, detail=detail)


def _index_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "train step: memory for each id, beside the gradient"
    if not options.wants(bar) or not kernels():
        return
    rows, dim, bags = 11_000_000, 64, 500
    bag = ROBEEmbeddingBag(
        rows, dim, SharedArray.compressing([(rows, dim)], 1000, block=32), mode="sum"
    )
    gradient = torch.randn(bags, dim)

    def grown(count: int) -> float | None:
        ids, offsets = torch.randint(0, rows, (count,)), torch.arange(0, count, count // bags)
        bag.zero_grad()
        return growth_mib(lambda: torch.autograd.backward(bag(ids, offsets), gradient))

    grown(bags)  # memory of the first pass alone: threads and their stacks
    few, many = 100_000, 1_000_000
    small, large = grown(few), grown(many)
    if small is None or large is None:
        yield not_judged(bar, "bytes per id", "<= 8", "this system does not report it")
        return
    each = max(large - small, 0.0) * 2**20 / (many - few)
    detail = (
        f"growth with {few:,} ids {small:.1f} MiB, with {many:,} {large:.1f} MiB, the gradient of "
        f"{bag.pool.array.nbytes / 2**20:.1f} MiB included; an index has {8 * dim} bytes per id"
    )
    yield at_most(bar, each, 8.0, "bytes per id", n=2, detail=detail)


def _train(steps: int) -> None:
    """Train on generated ids and clicks in this process, and print its peak memory."""
    import resource

    from torch.nn.functional import binary_cross_entropy_with_logits

    from slipstream.techniques.embedding.formats.robe import ROBEEmbeddingCollection
    from slipstream_bench.systems.embedding.dlrm import ClickNetwork

    def peak_gib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    before = peak_gib()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pool = SharedArray(_NUMBERS, block=32, init_std=0.05)
    named = {f"C{number}": (rows, _DIM) for number, rows in enumerate(TERABYTE_40M_ROWS)}
    tables = ROBEEmbeddingCollection(named, pool)
    network = ClickNetwork(len(named), 13, _DIM, (512, 256), (1024, 1024, 512, 256))
    parameters = [*tables.parameters(), *network.parameters()]
    optimizer = torch.optim.Adagrad(parameters, 0.01, foreach=False)
    losses = []
    for _ in range(steps):
        # Small ids are frequent, as are ids in order of popularity.
        ids = torch.cat([(rows * torch.rand(_BATCH) ** 6).long() for rows in TERABYTE_40M_ROWS])
        dense = torch.randn(_BATCH, 13)
        clicked = (ids.view(len(named), _BATCH)[:3] % 2).sum(0) > 1
        rows = tables(ids.view(-1, 1)).view(_BATCH, len(named), _DIM)
        made = network(rows, dense)
        loss = binary_cross_entropy_with_logits(made, clicked.float())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    dense_bytes = sum(TERABYTE_40M_ROWS) * _DIM * 4
    found = {
        "peak": peak_gib(), "before": before, "first": losses[0], "last": losses[-1],
        "dense": dense_bytes,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    _train(int(sys.argv[1]))
