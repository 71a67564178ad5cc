"""Interface of firmware for its callers: offsets of inputs and outputs, and their scales."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.ship.firmware.arena import Arena
from slipstream.ship.firmware.network import Network


@dataclass(frozen=True)
class Port:
    """An int8 input or output at an offset of the arena; real = scale * (code - zero_point)."""

    name: str
    offset: int
    shape: tuple[int, ...]
    scale: float
    zero_point: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Interface:
    """Arguments and results of ``NAME_invoke(arena)``."""

    name: str
    arena_bytes: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def check(self) -> None:
        """Check the name and the offsets.

        Raises:
            ValueError: one is invalid.
        """
        inside = all(
            port.offset >= 0
            and min(port.shape, default=1) > 0
            and port.offset + port.nbytes <= self.arena_bytes
            for port in (*self.inputs, *self.outputs)
        )
        if self.name != c_name(self.name) or not inside:
            raise ValueError("a name or an offset is invalid")


def c_name(text: str) -> str:
    """Return a C identifier for any text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower()
    return name if name and not name[0].isdigit() else f"model_{name}".rstrip("_")


def interface_of(network: Network, arena: Arena) -> Interface:
    """Return the interface of a planned network."""

    def port(index: int) -> Port:
        tensor = network.tensors[index]
        assert tensor.quantization is not None  # checked when lowering
        scale, zero = float(tensor.quantization.scale), tensor.quantization.zero_point
        return Port(tensor.name, arena.tensors[index], tensor.shape, scale, zero)

    return Interface(
        c_name(network.name), arena.size,
        tuple(map(port, network.inputs)), tuple(map(port, network.outputs)),
    )  # fmt: skip
