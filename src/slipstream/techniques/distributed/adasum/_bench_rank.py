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
from slipstream.measure.memory import peak_of_call
from slipstream.techniques.distributed.adasum.exchange import exchange
from slipstream.techniques.distributed.wire import Wire

_TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Join the group, take turns, and say how long each took; or what memory an exchange takes."""
    asked = json.load(sys.stdin)
    join(asked, _TIMEOUT)
    answer(_memory(asked) if asked["dtypes"] else _turns(asked))


def _memory(asked: dict[str, Any]) -> dict[str, float]:
    """By dtype, the most there was besides the buffer, in the buffer's size."""
    numbers = asked["numbers"]
    starts = np.linspace(0, numbers, asked["layers"] + 1).astype(np.int64)
    found = {}
    for name in asked["dtypes"]:
        flat = torch.ones(numbers, dtype=getattr(torch, name))
        # What sockets and threads take once is no part of an exchange.
        exchange(flat[:1000], starts.clip(max=1000), Wire.of(), asked["algorithm"])
        dist.barrier()
        wire = Wire.of()
        peak = peak_of_call(lambda: exchange(flat, starts, wire, asked["algorithm"]))  # noqa: B023
        found[name] = peak.increase / (numbers * flat.element_size())
    return found


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
    return {"times_s": times[1:]}


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
