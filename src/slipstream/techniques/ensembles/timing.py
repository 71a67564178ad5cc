"""Micro-benchmark of ``slipstream::ensemble``: passes of a layer of all members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slipstream.graph import Call, TensorSpec
from slipstream.techniques.layer_timing import module_like, pass_timer

OP = "slipstream::ensemble"
# Part of the call, so that timings with weights in another memory layout are not reused.
_LAYOUT = "in, out"


def layer_call(
    weights: str, members: int, x: TensorSpec, layer: tuple[Any, ...], passing: str
) -> Call:
    """Return the call to time a pass over the rows of all members, for `slipstream.durations`.

    Args:
        weights: ``own`` or ``shared``, or ``one`` for torch's layer over all rows.
        x: input of one member.
        layer: `slipstream.graph.layers.LayerSettings.arguments`.
        passing: ``forward``, or ``both``.
    """
    rows = replace(x, shape=(members * x.shape[0], *x.shape[1:]))
    return Call(f"{OP}()", (weights, members, rows, layer, passing, _LAYOUT), ())


def timer(call: Call) -> Callable[[], object]:
    """Return a function without arguments that runs the pass on random values."""
    from slipstream.techniques.ensembles.stacking import StackedEnsemble

    weights, members, spec, layer, passing, _ = call.arguments
    module = module_like(spec, layer)
    if weights != "one":
        module = StackedEnsemble([module] * members, weights).model
    return pass_timer(module, spec, passing)
