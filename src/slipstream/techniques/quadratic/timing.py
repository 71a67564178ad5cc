"""Micro-benchmark of ``slipstream::quadratic``: passes of a layer, including Python overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.graph import Call, TensorSpec
from slipstream.techniques.layer_timing import module_like, pass_timer

OP = "slipstream::quadratic"


def layer_call(neuron: str, x: TensorSpec, layer: tuple[Any, ...], passing: str) -> Call:
    """Return the call to time a pass of a layer, for `slipstream.durations`.

    Args:
        neuron: a name of `NEURONS`, or ``first_order`` for torch's own layer.
        layer: outputs, bias; for a convolution also kernel, stride, padding, dilation, groups.
        passing: ``forward``, or ``both`` to include the backward pass of a layer within a model.
    """
    return Call(f"{OP}()", (neuron, x, layer, passing), ())


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the pass on random values."""
    from slipstream.techniques.quadratic.nn import convert_layer

    neuron, spec, layer, passing = call.arguments
    module = module_like(spec, layer)
    if neuron != "first_order":
        module = convert_layer(module, neuron, "random")
    return pass_timer(module, spec, passing)
