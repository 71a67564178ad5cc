"""Passes of a layer on one accelerator, cycle by cycle, from masks of nonzero values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.graph.statistics import OperandMask
from slipstream.hardware.accelerator import Accelerator, Array
from slipstream.hardware.kernels import stream_cycles
from slipstream.hardware.layers import OPERANDS, LayerShape, Operand, Pass, streams
from slipstream.hardware.mapping import Chips, Cost, cost, makespan

Masks = Mapping[Operand, NDArray[np.bool_]]
"""Whether each value of an operand is nonzero, bool, see `LayerShape.shapes`."""


@dataclass(frozen=True)
class PassCost:
    """A pass of a layer on an accelerator.

    Attributes:
        which: the pass.
        scheduled: the operand whose zeros are skipped; None without masks.
        sparsity: share of zeros in it.
        dense_cycles: with every pair taken.
        structural_cycles: if only zeros that the layer's shape inserts were skipped.
        cycles: with the accelerator's front end.
        ideal_cycles: if each stream's nonzeros filled the lanes.
        cost: what the pass takes with the accelerator's front end.
        dense: what it takes if only zeros that the layer's shape inserts were skipped.
        time_ns, dense_ns: the slower of computation and DRAM, of both.
    """

    which: Pass
    scheduled: Operand | None
    sparsity: float
    dense_cycles: int
    structural_cycles: int
    cycles: int
    ideal_cycles: int
    cost: Cost
    dense: Cost
    time_ns: float
    dense_ns: float

    @property
    def speedup(self) -> float:
        """Speed-up of computation by natural zeros: structural ones are skipped on both sides."""
        return self.structural_cycles / self.cycles if self.cycles else 1.0

    @property
    def structural_speedup(self) -> float:
        """Speed-up of computation by structural zeros alone."""
        return self.dense_cycles / self.structural_cycles if self.structural_cycles else 1.0


def simulate_pass(
    shape: LayerShape, which: Pass, masks: Masks, chip: Accelerator, *, item_bytes: int = 4
) -> PassCost:
    """Simulate a pass with its sparser operand scheduled.

    An operand without a mask counts as dense; without both, every cycle is taken.

    Args:
        item_bytes: bytes per value.

    Raises:
        InvalidArgumentError: a mask has another shape than its operand.
    """
    zeros = _zeros(shape, which, masks)
    chips = Chips.of(chip)
    scheduled = max(zeros, key=zeros.__getitem__, default=None)
    operand = scheduled or OPERANDS[which][0]
    every = cost(shape, which, chips, item_bytes=item_bytes, operand=operand)
    dense = own = _Totals(
        *(float(column[0]) for column in (every.cycles, every.job_cycles, every.macs))
    )
    ideal = own.cycles
    if scheduled is not None and chip.frontend.kind != "dense":
        dense, own, ideal = _simulated(shape, which, scheduled, masks[scheduled], chip)
    skipping, full = (
        replace(every, **{name: np.array([value]) for name, value in vars(total).items()})
        for total in (own, dense)
    )
    return PassCost(
        which, scheduled, zeros.get(operand, 0.0), int(every.cycles[0]), int(dense.cycles),
        int(own.cycles), int(ideal), skipping, full, float(skipping.time_ns(chips)[0]),
        float(full.time_ns(chips)[0]),
    )  # fmt: skip


def _zeros(shape: LayerShape, which: Pass, masks: Masks) -> dict[Operand, float]:
    """Return the share of zeros of each operand of a pass that has a mask."""
    for operand, size in shape.shapes.items():
        if operand in masks and masks[operand].shape != size:
            what = f"the {operand} has shape {masks[operand].shape}, not {size}"
            raise InvalidArgumentError("masks", what)
    return {
        operand: 1.0 - float(masks[operand].mean()) for operand in OPERANDS[which]
        if operand in masks and masks[operand].size
    }  # fmt: skip


def simulate_arrays(
    shape: LayerShape, which: Pass, masks: Masks, chip: Accelerator, arrays: Chips, *,
    item_bytes: int = 4,
) -> Cost:  # fmt: skip
    """Return the costs of a pass on many arrays with the front end of `chip`, float64 [arrays].

    Streams are simulated once per number of rows and lanes.

    Raises:
        InvalidArgumentError: see `simulate_pass`; or a front end does not fit the rows or lanes.
    """
    zeros = _zeros(shape, which, masks)
    operand = max(zeros, key=zeros.__getitem__, default=OPERANDS[which][0])
    found = cost(shape, which, arrays, item_bytes=item_bytes, operand=operand)
    if not zeros or chip.frontend.kind == "dense":
        return found
    own = np.zeros((3, len(arrays.rows)))
    parts: dict[tuple[int, int], list[tuple[NDArray[np.int64], int]]] = {}
    sizes = zip(arrays.tiles, arrays.rows, arrays.columns, arrays.lanes, strict=True)
    for number, size in enumerate(sizes):
        tiles, rows, columns, lanes = map(int, size)
        array = Array(tiles, rows, columns, lanes)
        if (rows, lanes) not in parts:
            made = streams(shape, which, operand, masks[operand], lanes, rows)
            parts[rows, lanes] = [
                (stream_cycles(chip.frontend, lanes, part), part.columns) for part in made
            ]
        totals = _Totals()
        for cycles, results in parts[rows, lanes]:
            ideal = chip.frontend.kind == "ideal"
            counted = -(-cycles[:, 2] // lanes) if ideal else cycles[:, 0]
            totals.add(counted, cycles[:, 1].sum(), results, array)
        own[:, number] = totals.cycles, totals.job_cycles, totals.macs
    return replace(found, cycles=own[0], job_cycles=own[1], macs=own[2])


def simulate_layer(
    shape: LayerShape, masks: Masks, chip: Accelerator, *, backward: bool = True,
    item_bytes: int = 4,
) -> tuple[PassCost, ...]:  # fmt: skip
    """Simulate the passes of a layer: all three, or the forward pass only."""
    return tuple(
        simulate_pass(shape, which, masks, chip, item_bytes=item_bytes)
        for which in (Pass if backward else (Pass.FORWARD,))
    )


def simulate_masks(
    model: nn.Module, masks: Iterable[OperandMask], chip: Accelerator
) -> dict[str, tuple[PassCost, ...]]:
    """Simulate the passes of each layer of a step from the masks of a `MaskRecorder`.

    Convolutions with one or three spatial dimensions, transposed ones and layers without a
    gradient are left out; of a layer that runs several times, the last call is simulated.

    Args:
        model: the recorded model.

    Returns:
        The passes by name of the layer.
    """
    found: dict[str, dict[Operand, OperandMask]] = {}
    for mask in masks:
        found.setdefault(mask.module, {})[Operand(mask.operand)] = mask
    costs = {}
    for name, own in found.items():
        module = model.get_submodule(name)
        if len(own) == len(Operand) and isinstance(module, (nn.Conv2d, nn.Linear)):
            costs[name] = simulate_layer(*module_layer(module, own), chip)
    return costs


def module_layer(
    module: nn.Conv2d | nn.Linear, masks: Mapping[Operand, OperandMask]
) -> tuple[LayerShape, dict[Operand, NDArray[np.bool_]]]:
    """Return the shape of a layer, and its masks in that shape."""
    x, weight = masks[Operand.ACTIVATION].shape, masks[Operand.WEIGHT].shape
    bits = {operand: mask.unpacked() for operand, mask in masks.items()}
    if isinstance(module, nn.Conv2d):
        (kh, kw), (sh, sw), (dh, dw) = module.kernel_size, module.stride, module.dilation
        edge = module.padding
        if isinstance(edge, str):
            edge = (dh * (kh - 1) // 2, dw * (kw - 1) // 2) if edge == "same" else (0, 0)
        ph, pw = edge
        shape = LayerShape(
            x[0], x[1], weight[0], x[2], x[3], kh, kw, (sh, sw), (ph, pw), (dh, dw), module.groups
        )
        return shape, bits
    shape = LayerShape(1, x[-1], weight[0], 1, math.prod(x[:-1]))
    return shape, {
        operand: (
            values if operand is Operand.WEIGHT else values.reshape(-1, values.shape[-1]).T
        ).reshape(shape.shapes[operand])
        for operand, values in bits.items()
    }


@dataclass
class _Totals:
    """Sums over the parts of a pass, see `Cost`."""

    cycles: float = 0.0
    job_cycles: float = 0.0
    macs: float = 0.0

    def add(self, cycles: NDArray[np.int64], nonzeros: int, columns: int, array: Array) -> None:
        """Add a part with these cycles per group."""
        repeats = -(-columns // array.columns)
        self.cycles += makespan(cycles, repeats, array.tiles)
        self.job_cycles += float(cycles.sum()) * repeats
        self.macs += float(nonzeros) * columns


def _simulated(
    shape: LayerShape, which: Pass, operand: Operand, mask: NDArray[np.bool_], chip: Accelerator
) -> tuple[_Totals, _Totals, float]:
    """Return the totals without natural zeros and with them, and the ideal cycles."""
    lanes = chip.array.lanes
    dense, own, ideal = _Totals(), _Totals(), _Totals()
    made = streams(shape, which, operand, mask, lanes, chip.array.rows)
    for part, full in zip(made, _structural(shape, which, operand, chip), strict=True):
        found = stream_cycles(chip.frontend, lanes, part)
        every = np.tile(full, (len(found) // len(full), 1))
        dense.add(every[:, 0], every[:, 1].sum(), part.columns, chip.array)
        own.add(found[:, 0], found[:, 1].sum(), part.columns, chip.array)
        ideal.add(-(-found[:, 2] // lanes), found[:, 1].sum(), part.columns, chip.array)
    return dense, ideal if chip.frontend.kind == "ideal" else own, ideal.cycles


@functools.lru_cache(maxsize=4096)
def _structural(
    shape: LayerShape, which: Pass, operand: Operand, chip: Accelerator
) -> list[NDArray[np.int64]]:
    """Return the results of `stream_cycles` without natural zeros, by part; for one sample."""
    sample = shape if which is Pass.WEIGHT else replace(shape, n=1)
    ones = np.broadcast_to(np.True_, sample.shapes[operand])
    made = streams(sample, which, operand, ones, chip.array.lanes, chip.array.rows)
    return [stream_cycles(chip.frontend, chip.array.lanes, part) for part in made]
