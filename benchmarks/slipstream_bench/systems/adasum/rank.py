"""A rank of ``slipstream bench adasum``: exchanges of a buffer, and their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from slipstream.measure.memory import peak_of_call
from slipstream.ranks.wire import Wire
from slipstream.techniques.distributed.adasum.exchange import exchange
from slipstream.techniques.distributed.adasum.optimizer import AdasumOptimizer
from slipstream_bench.lab import Turn


def memory(numbers: int, layers: int, algorithm: str, dtypes: Sequence[str]) -> dict[str, float]:
    """Return by dtype the peak memory of an exchange beyond the buffer, in buffer sizes."""
    starts = np.linspace(0, numbers, layers + 1).astype(np.int64)
    increase = {}
    for name in dtypes:
        flat = torch.ones(numbers, dtype=getattr(torch, name))
        # Memory that sockets and threads take once is not part of an exchange.
        exchange(flat[:1000], starts.clip(max=1000), Wire.of(), algorithm)
        dist.barrier()
        wire = Wire.of()
        peak = peak_of_call(functools.partial(exchange, flat, starts, wire, algorithm))
        increase[name] = peak.increase / (numbers * flat.element_size())
    return increase


def memory_of_a_step(numbers: int, layers: int, algorithm: str) -> dict[str, float]:
    """Return by momentum the peak memory of a step beyond that of SGD, in gradient sizes."""
    each = numbers // layers
    increase = {}
    for momentum in (0.0, 0.9):
        parameters = [torch.nn.Parameter(torch.zeros(each)) for _ in range(layers)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sgd = torch.optim.SGD(parameters, 0.1, momentum=momentum)
        sgd.step()
        optimizer = AdasumOptimizer(sgd, algorithm=algorithm, timeout_s=300.0)
        dist.barrier()
        increase[f"{momentum:g}"] = peak_of_call(optimizer.step).increase / (4 * each * layers)
    return increase


def against_all_reduce(numbers: int, layers: int) -> dict[str, Turn]:
    """Return turns of torch's all-reduce of float32 [numbers], and of Adasum."""
    return _of_one_buffer(
        numbers, {"all_reduce": dist.all_reduce, "adasum": _exchanging(numbers, layers)}
    )


def of_layers(numbers: int, layers: Sequence[int]) -> dict[str, Turn]:
    """Return turns of Adasum of the same numbers, by number of layers."""
    return _of_one_buffer(numbers, {str(count): _exchanging(numbers, count) for count in layers})


def _exchanging(numbers: int, layers: int) -> Callable[[torch.Tensor], object]:
    starts = np.linspace(0, numbers, layers + 1).astype(np.int64)
    wire = Wire.of()
    return lambda flat: exchange(flat, starts, wire, "auto")


def _of_one_buffer(
    numbers: int, exchanges: Mapping[str, Callable[[torch.Tensor], object]]
) -> dict[str, Turn]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    first = torch.randn(numbers, generator=generator)
    flat = first.clone()
    return {
        name: Turn(functools.partial(run, flat), before=functools.partial(flat.copy_, first))
        for name, run in exchanges.items()
    }
