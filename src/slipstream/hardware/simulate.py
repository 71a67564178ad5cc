"""Passes of a layer on one accelerator, cycle by cycle, from masks of nonzero values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.hardware.accelerator import Accelerator
from slipstream.hardware.kernels import stream_cycles
from slipstream.hardware.layers import OPERANDS, LayerShape, Operand, Pass, streams
from slipstream.hardware.mapping import Chips, Cost, cost, jobs, makespan

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
        time_ns: the slower of computation and DRAM.
        compute_pj, memory_pj: energy of the lanes, and of the memories.
        dense_ns, dense_compute_pj, dense_memory_pj: the same with every pair taken.
    """

    which: Pass
    scheduled: Operand | None
    sparsity: float
    dense_cycles: int
    structural_cycles: int
    cycles: int
    ideal_cycles: int
    time_ns: float
    compute_pj: float
    memory_pj: float
    dense_ns: float
    dense_compute_pj: float
    dense_memory_pj: float

    @property
    def speedup(self) -> float:
        """Speed-up of computation by natural zeros: structural ones are skipped on both sides."""
        return self.structural_cycles / self.cycles if self.cycles else 1.0

    @property
    def structural_speedup(self) -> float:
        """Speed-up of computation by structural zeros alone."""
        return self.dense_cycles / self.structural_cycles if self.structural_cycles else 1.0

    @property
    def exploited(self) -> float:
        """Share of the skippable cycles that are skipped."""
        skippable = self.dense_cycles - self.ideal_cycles
        return (self.dense_cycles - self.cycles) / skippable if skippable else 1.0


def simulate_pass(
    shape: LayerShape, which: Pass, masks: Masks, chip: Accelerator, *, item_bytes: int = 4
) -> PassCost:
    """Simulate a pass with its sparser operand scheduled.

    An operand without a mask counts as dense; without both, every cycle is taken.

    Args:
        item_bytes: bytes per value.
    """
    zeros = {
        operand: 1.0 - float(masks[operand].mean()) for operand in OPERANDS[which]
        if operand in masks and masks[operand].size
    }  # fmt: skip
    chips = Chips.of(chip)
    scheduled = max(zeros, key=zeros.__getitem__, default=None)
    operand = scheduled or OPERANDS[which][0]
    dense = cost(shape, which, chips, item_bytes=item_bytes, operand=operand)
    dense_energy = dense.energy_pj(chips, scheduled=False)
    taken = int(dense.cycles[0])
    total = _Totals(taken, taken, taken, int(dense.job_cycles[0]), shape.macs)
    kind = chip.frontend.kind
    if scheduled is not None and kind != "dense":
        total = _simulated(shape, which, scheduled, masks[scheduled], chip)
    cycles = total.ideal if kind == "ideal" else total.cycles
    column = np.array([1.0])
    skipping = Cost(
        cycles * column, total.job_cycles * column, total.macs * column, dense.dram_bytes,
        dense.onchip_bytes,
    )  # fmt: skip
    energy = skipping.energy_pj(chips, scheduled=kind == "lookahead")
    return PassCost(
        which, scheduled, zeros.get(operand, 0.0), taken, total.structural, cycles, total.ideal,
        float(skipping.time_ns(chips)[0]), float(energy[0][0]), float(energy[1][0]),
        float(dense.time_ns(chips)[0]), float(dense_energy[0][0]), float(dense_energy[1][0]),
    )  # fmt: skip


def simulate_layer(
    shape: LayerShape, masks: Masks, chip: Accelerator, *, backward: bool = True,
    item_bytes: int = 4,
) -> tuple[PassCost, ...]:  # fmt: skip
    """Simulate the passes of a layer: all three, or the forward pass only."""
    return tuple(
        simulate_pass(shape, which, masks, chip, item_bytes=item_bytes)
        for which in (Pass if backward else (Pass.FORWARD,))
    )


@dataclass
class _Totals:
    structural: int
    cycles: int
    ideal: int
    job_cycles: int
    macs: int


def _simulated(
    shape: LayerShape, which: Pass, operand: Operand, mask: NDArray[np.bool_], chip: Accelerator
) -> _Totals:
    array, total = chip.array, _Totals(0, 0, 0, 0, 0)
    structural = _structural_cycles(shape, which, operand, chip)
    made = streams(shape, which, operand, mask, array.lanes, array.rows)
    for part, full in zip(made, structural, strict=True):
        repeats = -(-part.columns // array.columns)
        cycles, nonzeros, most = stream_cycles(chip.frontend, array.lanes, part).T
        ideal = -(-most // array.lanes)
        total.structural += makespan(np.tile(full, len(cycles) // len(full)), repeats, array.tiles)
        total.cycles += makespan(cycles, repeats, array.tiles)
        total.ideal += makespan(ideal, repeats, array.tiles)
        total.job_cycles += (
            int((ideal if chip.frontend.kind == "ideal" else cycles).sum()) * repeats
        )
        total.macs += int(nonzeros.sum()) * part.columns
    return total


@functools.lru_cache(maxsize=4096)
def _structural_cycles(
    shape: LayerShape, which: Pass, operand: Operand, chip: Accelerator
) -> list[NDArray[np.int64]]:
    """Return the cycles of the groups of each part without natural zeros, for one sample."""
    samples = shape.n if which is Pass.WEIGHT else 1
    one = replace(shape, n=samples)
    ones = np.broadcast_to(np.True_, one.shapes[operand])
    lanes, rows = chip.array.lanes, chip.array.rows
    full = (1 << lanes) - 1
    cycles = []
    made = streams(one, which, operand, ones, lanes, rows)
    for part, (groups, length, _) in zip(made, jobs(one, which, operand, rows, lanes), strict=True):
        if (part.words == full).all():
            cycles.append(np.full(groups, length))
        else:
            cycles.append(stream_cycles(chip.frontend, lanes, part)[:, 0])
    return cycles
