"""Targets of firmware: compilers, their flags, and emulated boards."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import UnknownNameError


@dataclass(frozen=True)
class Target:
    """A processor.

    Attributes:
        flags: compiler flags that select the processor.
        board: machine of `qemu-system-arm`; empty for the host.
        constants, ram, inputs: addresses of the board's memory; code starts at 0.
        vectors: whether it multiplies vectors of bytes (Helium).
        about: description for users.
    """

    name: str
    compiler: str
    flags: tuple[str, ...]
    board: str = ""
    constants: int = 0x200000
    ram: int = 0x20000000
    inputs: int = 0x21000000
    vectors: bool = False
    about: str = ""


_ARM = "arm-none-eabi-gcc"
_TARGETS = {
    entry.name: entry
    for entry in (
        Target("host", "gcc", (), about="this machine, for tests"),
        Target(
            "cortex-m4", _ARM,
            ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
            "mps2-an386", about="DSP instructions: STM32F4, nRF52, Apollo3",
        ),
        Target(
            "cortex-m7", _ARM,
            ("-mcpu=cortex-m7", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv5-d16"),
            "mps2-an500", inputs=0x60000000,
            about="DSP instructions, two per cycle: STM32F7, STM32H7, i.MX RT",
        ),
        Target(
            "cortex-m55", _ARM,
            ("-mcpu=cortex-m55", "-mthumb", "-mfloat-abi=hard"),
            "mps3-an547", constants=0x60000000, ram=0x21000000, inputs=0x61000000, vectors=True,
            about="Helium vectors: Alif Ensemble, STM32N6",
        ),
    )
}  # fmt: skip


def target(name: str) -> Target:
    """Return a target by name.

    Raises:
        UnknownNameError: it does not exist.
    """
    if name not in _TARGETS:
        raise UnknownNameError("target", name, _TARGETS)
    return _TARGETS[name]


def targets() -> tuple[Target, ...]:
    """Return all targets."""
    return tuple(_TARGETS.values())
