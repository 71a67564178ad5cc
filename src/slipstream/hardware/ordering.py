"""Orders of channels that let an accelerator skip more: the results of the model stay the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.hardware.accelerator import Accelerator
from slipstream.hardware.layers import LayerShape, Operand, Pass
from slipstream.hardware.simulate import Masks, simulate_pass

_INPUTS = {Operand.ACTIVATION: 1, Operand.WEIGHT: 1}
_OUTPUTS = {Operand.GRADIENT: 1, Operand.WEIGHT: 0}
"""Axis of the channels of a layer's input or output, by operand."""


def best_order(
    shape: LayerShape, masks: Masks, passes: Iterable[Pass], chip: Accelerator
) -> tuple[int, int]:
    """Return the cycles of passes of a layer as recorded, and in the best order of channels tried.

    Channels of the input and of the output are sorted by their zeros, or dealt to the rows of lanes
    in that order. Both only permute weights: the neighbouring layers need the same order.
    """
    run = tuple(passes)

    def cycles(ordered: Masks) -> int:
        return sum(simulate_pass(shape, which, ordered, chip).cycles for which in run)

    recorded = cycles(masks)
    if shape.groups > 1 or chip.frontend.kind != "lookahead":
        return recorded, recorded
    best, lanes = recorded, chip.array.lanes
    every = (_orders(axes, masks, lanes) for axes in (_INPUTS, _OUTPUTS))
    for inputs, outputs in itertools.product(*every):
        if inputs is None and outputs is None:
            continue
        ordered = dict(masks)
        for axes, order in ((_INPUTS, inputs), (_OUTPUTS, outputs)):
            if order is not None:
                for operand in axes.keys() & ordered.keys():
                    ordered[operand] = np.take(ordered[operand], order, axes[operand])
        best = min(best, cycles(ordered))
    return recorded, best


def _orders(axes: dict[Operand, int], masks: Masks, lanes: int) -> list[NDArray[np.int64] | None]:
    """Return no order, channels by density, and those dealt to rows of lanes."""
    counts: Any = 0
    for operand, axis in axes.items():
        if operand in masks and operand is not Operand.WEIGHT:
            others = tuple(n for n in range(masks[operand].ndim) if n != axis)
            counts = masks[operand].sum(others)
    if np.ndim(counts) == 0 or np.ptp(counts) == 0:
        return [None]
    ranked = np.argsort(-counts, kind="stable")
    rows = -(-len(ranked) // lanes)
    padded = np.full(rows * lanes, -1)
    padded[: len(ranked)] = ranked
    dealt = padded.reshape(lanes, rows).T.ravel()
    return [None, ranked, dealt[dealt >= 0]]
