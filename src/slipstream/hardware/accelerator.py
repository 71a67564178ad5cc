"""`Accelerator`: a description of a chip for matrix products, read from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from slipstream.arguments import as_integer
from slipstream.cluster.devices import NUMBERS
from slipstream.cluster.quantity import NOT_GIVEN, Quantity
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.files import read_bytes
from slipstream.schema import build

MAX_DEPTH, MAX_OPTIONS, MAX_ROWS = 4, 16, 32
_MAX_TILES = 4096
_MIN_LANES, _MAX_LANES = 4, 64
_MAX_BYTES = 1 << 20


def _need(condition: bool, place: str, what: str, remedy: str) -> None:
    if not condition:
        raise InvalidArgumentError(place, what, remedy=remedy)


@dataclass(frozen=True)
class Array:
    """Processing elements: `tiles` of `rows` x `columns`, each of `lanes` multipliers.

    The elements of a row share the scheduled operand, those of a column the other one. All rows of
    a tile advance together.
    """

    tiles: int = 16
    rows: int = 4
    columns: int = 4
    lanes: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            place = f"array.{name}"
            small = as_integer(place, value) <= _MAX_TILES
            _need(small, place, f"{value} is more than {_MAX_TILES}", "for example 16")
        _need(
            self.rows <= MAX_ROWS and self.rows & (self.rows - 1) == 0,
            "array.rows", f"{self.rows} is not a power of two up to {MAX_ROWS}", "for example 4",
        )  # fmt: skip
        _need(
            _MIN_LANES <= self.lanes <= _MAX_LANES,
            "array.lanes", f"{self.lanes} is not between {_MIN_LANES} and {_MAX_LANES}", "16",
        )  # fmt: skip

    @property
    def macs(self) -> int:
        """Multiplications per cycle."""
        return self.tiles * self.rows * self.columns * self.lanes


@dataclass(frozen=True)
class FrontEnd:
    """Choice of operand pairs by the lanes.

    Attributes:
        kind: ``dense`` takes every pair; ``lookahead`` is TensorDash's scheduler; ``ideal`` takes
            only effectual pairs, as many per cycle as there are lanes.
        lookahead: number of later rows that a lane can take its own pair from.
        lookaside: (row, lane distance) of pairs of other lanes, in order of priority.
    """

    kind: Literal["dense", "lookahead", "ideal"] = "lookahead"
    lookahead: int = 2
    lookaside: tuple[tuple[int, int], ...] = ((1, -1), (1, 1), (2, -2), (2, 2), (1, -3))

    def __post_init__(self) -> None:
        place, depth = "frontend", self.lookahead + 1
        _need(
            1 <= self.lookahead < MAX_DEPTH,
            f"{place}.lookahead", f"{self.lookahead} is not between 1 and {MAX_DEPTH - 1}", "2",
        )  # fmt: skip
        _need(
            len(self.options) <= MAX_OPTIONS,
            f"{place}.lookaside", f"{len(self.options)} options", f"at most {MAX_OPTIONS}",
        )  # fmt: skip
        for row, distance in self.lookaside:
            _need(
                0 < row < depth and distance != 0, f"{place}.lookaside",
                f"[{row}, {distance}] is not in rows 1 to {self.lookahead}, in another lane",
                "for example [1, -1]",
            )  # fmt: skip

    @property
    def options(self) -> tuple[tuple[int, int], ...]:
        """(row, lane distance) of the pairs that a lane can take, in order of priority."""
        return *((row, 0) for row in range(self.lookahead + 1)), *self.lookaside

    def levels(self, lanes: int) -> list[int]:
        """Return bit masks of lanes that never compete for a pair, first fit in order of lanes."""
        levels: list[int] = []
        taken: list[set[tuple[int, int]]] = []
        for lane in range(lanes):
            pairs = {(row, (lane + distance) % lanes) for row, distance in self.options}
            number = next((n for n, used in enumerate(taken) if not used & pairs), len(levels))
            if number == len(levels):
                levels.append(0)
                taken.append(set())
            levels[number] |= 1 << lane
            taken[number] |= pairs
        return levels


@dataclass(frozen=True)
class Memory:
    """Memories: on-chip buffers of `onchip_bytes` in all, and DRAM."""

    onchip_bytes: Quantity
    dram_bytes_per_s: Quantity


@dataclass(frozen=True)
class Energy:
    """Energies, in pJ.

    Attributes:
        mac: of a multiplication and addition.
        idle: of a lane without a pair in a cycle.
        scheduler: of the scheduler of one row in a cycle.
        mux: of the multiplexers of one lane in a cycle.
        onchip_per_byte, dram_per_byte: of an access.
    """

    mac: Quantity
    idle: Quantity
    scheduler: Quantity
    mux: Quantity
    onchip_per_byte: Quantity
    dram_per_byte: Quantity


@dataclass(frozen=True)
class Area:
    """Areas, in mm2; 0 if not given.

    Attributes:
        mac: of a multiplier and adder.
        onchip_per_byte: of on-chip memory.
        dram_per_byte_per_s: of the interface to DRAM, by bandwidth.
    """

    mac: Quantity = NOT_GIVEN
    onchip_per_byte: Quantity = NOT_GIVEN
    dram_per_byte_per_s: Quantity = NOT_GIVEN


@dataclass(frozen=True)
class Accelerator:
    """A chip for the matrix products of a training step or inference.

    Attributes:
        name, about: name and description.
        clock_hz: cycles per second.
        vector_lanes: elements per cycle of the unit that runs all other operators.
    """

    name: str
    clock_hz: Quantity
    memory: Memory
    energy: Energy
    array: Array = field(default_factory=Array)
    frontend: FrontEnd = field(default_factory=FrontEnd)
    vector_lanes: int = 64
    area: Area = field(default_factory=Area)
    about: str = ""

    def __post_init__(self) -> None:
        _need(self.vector_lanes >= 1, "vector_lanes", f"{self.vector_lanes} is less than 1", "64")
        for place, quantity in (
            ("clock_hz", self.clock_hz),
            ("memory.onchip_bytes", self.memory.onchip_bytes),
            ("memory.dram_bytes_per_s", self.memory.dram_bytes_per_s),
        ):
            _need(
                quantity.value > 0, place, f"{quantity.value:g} is not above 0", "a positive number"
            )

    @classmethod
    def load(cls, name: str | Path) -> Accelerator:
        """Read a TOML file, or a chip that ships with the package: ``tensordash``, ``edge``.

        A file with ``base = "tensordash"`` contains only what differs from that chip.

        Raises:
            SlipstreamError: it cannot be read, or a value is invalid; names the place.
        """
        table, stem = read_table(name)
        return cls.of(table, stem)

    @classmethod
    def of(cls, table: Mapping[str, Any], name: str) -> Accelerator:
        """Return the chip that a TOML table describes; see `load`."""
        if "base" in table:
            table = dict(table)
            table = _merged(tomllib.loads(_shipped(str(table.pop("base")))), table)
        return build(cls, {**table, "name": name}, "", "accelerator", NUMBERS)


def read_table(name: str | Path) -> tuple[dict[str, Any], str]:
    """Return the table of a TOML file or shipped chip, and its name; see `Accelerator.load`."""
    path = Path(name)
    if path.is_file():
        text = read_bytes(path, most=_MAX_BYTES).decode("utf-8", "replace")
    else:
        text = _shipped(str(name).removesuffix(".toml"))
    try:
        return tomllib.loads(text), path.stem
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError("accelerator", f"not TOML: {error}", where=str(path)) from error


def is_described(name: str) -> bool:
    """Whether `name` is a shipped accelerator or a TOML file."""
    return name.endswith(".toml") or name in _presets()


def _presets() -> dict[str, str]:
    folder = resources.files("slipstream.hardware").joinpath("presets")
    return {
        entry.name.removesuffix(".toml"): entry.read_text("utf-8") for entry in folder.iterdir()
    }


def _shipped(name: str) -> str:
    texts = _presets()
    if name not in texts:
        raise UnknownNameError(
            "accelerator", name, texts, where="neither a file nor a shipped chip"
        )
    return texts[name]


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if inner and "value" not in value else value
    return merged
