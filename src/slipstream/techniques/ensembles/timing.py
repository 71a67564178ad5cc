"""What the micro-benchmark runs for ``slipstream::ensemble``: passes of a layer of all members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slipstream.graph import Call, TensorSpec
from slipstream.techniques.layer_timing import module_like, pass_timer

OP = "slipstream::ensemble"
# A part of the call: what was measured with weights that lay otherwise is another duration.
_STORED = "in, out"


def layer_call(
    weights: str, members: int, x: TensorSpec, layer: tuple[Any, ...], passing: str
) -> Call:
    """A pass of a layer over the rows of all members: to be asked of `slipstream.durations`.

    Args:
        weights: ``own`` or ``shared``, or ``one`` for torch's layer over all the rows.
        x: what one member is given.
        layer: `slipstream.graph.layers.LayerSettings.arguments`.
        passing: ``forward``, or ``both``.
    """
    rows = replace(x, shape=(members * x.shape[0], *x.shape[1:]))
    return Call(f"{OP}()", (weights, members, rows, layer, passing, _STORED), ())


def timer(call: Call) -> Callable[[], object]:
    """The pass as a function of nothing, on random numbers."""
    from slipstream.techniques.ensembles.stacking import Stacked

    weights, members, spec, layer, passing, _ = call.arguments
    module = module_like(spec, layer)
    if weights != "one":
        module = Stacked([module] * members, weights).model
    return pass_timer(module, spec, passing)
