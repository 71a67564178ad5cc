"""One rank of ``slipstream bench adasum``: exchanges of one buffer by turns, and their memory.

Started by `slipstream.ranks.launch.run_ranks`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.measure.memory import peak_of_call
from slipstream.ranks.launch import answer, join
from slipstream.ranks.wire import Wire
from slipstream.techniques.distributed.adasum.exchange import exchange
from slipstream.techniques.distributed.adasum.optimizer import AdasumOptimizer

_TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Join the group and answer what is asked: turns of two exchanges, or the memory of one."""
    asked = json.load(sys.stdin)
    join(asked, _TIMEOUT)
    asks = {"beside": _beside, "layers": _layers, "memory": _memory, "steps": _steps}
    answer(asks[asked["what"]](asked))


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
        peak = peak_of_call(functools.partial(exchange, flat, starts, wire, asked["algorithm"]))
        found[name] = peak.increase / (numbers * flat.element_size())
    return found


def _steps(asked: dict[str, Any]) -> dict[str, float]:
    """By momentum, the most there was in a step besides what SGD alone has, in gradients."""
    each, layers = asked["numbers"] // asked["layers"], asked["layers"]
    found = {}
    for momentum in (0.0, 0.9):
        parameters = [torch.nn.Parameter(torch.zeros(each)) for _ in range(layers)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sgd = torch.optim.SGD(parameters, 0.1, momentum=momentum)
        sgd.step()
        optimizer = AdasumOptimizer(sgd, algorithm=asked["algorithm"], timeout_s=300.0)
        dist.barrier()
        found[f"{momentum:g}"] = peak_of_call(optimizer.step).increase / (4 * each * layers)
    return found


def _beside(asked: dict[str, Any]) -> dict[str, Any]:
    """Turns of Adasum and of torch's all-reduce."""
    ours = _exchanging(asked, asked["layers"])
    return _turns(asked, ours, dist.all_reduce)


def _layers(asked: dict[str, Any]) -> dict[str, Any]:
    """Turns of Adasum of many layers and of few."""
    return _turns(asked, *(_exchanging(asked, layers) for layers in asked["layers"]))


def _exchanging(asked: dict[str, Any], layers: int) -> Callable[[torch.Tensor], object]:
    starts = np.linspace(0, asked["numbers"], layers + 1).astype(np.int64)
    wire = Wire.of()
    return lambda flat: exchange(flat, starts, wire, asked["algorithm"])


def _turns(asked: dict[str, Any], *of: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(asked["rank"])
    first = torch.randn(asked["numbers"], generator=generator)
    flat = first.clone()
    times: list[list[float]] = []
    for _ in range(asked["repeats"] + 1):
        turn = []
        for run in of:
            flat.copy_(first)
            turn.append(_timed(functools.partial(run, flat)))
        times.append(turn)
    return {"times_s": times[1:]}


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
