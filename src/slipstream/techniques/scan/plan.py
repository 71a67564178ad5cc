"""Choice of the fastest way to compute a recurrence, measured once per shape.

The time of each way is a constant plus a time per step. Two runs of the shape determine both: one
of few steps, one of so many that they dominate. Both run with cold caches, as in a training step.
Batched ways (chunks, a tree) multiply matrices instead of vectors, H + 1 times the arithmetic, and
are timed only with more threads than that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from slipstream.measure import time_function
from slipstream.techniques.scan import MARGIN, kernels

Way = Literal["fused", "chunked", "tree", "framework"]
WAYS = ("fused", "chunked", "tree", "framework")
_SHORT_STEPS, _LONG_STEPS, _MAX_STEPS, _SAMPLES = 12, 60, 1 << 14, 6
# Minimum ratio of the times of the long and the short run.
_MIN_RATIO = 3.0
# More than processor caches hold.
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True)
class Shape:
    """Properties of a layer that determine the time of a step.

    Attributes:
        kind: one of `kernels.KINDS`.
        training: whether a backward pass follows.
        threads: number of intra-op threads.
        of_cell: whether ``framework`` calls a cell per step instead of torch's layer.
    """

    kind: str
    batch: int
    inputs: int
    hidden: int
    dtype: torch.dtype
    training: bool
    threads: int
    of_cell: bool = False


@dataclass(frozen=True)
class Pace:
    """Time of one way, in seconds per call and per step."""

    call_s: float
    step_s: float

    def seconds(self, steps: int) -> float:
        """Return the time of a call with `steps` steps."""
        return self.call_s + self.step_s * steps


Runner = Callable[..., Any]
"""Signature of the timed function, `slipstream.scan.rnn`."""


def choose(shape: Shape, steps: int, rnn: Runner) -> Way:
    """Return the fastest way for `steps` steps; ``framework`` must win by `MARGIN`."""
    step_times = {way: pace.seconds(steps) for way, pace in paces(shape, rnn).items()}
    step_times["framework"] *= MARGIN
    best: Way = min(step_times, key=lambda way: step_times[way])
    return best


@functools.lru_cache(maxsize=256)
def paces(shape: Shape, rnn: Runner) -> dict[Way, Pace]:
    """Time the candidate ways for a shape, which takes some tenths of a second."""
    ways: list[Way] = ["framework"]
    if kernels.available() and shape.dtype in kernels.DTYPES:
        ways.insert(0, "fused")
        if shape.training and shape.threads > shape.hidden + 1:
            ways += ["chunked", "tree"]
    if len(ways) == 1:
        return {"framework": Pace(0.0, 0.0)}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        seconds = stopwatch("cpu" if shape.threads == 1 else "wall")
        short = {way: _run(shape, way, _SHORT_STEPS, rnn) for way in ways}
        steps = dict.fromkeys(ways, _LONG_STEPS)
        long = {way: _run(shape, way, _LONG_STEPS, rnn) for way in ways}
        for way in ways:
            short[way]()  # excludes one-time initialisation
            min_long_s = _MIN_RATIO * seconds(short[way])
            while steps[way] < _MAX_STEPS and seconds(long[way]) < min_long_s:
                steps[way] *= 4
                long[way] = _run(shape, way, steps[way], rnn)
        short_s, long_s = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, math.inf)
        for _ in range(_SAMPLES):
            for way in ways:
                short_s[way] = min(short_s[way], seconds(short[way]))
                long_s[way] = min(long_s[way], seconds(long[way]))
    by_way: dict[Way, Pace] = {}
    for way in ways:
        step_s = max(long_s[way] - short_s[way], 0.0) / (steps[way] - _SHORT_STEPS)
        by_way[way] = Pace(max(short_s[way] - _SHORT_STEPS * step_s, 0.0), step_s)
    return by_way


def stopwatch(clock: Literal["cpu", "wall"]) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a run with cold caches, in seconds.

    In a training step other operators have replaced the recurrence's code and data in the caches. A
    short recurrence then takes up to twice as long as when repeated.
    """
    flushed = torch.ones(_FLUSH_BYTES // 4)

    def seconds(run: Callable[[], object]) -> float:
        flushed.sum()
        return time_function(run)[clock] / 1e9

    return seconds


def _run(shape: Shape, way: Way, steps: int, rnn: Runner) -> Callable[[], object]:
    module = layer(shape)
    x = torch.randn(steps, shape.batch, shape.inputs, dtype=shape.dtype)
    parameters = list(module.parameters())

    def run() -> object:
        with torch.set_grad_enabled(shape.training):
            y = rnn(module, x, backward=way)[0]
            if not shape.training:
                return y
            return torch.autograd.grad(y, parameters, torch.ones_like(y))

    return run


def layer(shape: Shape) -> nn.Module:
    """Return torch's layer of this shape, or its cell, with random weights."""
    sizes = shape.inputs, shape.hidden
    kinds: dict[str, Any] = {"gru": (nn.GRU, nn.GRUCell), "lstm": (nn.LSTM, nn.LSTMCell)}
    make: Any = kinds.get(shape.kind, (nn.RNN, nn.RNNCell))[shape.of_cell]
    options = {} if shape.kind in kinds else {"nonlinearity": shape.kind}
    module: nn.Module = make(*sizes, dtype=shape.dtype, **options)
    return module
