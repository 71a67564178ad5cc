"""Whether a model fits a device and what it costs there, before anything is built."""

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
    """What firmware will need.

    Attributes:
        arena, stack: bytes of RAM, both exact.
        constants, code: bytes of flash; constants are exact.
        steps: instructions of each step.
        ram_limit, flash_limit: of the device; None where they were not given.
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
        """Bytes of RAM."""
        return self.arena + self.stack

    @property
    def flash(self) -> int:
        """Bytes of flash."""
        return self.constants + self.code

    @property
    def instructions(self) -> int:
        """Of one inference."""
        return sum(self.steps)

    @property
    def fits(self) -> bool:
        """Within the limits that were given."""
        return not self.remedies()

    def remedies(self) -> list[str]:
        """What does not fit, by how much, and what would make it fit; empty where all does."""
        return list(map(str, shortages(self.firmware, self.ram_limit, self.flash_limit)))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "model": self.firmware.network.name, "target": self.firmware.target.name,
            "ram_bytes": self.ram, "arena_bytes": self.arena, "stack_bytes": self.stack,
            "flash_bytes": self.flash, "constant_bytes": self.constants, "code_bytes": self.code,
            "instructions": self.instructions, "steps": list(self.steps), "fits": self.fits,
            "remedies": self.remedies(),
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """The sums, and the steps that cost most."""
        plan = self.firmware
        ram = f"arena {self.arena:,}, stack {self.stack:,} (both exact)"
        flash = f"constants {self.constants:,} (exact), code {self.code:,}"
        sums = [
            ("RAM", self.ram, self.ram_limit, ram),
            ("flash", self.flash, self.flash_limit, flash),
        ]
        fields: list[Field[tuple[str, int, int | None, str]]] = [
            Field.of("memory", lambda row: row[0]),
            Field.number("needs B", lambda row: f"{row[1]:,}"),
            Field.number("has B", lambda row: "-" if row[2] is None else f"{row[2]:,}"),
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
            f"{self.instructions:,} instructions an inference, fitted on the emulated processor; "
            "instructions are not cycles",
        ]
        if unmeasured := costs.unmeasured(plan.program, plan.target):
            notes.append(
                f"not measured yet, so without their code and instructions: {', '.join(unmeasured)}"
            )
        return [first, Table.of(ranked, costly, "most instructions", notes)]


def _answer(needed: int, limit: int | None) -> str:
    return "-" if limit is None else "yes" if needed <= limit else "no"


def forecast(
    firmware: Firmware, *, ram_bytes: int | None = None, flash_bytes: int | None = None
) -> Forecast:
    """What `firmware` will need on its target, and whether that is there.

    Args:
        ram_bytes, flash_bytes: what the device has; None: not asked.

    Raises:
        UnknownNameError: nothing is known of what instructions cost on its target.
    """
    device, program = firmware.target, firmware.program
    if not costs.fitted(device):
        known = [one.name for one in targets() if costs.fitted(one)]
        raise UnknownNameError("target of predictions", device.name, known)
    return Forecast(
        firmware, firmware.arena.size, costs.stack_bytes(program, device),
        costs.constant_bytes(program), costs.code_bytes(program, device),
        tuple(costs.instructions(step, device) for step in program.steps), ram_bytes, flash_bytes,
    )  # fmt: skip
