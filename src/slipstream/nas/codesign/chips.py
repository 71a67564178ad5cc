"""Spaces of chips: the cost of a network on each of them, from `slipstream.hardware.mapping`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.arguments import as_integer
from slipstream.cluster.quantity import Quantity
from slipstream.hardware import Accelerator, Chips, LayerShape
from slipstream.hardware.accelerator import read_table
from slipstream.hardware.layers import OPERANDS
from slipstream.hardware.mapping import best_cost, cost
from slipstream.hardware.space import SPACE, chips_of
from slipstream.nas.codesign.layers import NetworkLayer, network_layers
from slipstream.nas.codesign.space import HardwareSpace
from slipstream.nas.supernet import Supernet
from slipstream.schema import read
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_Numbers = NDArray[np.float64]
# Memory for the costs of layers on all chips.
_CACHE_BYTES = 256 << 20


class ChipSpace(HardwareSpace):
    """Chips that differ from a base in the values of some attributes.

    Costs are those of dense front ends: a scheduler that skips zeros is not simulated.

    Args:
        base: the chip that has all other attributes, and that results are compared with.
        values: values by attribute of `Chips`, such as ``{"rows": (2, 4)}``; by default 50,000
            chips of all sizes.
        item_bytes: bytes per value of activations and weights.
        batch: samples per inference.

    Attributes:
        chips: the chips as columns.

    Raises:
        UnknownNameError: an attribute is unknown.
        InvalidArgumentError: a value is invalid, or there are over 10 million chips.
    """

    metrics: ClassVar = {"time": "ms", "energy": "mJ", "area": "mm2"}
    settings: ClassVar = ("base", "values", "item_bytes", "batch")

    def __init__(
        self,
        base: Accelerator,
        values: Mapping[str, Sequence[float]] = SPACE,
        *,
        item_bytes: int = 1,
        batch: int = 1,
    ) -> None:
        self.base = base
        self.values = {name: tuple(options) for name, options in values.items()}
        self.item_bytes = as_integer("item_bytes", item_bytes)
        self.batch = as_integer("batch", batch)
        self.chips = chips_of(base, self.values)
        for name, options in self.values.items():
            for value in options:
                _changed(base, {name: value})
        self._arrays = self.chips.arrays()
        self._costs: dict[Any, tuple[_Numbers, _Numbers]] = {}

    @classmethod
    def load(cls, name: str | Path) -> ChipSpace:
        """Read a TOML file: an accelerator with ``item_bytes``, ``batch`` and a table ``space``.

        The name of a shipped chip stands for that chip with the default values.

        Raises:
            SlipstreamError: it cannot be read, or a value is invalid; names the place.
        """
        table, stem = read_table(name)
        settings = {key: table.pop(key) for key in ("item_bytes", "batch") if key in table}
        kind = Mapping[str, Sequence[float]]
        values: Any = read(kind, table.pop("space", dict(SPACE)), "space", {})
        return cls(Accelerator.of(table, stem), values, **settings)

    def chip(self, point: int) -> Accelerator:
        """Return the description of a chip."""
        return _changed(self.base, self.at(point))

    def costs(self, net: Supernet, config: Mapping[str, int]) -> dict[str, _Numbers]:
        """Return time (ms), energy (mJ) and area (mm2) of a sub-network, float64 [chips]."""
        return self.costs_of(network_layers(net, config, batch=self.batch))

    def costs_of(self, layers: Sequence[NetworkLayer]) -> dict[str, _Numbers]:
        """Return time (ms), energy (mJ) and area (mm2) of a network's layers, float64 [chips]."""
        time, energy = np.zeros(len(self)), np.zeros(len(self))
        for key, times in Counter(layer.key for layer in layers).items():
            if key not in self._costs:
                while len(self._costs) * 16 * len(self) > _CACHE_BYTES:
                    del self._costs[next(iter(self._costs))]
                self._costs[key] = _layer_costs(key, self.chips, self._arrays, self.item_bytes)
            own_time, own_energy = self._costs[key]
            time += times * own_time
            energy += times * own_energy
        return {"time": time / 1e6, "energy": energy / 1e9, "area": self.chips.area_mm2}

    def baseline(self, net: Supernet, config: Mapping[str, int]) -> dict[str, float]:
        """Return the costs of a sub-network on the base chip."""
        alone = ChipSpace(self.base, {"tiles": (self.base.array.tiles,)},
                          item_bytes=self.item_bytes, batch=self.batch)  # fmt: skip
        return {name: float(column[0]) for name, column in alone.costs(net, config).items()}

    def explain(self, net: Supernet, config: Mapping[str, int], point: int) -> Table:
        """Return time and energy of each layer on a chip, and what bounds it."""
        chip = Chips(*(column[point : point + 1] for column in vars(self.chips).values()))
        layers = network_layers(net, config, batch=self.batch)
        rows = [_explained(layer, chip, self.item_bytes) for layer in layers]
        time, energy = (sum(row[name] for row in rows) for name in ("time_ns", "energy_pj"))
        field = Field[dict[str, Any]]
        return Table.of(rows, [
            field.of("layer", lambda row: row["name"]),
            field.number("MACs", lambda row: f"{row['macs']:,}"),
            field.number("time", lambda row: format_duration(row["time_ns"])),
            field.number("of the time", lambda row: f"{row['time_ns'] / time:.0%}"),
            field.number("of the energy", lambda row: f"{row['energy_pj'] / energy:.0%}"),
            field.number("of the array", lambda row: f"{row['used']:.0%}"),
            field.of("bound by", lambda row: row["bound"]),
        ])  # fmt: skip


