"""A recorded step on every point of a space of accelerators."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.graph import Graph
from slipstream.hardware.accelerator import Accelerator
from slipstream.hardware.layers import LayerShape, Pass, layers_of
from slipstream.hardware.mapping import Chips, dram_bytes, sweep
from slipstream.hardware.predict import RECORD, item_bytes, recorded_masks, tasks_of_layer
from slipstream.hardware.simulate import simulate_arrays

_MAX_CHIPS = 10_000_000
SPACE: Mapping[str, Sequence[float]] = {
    "tiles": (4, 8, 16, 32, 64),
    "rows": (2, 4, 8, 16),
    "columns": (2, 4, 8, 16),
    "lanes": (4, 8, 16, 32, 64),
    "clock_hz": (250e6, 500e6, 800e6, 1e9, 1.5e9),
    "onchip_bytes": tuple((1 << 18) * 4**power for power in range(5)),
    "dram_bytes_per_s": (12.8e9, 25.6e9, 51.2e9, 102.4e9, 204.8e9),
}
"""Values of each attribute of `Chips`: 50,000 chips, with 400 arrays."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """The matrix products of a step on many chips.

    Attributes:
        chips: the chips.
        time_ns, energy_pj: float64 [chips], of the step's layers.
    """

    chips: Chips
    time_ns: NDArray[np.float64]
    energy_pj: NDArray[np.float64]

    def fastest(self) -> list[int]:
        """Return the fastest chip of each number of multipliers that is faster than all smaller."""
        macs = self.chips.macs
        order = np.lexsort((self.energy_pj, self.time_ns, macs))
        best, chosen = np.inf, []
        for chip in order[np.unique(macs[order], return_index=True)[1]].tolist():
            if self.time_ns[chip] < best:
                best = float(self.time_ns[chip])
                chosen.append(chip)
        return chosen


def products_of(graph: Graph) -> Counter[tuple[LayerShape, Pass, int]]:
    """Return how often the step runs each pass, by shape, pass and bytes per value.

    Raises:
        InvalidArgumentError: the step has no convolution or linear layer.
    """
    products = Counter(
        (shape, which, item_bytes(match))
        for match, shape in layers_of(graph)
        for _, passes in tasks_of_layer(graph, match)
        for which in passes
    )
    if not products:
        raise InvalidArgumentError("graph", "the step has no convolution or linear layer")
    return products


def sweep_space(
    graph: Graph,
    chip: Accelerator,
    space: Mapping[str, Sequence[float]] = SPACE,
    *,
    zeros: bool = False,
) -> Sweep:
    """Return the step on all combinations of the values in `space`; the others are those of `chip`.

    Args:
        zeros: whether the front end of `chip` skips the zeros of the recorded masks; otherwise
            front ends are dense.

    Raises:
        UnknownNameError: `space` has another name than the attributes of `Chips`.
        InvalidArgumentError: a value is not above 0, there are over 10 million chips, or the step
            has no layer; with `zeros`, no masks were recorded.
    """
    chips = chips_of(chip, space)
    if zeros:
        return Sweep(chips, *_sweep_zeros(graph, chip, chips))
    return Sweep(chips, *sweep(products_of(graph), chips))


def _sweep_zeros(
    graph: Graph, chip: Accelerator, chips: Chips
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the time (ns) and energy (pJ) with the recorded zeros, float64 [chips]."""
    products_of(graph)
    if not graph.statistics.masks:
        raise InvalidArgumentError("graph", "no masks were recorded", remedy=RECORD)
    found = layers_of(graph)
    few, member = chips.arrays()
    time, energy = np.zeros(len(chips.rows)), np.zeros(len(chips.rows))
    scheduled = chip.frontend.kind == "lookahead"
    for (match, shape), (masks, _) in zip(found, recorded_masks(graph, found), strict=True):
        size = item_bytes(match)
        for which in (w for _, passes in tasks_of_layer(graph, match) for w in passes):
            own = simulate_arrays(shape, which, masks, chip, few, item_bytes=size)
            dram = dram_bytes(shape, which, chips, size)
            own_time, own_energy = own.totals(chips, member, dram, scheduled=scheduled)
            time += own_time
            energy += own_energy
    return time, energy


def chips_of(chip: Accelerator, space: Mapping[str, Sequence[float]]) -> Chips:
    """Return all combinations of the values in `space`, the last attribute fastest.

    Raises:
        UnknownNameError, InvalidArgumentError: see `sweep_space`.
    """
    names = [field.name for field in fields(Chips)]
    for name, values in space.items():
        if name not in names:
            raise UnknownNameError("attribute of a chip", name, names)
        numbers = all(0 < value < math.inf for value in values)
        if not values or not numbers:
            what = f"{list(values)} is not a list of finite values above 0"
            raise InvalidArgumentError(name, what, remedy="for example [4, 8]")
        for value in values if hasattr(chip.array, name) else ():
            if value != int(value):
                raise InvalidArgumentError(name, f"{value:g} is not an integer")
    if (count := math.prod(map(len, space.values()))) > _MAX_CHIPS:
        raise InvalidArgumentError("space", f"has {count:,} chips, more than {_MAX_CHIPS:,}")
    points = np.array(list(itertools.product(*space.values())), np.float64).T
    return Chips.of(chip, **dict(zip(space, points, strict=True)))
