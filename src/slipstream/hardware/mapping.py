"""Cycles, bytes and energy of layers on many chips at once, in NumPy.

Work is dealt to tiles in jobs: one group of streams for as many results as a tile has columns. Job
j runs on tile j modulo the number of tiles. Memory traffic overlaps with computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.hardware.accelerator import Accelerator
from slipstream.hardware.layers import OPERANDS, LayerShape, Operand, Pass, phases, result_of

_Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chips:
    """Chips as columns, float64 [chips]; energies in pJ, as in `Energy`; areas in mm2."""

    tiles: _Numbers
    rows: _Numbers
    columns: _Numbers
    lanes: _Numbers
    clock_hz: _Numbers
    vector_lanes: _Numbers
    onchip_bytes: _Numbers
    dram_bytes_per_s: _Numbers
    mac: _Numbers
    idle: _Numbers
    scheduler: _Numbers
    mux: _Numbers
    onchip_per_byte: _Numbers
    dram_per_byte: _Numbers
    mac_mm2: _Numbers
    onchip_mm2_per_byte: _Numbers
    dram_mm2_per_byte_per_s: _Numbers

    @classmethod
    def of(cls, chip: Accelerator, **changes: ArrayLike) -> Chips:
        """Return copies of `chip` with other values.

        Args:
            changes: float64 [chips] by attribute, such as ``rows``.
        """
        values: dict[str, Any] = {
            "clock_hz": chip.clock_hz, "vector_lanes": chip.vector_lanes,
            **vars(chip.array), **vars(chip.memory), **vars(chip.energy),
            "mac_mm2": chip.area.mac, "onchip_mm2_per_byte": chip.area.onchip_per_byte,
            "dram_mm2_per_byte_per_s": chip.area.dram_per_byte_per_s,
        }  # fmt: skip
        columns = {
            field.name: changes.get(
                field.name, getattr(values[field.name], "value", values[field.name])
            )
            for field in fields(cls)
        }
        arrays = np.broadcast_arrays(*(np.atleast_1d(column) for column in columns.values()))
        return cls(*(array.astype(np.float64) for array in arrays))

    @property
    def macs(self) -> _Numbers:
        """Multiplications per cycle."""
        return self.tiles * self.rows * self.columns * self.lanes

    @property
    def area_mm2(self) -> _Numbers:
        """Area of the multipliers, on-chip memory and interface to DRAM."""
        memory = self.onchip_bytes * self.onchip_mm2_per_byte
        interface = self.dram_bytes_per_s * self.dram_mm2_per_byte_per_s
        return self.macs * self.mac_mm2 + memory + interface

    def arrays(self) -> tuple[Chips, NDArray[np.int64]]:
        """Return one chip of each array, and per chip the number of its array, int64 [chips]."""
        table = np.stack([self.tiles, self.rows, self.columns, self.lanes], axis=1)
        _, first, member = np.unique(table, axis=0, return_index=True, return_inverse=True)
        return Chips(*(column[first] for column in vars(self).values())), member.ravel()


@dataclass(frozen=True, eq=False)
class Cost:
    """Costs of a pass, float64 [chips].

    Attributes:
        cycles: until the last tile is done.
        job_cycles: cycles of all tiles together.
        macs: multiplications that are executed.
        dram_bytes, onchip_bytes: bytes read and written.
    """

    cycles: _Numbers
    job_cycles: _Numbers
    macs: _Numbers
    dram_bytes: _Numbers
    onchip_bytes: _Numbers

    def totals(
        self, chips: Chips, member: NDArray[np.int64], dram_bytes: _Numbers, *, scheduled: bool
    ) -> tuple[_Numbers, _Numbers]:
        """Return time (ns) and energy (pJ) of chips from the costs of their arrays, by number."""
        columns = (column[member] for column in vars(self).values())
        whole = replace(Cost(*columns), dram_bytes=dram_bytes)
        lanes, memories = whole.energy_pj(chips, scheduled=scheduled)
        return whole.time_ns(chips), lanes + memories

    def time_ns(self, chips: Chips) -> _Numbers:
        """Return the time of the slower of computation and DRAM."""
        compute = self.cycles / chips.clock_hz
        result: _Numbers = np.maximum(compute, self.dram_bytes / chips.dram_bytes_per_s) * 1e9
        return result

    def energy_pj(self, chips: Chips, *, scheduled: bool) -> tuple[_Numbers, _Numbers]:
        """Return the energy of the lanes, and of the memories.

        Args:
            scheduled: whether a scheduler and multiplexers feed the lanes.
        """
        lanes = self.job_cycles * chips.rows * chips.columns * chips.lanes
        compute = self.macs * chips.mac + np.maximum(lanes - self.macs, 0.0) * chips.idle
        if scheduled:
            compute = compute + self.job_cycles * chips.rows * chips.scheduler
            compute = compute + self.macs * chips.mux
        memory = self.onchip_bytes * chips.onchip_per_byte + self.dram_bytes * chips.dram_per_byte
        return compute, memory


def jobs(
    shape: LayerShape, which: Pass, operand: Operand, rows: Any, lanes: Any
) -> Iterator[tuple[Any, Any, int]]:
    """Yield (groups, length, results per stream) of `streams`, without making them.

    Args:
        rows, lanes: numbers or arrays.
    """
    inputs, outputs = shape.c // shape.groups, shape.k // shape.groups
    positions = shape.oh * shape.ow
    if which is Pass.WEIGHT:
        length = shape.n * -(-positions // lanes)
        kernels = inputs * shape.kh * shape.kw
        own, other = (outputs, kernels) if operand is Operand.GRADIENT else (kernels, outputs)
        yield shape.groups * -(-own // rows), length, other
        return
    if which is Pass.FORWARD:
        parts = [(positions, shape.kh * shape.kw)]
        reduced, results = inputs, outputs
    else:
        reduced, results = outputs, inputs
        parts = [
            (len(ys) * len(xs), len(tap_rows) * len(tap_columns))
            for (ys, tap_rows), (xs, tap_columns) in phases(shape)
        ]
    for windows, taps in parts:
        length = taps * -(-reduced // lanes)
        if operand is Operand.WEIGHT:
            yield shape.groups * -(-results // rows), length, shape.n * windows
        else:
            yield shape.n * shape.groups * -(-windows // rows), length, results


def makespan(cycles: NDArray[np.int64], repeats: int, tiles: int) -> int:
    """Return the cycles of the busiest tile when each group is `repeats` jobs in sequence.

    Args:
        cycles: int64 [groups].
    """
    end = np.arange(1, len(cycles) + 1)[:, None] * repeats
    tile = np.arange(tiles)
    before = (end - repeats - tile + tiles - 1) // tiles
    counts = (end - tile + tiles - 1) // tiles - before
    return int((cycles @ counts).max()) if len(cycles) else 0


def cost(
    shape: LayerShape, which: Pass, chips: Chips, *, item_bytes: int = 4,
    operand: Operand | None = None,
) -> Cost:  # fmt: skip
    """Return the costs of a pass on chips with a dense front end.

    Args:
        item_bytes: bytes per value.
        operand: the operand on the rows; the first of the pass by default.
    """
    operand = operand or OPERANDS[which][0]
    cycles = job_cycles = onchip = np.zeros(len(chips.rows))
    for groups, length, results in jobs(shape, which, operand, chips.rows, chips.lanes):
        count = groups * -(-results // chips.columns)
        cycles = cycles + length * -(-count // chips.tiles)
        job_cycles = job_cycles + length * count
        reads = length * count * (chips.rows + chips.columns) * chips.lanes
        onchip = onchip + reads * item_bytes
    result = int(np.prod(shape.shapes[result_of(which)])) * item_bytes
    macs = np.full(len(cycles), float(shape.macs))
    dram = dram_bytes(shape, which, chips, item_bytes)
    return Cost(cycles, job_cycles, macs, dram, onchip + result)


def dram_bytes(shape: LayerShape, which: Pass, chips: Chips, item_bytes: int) -> _Numbers:
    """Return the bytes that a pass reads from DRAM and writes to it, float64 [chips]."""
    sizes = {name: int(np.prod(size)) * item_bytes for name, size in shape.shapes.items()}
    resident, streamed = sorted(sizes[name] for name in OPERANDS[which])
    # Parts of the smaller operand fill half of the memory; the other one is read for each.
    parts: _Numbers = np.maximum(np.ceil(resident / (chips.onchip_bytes / 2)), 1.0)
    return resident + streamed * parts + sizes[result_of(which)]


def best_cost(
    shape: LayerShape, which: Pass, chips: Chips, arrays: tuple[Chips, NDArray[np.int64]],
    item_bytes: int,
) -> tuple[_Numbers, _Numbers]:  # fmt: skip
    """Return the time (ns) and energy (pJ) of a pass with the better operand on the rows.

    That is the faster one, or the one of less energy if both are as fast. Cycles depend on the
    array only, so they are evaluated once per array.

    Args:
        arrays: result of `Chips.arrays`.
    """
    few, member = arrays
    dram = dram_bytes(shape, which, chips, item_bytes)
    (time, energy), *others = (
        cost(shape, which, few, item_bytes=item_bytes, operand=operand)
        .totals(chips, member, dram, scheduled=False)
        for operand in OPERANDS[which]
    )  # fmt: skip
    for own_time, own_energy in others:
        better = (own_time < time) | ((own_time == time) & (own_energy < energy))
        time, energy = np.where(better, own_time, time), np.where(better, own_energy, energy)
    return time, energy


def sweep(
    step: Mapping[tuple[LayerShape, Pass, int], int], chips: Chips
) -> tuple[_Numbers, _Numbers]:
    """Return the time (ns) and energy (pJ) of the matrix products of a step, float64 [chips].

    Args:
        step: how often each pass runs, by shape, pass and bytes per value.
    """
    arrays = chips.arrays()
    time, energy = np.zeros(len(chips.rows)), np.zeros(len(chips.rows))
    for (shape, which, item_bytes), times in step.items():
        own_time, own_energy = best_cost(shape, which, chips, arrays, item_bytes)
        time += times * own_time
        energy += times * own_energy
    return time, energy