def _layer_costs(
    key: Any, chips: Chips, arrays: tuple[Chips, NDArray[np.int64]], item_bytes: int
) -> tuple[_Numbers, _Numbers]:
    """Return time (ns) and energy (pJ) of a layer, float64 [chips]."""
    first, second = key
    if isinstance(first, LayerShape):
        return best_cost(first, second, chips, arrays, item_bytes)
    moved = second * item_bytes
    compute = first / chips.vector_lanes / chips.clock_hz
    time = np.maximum(compute, moved / chips.dram_bytes_per_s) * 1e9
    return time, first * chips.mac + moved * (chips.onchip_per_byte + chips.dram_per_byte)


def _explained(layer: NetworkLayer, chip: Chips, item_bytes: int) -> dict[str, Any]:
    time, energy = (float(c[0]) for c in _layer_costs(layer.key, chip, chip.arrays(), item_bytes))
    row = {"name": layer.name, "macs": 0, "time_ns": time, "energy_pj": energy, "used": 0.0}
    if layer.product is None:
        compute = layer.operations / float(chip.vector_lanes[0] * chip.clock_hz[0])
        return {**row, "bound": "vector unit" if compute * 1e9 >= time else "DRAM"}
    shape, which = layer.product
    cycles = min(
        float(cost(shape, which, chip, item_bytes=item_bytes, operand=operand).cycles[0])
        for operand in OPERANDS[which]
    )
    used = shape.macs / (float(chip.macs[0]) * max(time / 1e9 * float(chip.clock_hz[0]), 1.0))
    bound = "array" if cycles / float(chip.clock_hz[0]) * 1e9 >= time * (1 - 1e-9) else "DRAM"
    return {**row, "macs": shape.macs, "used": used, "bound": bound}


def _changed(base: Accelerator, values: Mapping[str, float]) -> Accelerator:
    """Return a chip with other values by attribute of `Chips`."""
    chip = base
    own = {"mac_mm2": "mac", "onchip_mm2_per_byte": "onchip_per_byte",
           "dram_mm2_per_byte_per_s": "dram_per_byte_per_s"}  # fmt: skip
    for name, value in values.items():
        if hasattr(chip.array, name):
            chip = replace(chip, array=replace(chip.array, **{name: int(value)}))
        elif name == "vector_lanes":
            chip = replace(chip, vector_lanes=int(value))
        elif name == "clock_hz":
            chip = replace(chip, clock_hz=Quantity(value))
        elif name in own:
            chip = replace(chip, area=replace(chip.area, **{own[name]: Quantity(value)}))
        else:
            part = "memory" if hasattr(chip.memory, name) else "energy"
            inner = replace(getattr(chip, part), **{name: Quantity(value)})
            chip = replace(chip, **{part: inner})
    return chip
