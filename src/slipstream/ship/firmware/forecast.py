"""Predict whether a model fits a device and its cost there, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.errors import UnknownNameError
from slipstream.ship.firmware import costs
from slipstream.ship.firmware.firmware import Firmware, shortages
from slipstream.ship.firmware.targets import targets
from slipstream.tables import Field, Table


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and instructions of firmware.

    Attributes:
        arena, stack: bytes of RAM, both exact.
        constants, code: bytes of flash; constants are exact.
        steps: instructions of each step.
        ram_limit, flash_limit: bytes of the device; None for no limit.
    """

    firmware: Firmware
    arena: int
    stack: int
    constants: int
    code: int
    steps: tuple[int, ...]
    ram_limit: int | None = None
    flash_limit: int | None = None

    @property
    def ram(self) -> int:
        """Total bytes of RAM."""
        return self.arena + self.stack

    @property
    def flash(self) -> int:
        """Total bytes of flash."""
        return self.constants + self.code

    @property
    def instructions(self) -> int:
        """Instructions of one inference."""
        return sum(self.steps)

    @property
    def fits(self) -> bool:
        """Whether it is within the limits."""
        return not self.remedies()

    def remedies(self) -> list[str]:
        """Return shortages with their remedies; empty if everything fits."""
        return list(map(str, shortages(self.firmware, self.ram_limit, self.flash_limit)))

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "model": self.firmware.network.name, "target": self.firmware.target.name,
            "ram_bytes": self.ram, "arena_bytes": self.arena, "stack_bytes": self.stack,
            "flash_bytes": self.flash, "constant_bytes": self.constants, "code_bytes": self.code,
            "instructions": self.instructions, "steps": list(self.steps), "fits": self.fits,
            "remedies": self.remedies(),
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Return the totals and the most expensive steps."""
        plan = self.firmware
        ram = f"arena {self.arena:,}, stack {self.stack:,} (both exact)"
        flash = f"constants {self.constants:,} (exact), code {self.code:,}"
        sums = [
            ("RAM", self.ram, self.ram_limit, ram),
            ("flash", self.flash, self.flash_limit, flash),
        ]
        fields: list[Field[tuple[str, int, int | None, str]]] = [
            Field.of("memory", lambda row: row[0]),
            Field.number("required, B", lambda row: f"{row[1]:,}"),
            Field.number("available, B", lambda row: "-" if row[2] is None else f"{row[2]:,}"),
            Field.of("fits", lambda row: _answer(row[1], row[2])),
            Field.of("of which", lambda row: row[3]),
        ]
        title = f"{plan.network.name} on {plan.target.name}"
        first = Table.of(sums, fields, title, self.remedies())
        ranked = sorted(range(len(self.steps)), key=lambda step: -self.steps[step])[:8]
        total = max(self.instructions, 1)
        costly: list[Field[int]] = [
            Field.number("step", str),
            Field.of("kernel", lambda step: plan.program.steps[step].kernel.removeprefix("slip_")),
            Field.of(
                "writes", lambda step: plan.network.tensors[plan.program.steps[step].output].name
            ),
            Field.number("instructions", lambda step: f"{self.steps[step]:,}"),
            Field.number("share", lambda step: f"{self.steps[step] / total:.0%}"),
        ]
        notes = [
            f"{self.instructions:,} instructions per inference, fitted on the emulated processor; "
            "instructions are not cycles",
        ]
        if unmeasured := costs.unmeasured(plan.program, plan.target):
            notes.append(
                f"excluding code and instructions of unmeasured kernels: {', '.join(unmeasured)}"
            )
        return [first, Table.of(ranked, costly, "most instructions", notes)]


def _answer(needed: int, limit: int | None) -> str:
    return "-" if limit is None else "yes" if needed <= limit else "no"


def forecast(
    firmware: Firmware, *, ram_bytes: int | None = None, flash_bytes: int | None = None
) -> Forecast:
    """Predict memory and instructions of `firmware` on its target.

    Args:
        ram_bytes, flash_bytes: memory of the device; None for no limit.

    Raises:
        UnknownNameError: instructions were not measured on its target.
    """
    device, program = firmware.target, firmware.program
    if not costs.fitted(device):
        measured = [target.name for target in targets() if costs.fitted(target)]
        raise UnknownNameError("target of predictions", device.name, measured)
    return Forecast(
        firmware, firmware.arena.size, costs.stack_bytes(program, device),
        costs.constant_bytes(program), costs.code_bytes(program, device),
        tuple(costs.instructions(step, device) for step in program.steps), ram_bytes, flash_bytes,
    )  # fmt: skip
