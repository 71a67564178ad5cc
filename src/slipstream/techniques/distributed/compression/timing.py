"""Micro-benchmark of ``slipstream::compression``: the exchange of one bucket.

Communication requests return immediately, as if all workers had sent the same data. Only encoding
and decoding are timed, including Python.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slipstream.graph import Call
from slipstream.ranks.requests import Gather
from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory
from slipstream.techniques.distributed.compression.compressor import Compressor, mean
from slipstream.techniques.distributed.compression.hook import settings_of


def timer(call: Call) -> Callable[[], object]:
    """Return a function that runs the exchange on random data.

    Args:
        call: from `exchange_call`.
    """
    text, shapes, workers, part = call.arguments
    compressor = settings_of(text)
    assert isinstance(compressor, Compressor)
    layout = Layout.of({f"p{n}": tuple(shape) for n, shape in enumerate(shapes)})
    # Like gradients: normal, with scales that differ between parameters by orders of magnitude.
    drawn = torch.Generator().manual_seed(0)
    flat = torch.randn(layout.numel, generator=drawn)
    for number, (at, count) in enumerate(layout.spans):
        flat[at : at + count] *= 10.0 ** -(number % 3)
    memory, pattern = Memory(), flat.clone()

    def run(last: int | None) -> int:
        # Not a gradient after the first exchange, but as fast to encode.
        exchange = mean(compressor, Bucket(pattern, layout), memory, workers)
        answer, requests = None, 0
        try:
            while True:
                request = exchange.send(answer)  # type: ignore[arg-type]
                requests += 1
                if requests == last:
                    exchange.close()
                    return requests
                answer = request.tensor
                if isinstance(request, Gather):
                    answer = answer[None].expand(workers, -1)
        except StopIteration:
            return requests

    requests = run(None)
    return lambda: run(None if part == "all" else requests)
