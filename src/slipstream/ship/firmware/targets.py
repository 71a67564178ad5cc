"""What firmware is built for: compilers, their flags, and the emulator's board."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import UnknownNameError


@dataclass(frozen=True)
class Target:
    """A processor.

    Attributes:
        flags: of the compiler, that choose the processor.
        board: of `qemu-system-arm`; empty for this machine itself.
        constants, ram, inputs: where the board has memory for them; its code begins at 0.
        vectors: it multiplies vectors of bytes (Helium).
        about: what it is, for people.
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
    one.name: one
    for one in (
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
            about="DSP instructions, two a cycle: STM32F7, STM32H7, i.MX RT",
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
    """A target by name.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in _TARGETS:
        raise UnknownNameError("target", name, _TARGETS)
    return _TARGETS[name]


def targets() -> tuple[Target, ...]:
    """All of them."""
    return tuple(_TARGETS.values())
