"""A bar on the time of a look-up by array size, compared with a curve that reflects caches.

The curve is measured at sizes four times apart and linear in between, both in logarithms; the sizes
in the middle between them are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from slipstream.techniques.embedding.formats.robe import SIGN, ROBEEmbeddingBag
from slipstream.techniques.embedding.formats.shared_array import SharedArray
from slipstream.units import format_bytes
from slipstream_bench.harness import numbered, paired
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.embedding.growth import fits

_BAR = "look-up by the size of the array, block 64: from the curve, largest error"
_ROWS, _DIM = 11_000_000, 64
_BAGS, _IDS, _BATCHES = 512, 10_240, 16
_SIZES = [1 << exponent for exponent in range(16, 31)]


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield one row, for arrays of 64 KiB to 1 GiB, or to 256 MiB in a quick run."""
    if not options.wants(_BAR):
        return
    sizes = _SIZES if options.full else _SIZES[:-2]
    if not fits(2 * sizes[-1]):
        yield not_judged(_BAR, "%", "<= 25", "too little free memory")
        return
    options.progress(_BAR)
    ids = [torch.randint(0, _ROWS, (_IDS,)) for _ in range(_BATCHES)]
    offsets = torch.arange(0, _IDS, _IDS // _BAGS)

    def of(nbytes: int) -> Callable[[], object]:
        pool = SharedArray(nbytes // 4, block=_DIM, sign=SIGN)
        bag = ROBEEmbeddingBag(_ROWS, _DIM, pool, mode="sum")
        return numbered(lambda number: bag(ids[number % len(ids)], offsets))

    with torch.no_grad():
        arms = {str(size): of(size) for size in sizes}
        taken = paired(arms, blocks=12 if options.full else 8, warm=True)
    times = np.array([taken.median_s(str(size)) / _IDS * 1e9 for size in sizes])
    logs = np.log(sizes)
    expected = np.exp(np.interp(logs[1::2], logs[::2], np.log(times[::2])))
    off = np.abs(times[1::2] / expected - 1) * 100
    detail = "ns per row: " + ", ".join(
        f"{format_bytes(size)} {time:.1f}" for size, time in zip(sizes, times, strict=True)
    )
    data = {"bytes": sizes, "ns": times.tolist()}
    yield at_most(_BAR, float(off.max()), 25.0, "%", n=len(off), detail=detail, data=data)
