"""A bar on inference of a click model: tables larger than the caches, or one array inside them.

The gain is bounded by the look-ups' share of the time; the detail gives that of the networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from slipstream.techniques.embedding.formats.robe import ROBEEmbeddingCollection
from slipstream.techniques.embedding.formats.shared_array import SharedArray
from slipstream_bench.harness import numbered, paired
from slipstream_bench.rows import Bar, BenchOptions, not_judged
from slipstream_bench.systems.embedding.criteo import TERABYTE_ROWS, scaled_rows
from slipstream_bench.systems.embedding.dlrm import ClickNetwork
from slipstream_bench.systems.embedding.growth import fits

_DIM, _BATCH, _DENSE = 128, 2048, 13
_BOTTOM, _TOP = (512, 256), (1024, 1024, 512, 256)
_BATCHES = 8
_BAR = "inference of a click model, 2 threads: over dense tables"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield one row; quick takes a quarter of the tables' rows."""
    if not options.wants(_BAR):
        return
    nbytes = (12 if options.full else 3) * 10**9
    if not fits(nbytes):
        yield not_judged(_BAR, "x", ">= 1.3", f"needs {nbytes / 1e9:.0f} GB of free memory")
        return
    options.progress(_BAR)
    torch.manual_seed(0)
    rows = scaled_rows(TERABYTE_ROWS, nbytes / (_DIM * 4))
    tables = [torch.full((count, _DIM), 0.1) for count in rows]
    named = {f"C{number}": (count, _DIM) for number, count in enumerate(rows)}
    together = ROBEEmbeddingCollection(
        named, SharedArray.compressing(list(named.values()), 1000, block=64)
    )
    network = ClickNetwork(len(rows), _DENSE, _DIM, _BOTTOM, _TOP)
    numbers = torch.randn(_BATCH, _DENSE)
    ids = [
        torch.stack([torch.randint(0, count, (_BATCH, 1)) for count in rows])
        for _ in range(_BATCHES)
    ]

    def dense_rows(number: int) -> torch.Tensor:
        own = ids[number % _BATCHES]
        return torch.stack(
            [functional.embedding_bag(own[i], t, mode="sum") for i, t in enumerate(tables)], 1
        )

    def our_rows(number: int) -> torch.Tensor:
        made: torch.Tensor = together(ids[number % _BATCHES].view(-1, 1))
        return made.view(_BATCH, len(rows), _DIM)

    looked_up = our_rows(0).detach()

    def inference(look_up: Callable[[int], torch.Tensor]) -> Callable[[], object]:
        return numbered(lambda number: network(look_up(number), numbers))

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            arms = {
                "dense": inference(dense_rows), "ours": inference(our_rows),
                "networks": lambda: network(looked_up, numbers),
            }  # fmt: skip
            taken = paired(arms, clock="wall", blocks=12 if options.full else 8, warm=True)
    finally:
        torch.set_num_threads(threads)
    share = taken.median_s("networks") / taken.median_s("dense")
    detail = (
        f"{nbytes / 1e9:.0f} GB of {_DIM} columns at 1000x, block 64, batch {_BATCH}, networks "
        f"{_DENSE}-512-256-{_DIM} and 1024-1024-512-256-1; samples/s: dense "
        f"{_BATCH / taken.median_s('dense'):.0f}, ours {_BATCH / taken.median_s('ours'):.0f}; the "
        f"networks take {share:.0%} of the dense model's time: with free look-ups it would "
        f"be {1 / share:.2f}x"
    )
    yield taken.ratio("dense", "ours").at_least(_BAR, 1.3, detail=detail)
