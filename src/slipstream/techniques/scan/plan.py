"""Which way a recurrence is computed in: what is fastest here, as measured once per shape.

Every way takes a fixed time and so much for each step: two runs of the very shape give both, of few
steps and of so many that these take most of it, and any length follows. Both are timed as a
training step meets them, with the caches full of other things. Batched ways (chunks, a tree)
multiply matrices where the others multiply vectors: H + 1 times the arithmetic. They are timed only
where more threads than that share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from slipstream.measure import timed
from slipstream.techniques.scan import MARGIN
from slipstream.techniques.scan import kernels as door

Way = Literal["fused", "chunked", "tree", "framework"]
WAYS = ("fused", "chunked", "tree", "framework")
_SHORT, _LONG, _LONGEST, _SAMPLES = 12, 60, 1 << 14, 6
# A long run takes at least so many times as long as the short one.
_LONGER = 3.0
# More than the caches hold of the processors this runs on.
_SWEPT_BYTES = 32 << 20


@dataclass(frozen=True)
class Shape:
    """Of a layer: what decides how long a step takes.

    Attributes:
        kind: one of `kernels.KINDS`.
        training: with a backward pass.
        threads: intra-op threads.
        of_cell: whether ``framework`` calls a cell for each step, in place of torch's layer.
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
    """What one way takes: so much for a call, and so much for each step, in seconds."""

    call_s: float
    step_s: float

    def seconds(self, steps: int) -> float:
        """Of so many steps."""
        return self.call_s + self.step_s * steps


Runner = Callable[..., Any]
"""`slipstream.scan.rnn`, which is what is timed."""


def choose(shape: Shape, steps: int, rnn: Runner) -> Way:
    """The fastest way for so many steps; torch's own where it is faster by `MARGIN`."""
    took_s = {way: pace.seconds(steps) for way, pace in paces(shape, rnn).items()}
    took_s["framework"] *= MARGIN
    best: Way = min(took_s, key=lambda way: took_s[way])
    return best


@functools.lru_cache(maxsize=256)
def paces(shape: Shape, rnn: Runner) -> dict[Way, Pace]:
    """Every way worth timing for this shape, timed; takes some tenths of a second."""
    ways: list[Way] = ["framework"]
    if door.available() and shape.dtype in door.DTYPES:
        ways.insert(0, "fused")
        if shape.training and shape.threads > shape.hidden + 1:
            ways += ["chunked", "tree"]
    if len(ways) == 1:
        return {"framework": Pace(0.0, 0.0)}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        seconds = stopwatch("cpu" if shape.threads == 1 else "wall")
        short = {way: _run(shape, way, _SHORT, rnn) for way in ways}
        steps = dict.fromkeys(ways, _LONG)
        long = {way: _run(shape, way, _LONG, rnn) for way in ways}
        for way in ways:
            short[way]()  # what is made once is no part of a call
            enough_s = _LONGER * seconds(short[way])
            while steps[way] < _LONGEST and seconds(long[way]) < enough_s:
                steps[way] *= 4
                long[way] = _run(shape, way, steps[way], rnn)
        few_s, many_s = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, math.inf)
        for _ in range(_SAMPLES):
            for way in ways:
                few_s[way] = min(few_s[way], seconds(short[way]))
                many_s[way] = min(many_s[way], seconds(long[way]))
    by_way: dict[Way, Pace] = {}
    for way in ways:
        step_s = max(many_s[way] - few_s[way], 0.0) / (steps[way] - _SHORT)
        by_way[way] = Pace(max(few_s[way] - _SHORT * step_s, 0.0), step_s)
    return by_way


def stopwatch(clock: Literal["cpu", "wall"]) -> Callable[[Callable[[], object]], float]:
    """Tells the seconds of a run as a training step meets it, its code and data out of the caches.

    All else of a step went through these since it ran last. A short recurrence takes up to twice as
    long then as it does again and again.
    """
    swept = torch.ones(_SWEPT_BYTES // 4)

    def seconds(run: Callable[[], object]) -> float:
        swept.sum()
        return timed(run)[clock] / 1e9

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
    """Torch's own layer of this shape, or its cell, with random weights."""
    sizes = shape.inputs, shape.hidden
    kinds: dict[str, Any] = {"gru": (nn.GRU, nn.GRUCell), "lstm": (nn.LSTM, nn.LSTMCell)}
    make: Any = kinds.get(shape.kind, (nn.RNN, nn.RNNCell))[shape.of_cell]
    named = {} if shape.kind in kinds else {"nonlinearity": shape.kind}
    module: nn.Module = make(*sizes, dtype=shape.dtype, **named)
    return module
