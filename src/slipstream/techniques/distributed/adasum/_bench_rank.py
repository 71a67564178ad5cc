"""One rank of ``slipstream bench adasum``: Adasum and torch's all-reduce of one buffer, by turns.

Started by `slipstream.cluster.measuring.run_ranks`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.cluster.measuring import answer, join
from slipstream.techniques.distributed.adasum.exchange import exchange
from slipstream.techniques.distributed.wire import Wire

_TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Join the group, take turns, say how long each took and what was kept besides the buffer."""
    asked = json.load(sys.stdin)
    join(asked, _TIMEOUT)
    answer(_turns(asked))


def _turns(asked: dict[str, Any]) -> dict[str, Any]:
    numbers = asked["numbers"]
    starts = np.linspace(0, numbers, asked["layers"] + 1).astype(np.int64)
    first = torch.randn(numbers, generator=torch.Generator().manual_seed(asked["rank"]))
    flat, wire = first.clone(), Wire.of()
    times: list[tuple[float, float]] = []
    for _ in range(asked["repeats"] + 1):
        flat.copy_(first)
        ours = _timed(lambda: exchange(flat, starts, wire, asked["algorithm"]))
        flat.copy_(first)
        times.append((ours, _timed(lambda: dist.all_reduce(flat))))
    kept = wire.buffer(0, flat.dtype).untyped_storage().nbytes()
    return {"times_s": times[1:], "kept": kept / (numbers * flat.element_size())}


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
