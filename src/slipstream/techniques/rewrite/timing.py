"""Micro-benchmark of ``slipstream::rewrite``: passes of an expression."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import torch

from slipstream.durations import microbenchmark
from slipstream.graph import Call, TensorSpec
from slipstream.techniques.rewrite.expression import Expression


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the pass on random values."""
    text, specs, backward = call.arguments
    expression = Expression.from_json(json.loads(text))
    inputs = [microbenchmark.random_tensor(spec) for spec in specs]
    sources = [x.requires_grad_() for x in inputs if x.is_floating_point() and backward]
    gradient = torch.ones_like(expression.run([x.detach() for x in inputs]))

    def run() -> object:
        with torch.set_grad_enabled(backward):
            value = expression.run(inputs)
            return backward and torch.autograd.grad(value, sources, gradient, allow_unused=True)

    return run


def gains(
    pattern: Expression, replacement: Expression, specs: Sequence[TensorSpec]
) -> tuple[float, float]:
    """Return how many times as fast the replacement is: forward, and with the backward pass.

    It is 0 for a pass that cannot run. The inputs have the strides of use, which decide what is
    copied.
    """
    calls = [
        Call("slipstream::rewrite()", (each.key, tuple(specs), backward), ()).to_json()
        for backward in (False, True)
        for each in (pattern, replacement)
    ]
    answers = microbenchmark.run(calls, torch.get_num_threads(), roughly=True)
    times = [float(answer.get("nanoseconds", math.nan)) for answer in answers]
    forward, both = times[0] / times[1], times[2] / times[3]
    return forward if forward > 0 else 0.0, both if both > 0 else 0.0
