"""Compiled functions of the tests, which hosts import."""

from __future__ import annotations

import os
import signal
import time

import torch

from slipstream.engines.controller import PARTIAL, REPLICATED, all_reduce, compiled, sharded


@compiled(inputs=(sharded(0),), out=sharded(0))
def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


@compiled(inputs=(sharded(0), sharded(0)), out=PARTIAL)
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mT @ y if x.dim() > 1 else x @ y


@compiled
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@compiled(inputs=(sharded(1),), out=(sharded(1), REPLICATED))
def with_sum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x - 1, all_reduce(x.sum())


@compiled(inputs=(sharded(0),), out=sharded(0))
def fails_on_negative(x: torch.Tensor) -> torch.Tensor:
    total = all_reduce(x.sum())
    if not isinstance(x, torch._subclasses.FakeTensor) and x[0] < 0:
        raise ZeroDivisionError("a negative element")
    return x + all_reduce(total)


@compiled(inputs=(sharded(0),), out=sharded(0))
def grows(x: torch.Tensor) -> torch.Tensor:
    fake = isinstance(x, torch._subclasses.FakeTensor)
    return x if fake else torch.cat([x, x])


@compiled
def rests(x: torch.Tensor, seconds: float) -> torch.Tensor:
    if not isinstance(x, torch._subclasses.FakeTensor):
        time.sleep(seconds)
    return x + 1


@compiled(inputs=(sharded(0),), out=sharded(0))
def dies_on_negative(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch._subclasses.FakeTensor) and x[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x + 1


@compiled
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]
