"""Boards with a microcontroller: memory, clock, and what firmware takes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.errors import UnknownNameError
from slipstream.ship.firmware import Forecast
from slipstream.tables import Field, Table
from slipstream.units import format_bytes

_KIB = 1024
# Cycles per instruction of this firmware by processor: assumed, since no board was measured.
_CYCLES = {"cortex-m4": 1.3, "cortex-m7": 0.8}


@dataclass(frozen=True)
class Board:
    """A microcontroller, from its datasheet.

    Attributes:
        target: processor, the name of a firmware `Target`.
        ram, flash: bytes; RAM is the largest block that one array can have.
        clock_hz: maximum clock rate.
    """

    name: str
    target: str
    ram: int
    flash: int
    clock_hz: float

    @property
    def cycles_per_instruction(self) -> float:
        """Assumed cycles per instruction, with wait states of the flash."""
        return _CYCLES[self.target]

    def latency_ms(self, instructions: float) -> float:
        """Return milliseconds of this many instructions, by the assumed cycles."""
        return 1e3 * instructions * self.cycles_per_instruction / self.clock_hz

    def instructions(self, latency_ms: float) -> int:
        """Return the instructions that run within a latency, by the assumed cycles."""
        return int(latency_ms / 1e3 * self.clock_hz / self.cycles_per_instruction)


_BOARDS = {
    board.name: board
    for board in (
        Board("stm32l432kc", "cortex-m4", 48 * _KIB, 256 * _KIB, 80e6),
        Board("stm32f446re", "cortex-m4", 128 * _KIB, 512 * _KIB, 180e6),
        Board("stm32g474re", "cortex-m4", 96 * _KIB, 512 * _KIB, 170e6),
        Board("stm32l4r5zi", "cortex-m4", 640 * _KIB, 2048 * _KIB, 120e6),
        Board("nrf52832", "cortex-m4", 64 * _KIB, 512 * _KIB, 64e6),
        Board("nrf52840", "cortex-m4", 256 * _KIB, 1024 * _KIB, 64e6),
        Board("stm32f746zg", "cortex-m7", 320 * _KIB, 1024 * _KIB, 216e6),
        Board("stm32f767zi", "cortex-m7", 512 * _KIB, 2048 * _KIB, 216e6),
        Board("stm32h743zi", "cortex-m7", 512 * _KIB, 2048 * _KIB, 480e6),
    )
}


def board(name: str) -> Board:
    """Return a board by name.

    Raises:
        UnknownNameError: it does not exist.
    """
    if name.lower() not in _BOARDS:
        raise UnknownNameError("board", name, _BOARDS)
    return _BOARDS[name.lower()]


def boards() -> tuple[Board, ...]:
    """Return all boards."""
    return tuple(_BOARDS.values())


@dataclass(frozen=True)
class Fit:
    """Whether firmware fits a board, and which operators need most.

    Attributes:
        forecast: memory and instructions, with the board's limits.
        latency_limit_ms: None for no limit.
        nearest: the smallest change that makes it fit; empty if it fits, or none is known.
    """

    board: Board
    forecast: Forecast
    latency_limit_ms: float | None = None
    nearest: str = ""

    @property
    def latency_ms(self) -> float:
        """Predicted milliseconds of an inference, by assumed cycles per instruction."""
        return self.board.latency_ms(self.forecast.instructions)

    @property
    def fits(self) -> bool:
        """Whether RAM, flash and latency are within the limits."""
        limit = self.latency_limit_ms
        return self.forecast.fits and (limit is None or self.latency_ms <= limit)

    def peaks(self) -> dict[str, str]:
        """Return the operator that needs most RAM, flash and time, by limit."""
        firmware = self.forecast.firmware
        steps, network = firmware.program.steps, firmware.network
        constants = [sum(table.nbytes for table in step.tables.values()) for step in steps]
        needs = {"RAM": firmware.live_bytes(), "flash": constants,
                 "latency": list(self.forecast.steps)}  # fmt: skip
        return {
            name: network.where(steps[values.index(max(values))].operator)
            for name, values in needs.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the forecast, the board's limits, and the peaks."""
        return self.forecast.to_json() | {
            "board": self.board.name, "latency_ms": self.latency_ms,
            "latency_limit_ms": self.latency_limit_ms, "fits": self.fits,
            "ram_limit_bytes": self.board.ram, "flash_limit_bytes": self.board.flash,
            "cycles_per_instruction": self.board.cycles_per_instruction, "peaks": self.peaks(),
            "nearest": self.nearest,
        }  # fmt: skip

    def table(self) -> Table:
        """Return a row per limit."""
        limit, peaks = self.latency_limit_ms, self.peaks()
        rows = [
            (name, format_bytes(need), format_bytes(most), need <= most, f"{most - need:+,} B")
            for name, need, most in (
                ("RAM", self.forecast.ram, self.board.ram),
                ("flash", self.forecast.flash, self.board.flash),
            )
        ]
        within = limit is None or self.latency_ms <= limit
        over = "" if limit is None else f"{limit - self.latency_ms:+.1f} ms"
        shown = "-" if limit is None else f"{limit:.4g} ms"
        rows.append(("latency", f"{self.latency_ms:.1f} ms", shown, within, over))
        fields: list[Field[Any]] = [
            Field.of("limit", lambda row: row[0]), Field.number("required", lambda row: row[1]),
            Field.number("available", lambda row: row[2]),
            Field.of("fits", lambda row: "yes" if row[3] else "no"),
            Field.number("remaining", lambda row: row[4]),
            Field.of("largest at", lambda row: peaks[row[0]]),
        ]  # fmt: skip
        notes = [
            f"latency: {self.forecast.instructions:,} instructions at an assumed "
            f"{self.board.cycles_per_instruction:g} cycles each and {self.board.clock_hz / 1e6:g} "
            "MHz; not measured on a board",
            self.nearest,
        ]
        return Table.of(rows, fields, f"{self.forecast.firmware.network.name} on {self.board.name}",
                        list(filter(None, notes)))  # fmt: skip
