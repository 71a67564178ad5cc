"""Compile firmware, and run it on this machine or on an emulated Cortex-M.

The model's memory is overwritten between runs.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from slipstream.ship.errors import ToolchainError
from slipstream.ship.firmware.interface import Interface, Port
from slipstream.ship.firmware.network import Array
from slipstream.ship.firmware.targets import Target

_CFLAGS = ("-std=c99", "-O2", "-Wall", "-Wextra", "-ffunction-sections", "-fdata-sections")
_COMPILE_S, _RUN_S, _PER_INPUT_S = 600, 240, 5
# An instruction takes 2^5 ns of virtual time, about a tick of the counter, whose 24 bits suffice
# for steps of up to 16 million instructions.
_ICOUNT = "shift=5"
# Hook that model.c calls between steps, on a board.
_STEP = """#include <stdint.h>
void board_step(uint32_t number);
#define SLIP_STEP(number) board_step(number);
"""
# Allocators: of C, of newlib beneath them, and of C++.
_HEAP = re.compile(r"_*(malloc|calloc|realloc|free|memalign|sbrk)(_r)?|_Z(nw|na|dl|da)\w*")
_INSTALL = {
    "gcc": "apt-get install gcc",
    "arm-none-eabi-gcc": "apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi",
    "qemu-system-arm": "apt-get install qemu-system-arm",
}


@dataclass(frozen=True)
class FirmwareRun:
    """Result of running firmware.

    Attributes:
        outputs: for each set of inputs, an int8 array per output of the model.
        steps: instructions, [sets of inputs][steps]; empty if not counted.
        opening: instructions before the first inference.
        stacks: bytes of stack at the deepest call of each step; empty if not measured.
        size: size of the image; None if none was linked.
    """

    outputs: list[list[Array]]
    steps: tuple[tuple[int, ...], ...] = ()
    opening: int = 0
    stacks: tuple[int, ...] = ()
    size: ImageSize | None = None

    @property
    def instructions(self) -> tuple[int, ...]:
        """Instructions of an inference, per set of inputs."""
        return tuple(map(sum, self.steps))

    @property
    def stack(self) -> int:
        """Bytes of stack at the deepest call; 0 if not measured."""
        return max(self.stacks, default=0)


@dataclass(frozen=True)
class ImageSize:
    """Bytes of firmware, excluding parts that only the emulator needs.

    Attributes:
        code: functions of the model and its kernels.
        constants: weights, multipliers, sizes.
        library: functions of the C library.
        ram: variables outside the arena.
        allocators: names of heap functions; empty unless something allocates.
    """

    code: int
    constants: int
    library: int
    ram: int
    allocators: tuple[str, ...] = ()

    @property
    def flash(self) -> int:
        """Total bytes of flash."""
        return self.code + self.constants + self.library


def need_tool(name: str) -> str:
    """Return the path of a program; the ToolchainError without it shows how to install it."""
    path = shutil.which(name)
    if path is None:
        raise ToolchainError(f"{name} is not installed", remedy=_INSTALL.get(name))
    return path


def run_here(
    sources: Mapping[str, str], interface: Interface, inputs: Sequence[Sequence[Array]],
    folder: Path, *, flags: Sequence[str] = (),
) -> FirmwareRun:  # fmt: skip
    """Compile for this machine and run every set of inputs.

    Args:
        sources: files from `emit`.
        inputs: sets of an int8 array per input of the model.
        folder: build directory.

    Raises:
        ToolchainError: there is no compiler, or it fails.
    """
    library = folder / "model.so"
    paths = _write(sources, folder)
    _compile("gcc", [*_CFLAGS, *flags, "-shared", "-fPIC", "-o", str(library), *paths])
    invoke = getattr(ctypes.CDLL(str(library)), f"{interface.name}_invoke")
    memory = np.empty(interface.arena_bytes + 16, np.int8)
    start = -memory.ctypes.data % 16
    arena = memory[start : start + interface.arena_bytes]
    outputs = []
    for arrays in inputs:
        arena[:] = 0x55
        for port, values in zip(interface.inputs, arrays, strict=True):
            arena[port.offset : port.offset + port.nbytes] = values.reshape(-1)
        invoke(ctypes.c_void_p(arena.ctypes.data))
        outputs.append(
            [
                arena[port.offset : port.offset + port.nbytes].reshape(port.shape).copy()
                for port in interface.outputs
            ]
        )
    return FirmwareRun(outputs)


def run_emulated(
    sources: Mapping[str, str], interface: Interface, inputs: Sequence[Sequence[Array]],
    folder: Path, target: Target,
) -> FirmwareRun:  # fmt: skip
    """Cross-compile, and run every set of inputs on the emulated board of `target`.

    Raises:
        ToolchainError: compiler or emulator is missing or fails; the program faults or hangs.
    """
    need_tool("qemu-system-arm")
    opens = f"{interface.name}_open(" in sources["model.h"]
    boards = files("slipstream.ship.firmware") / "boards"
    script = (boards / "link.ld").read_text("utf-8")
    for name in ("constants", "ram", "inputs"):
        script = script.replace(f"BOARD_{name.upper()}", hex(getattr(target, name)))
    all_sources = dict(sources) | {
        "board.c": (boards / "board.c").read_text("utf-8"),
        "board.h": _board_header(interface, len(inputs), opens, folder / "inputs.bin"),
        "board_step.h": _STEP, "link.ld": script,
    }  # fmt: skip
    limit_s = _RUN_S + _PER_INPUT_S * len(inputs)
    image = folder / "firmware.elf"
    paths = _write(all_sources, folder)
    flat = [np.ascontiguousarray(values).tobytes() for arrays in inputs for values in arrays]
    (folder / "inputs.bin").write_bytes(b"".join(flat))
    flags = [*_CFLAGS, *target.flags, "-nostartfiles", "--specs=nano.specs", "-Wl,--gc-sections"]
    flags += ["-include", str(folder / "board_step.h")]
    _compile(target.compiler, [*flags, "-T", str(folder / "link.ld"), "-o", str(image), *paths])
    command = [
        "qemu-system-arm", "-M", target.board, "-nographic", "-monitor", "none", "-serial", "none",
        "-icount", _ICOUNT, "-semihosting-config", "enable=on,target=native", "-kernel", str(image),
    ]  # fmt: skip
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(
            f"the emulated {target.name} did not finish within {limit_s} s", where=str(image)
        ) from error
    if ran.returncode or "ticks_per_million" not in ran.stdout + ran.stderr:
        raise ToolchainError(
            f"the emulated {target.name} exited with status {ran.returncode}: "
            f"{(ran.stderr + ran.stdout).strip()[-300:]}",
            where=str(image),
        )
    return _parsed(ran.stdout + ran.stderr, interface, image_size(image))


def _parsed(text: str, interface: Interface, size: ImageSize) -> FirmwareRun:
    def numbers(name: str) -> list[int]:
        return [int(digits) for digits in re.findall(rf"^{name} (\d+)$", text, re.MULTILINE)]

    per_million = numbers("ticks_per_million")[0]
    mark = numbers("ticks_per_mark")[0]

    def instructions(name: str) -> list[int]:
        return [max(0, round((ticks - mark) * 1e6 / per_million)) for ticks in numbers(name)]

    counts, opening = instructions("ticks"), instructions("ticks_to_open")[0]
    shapes = [port.shape for port in interface.outputs]
    flat = [
        np.frombuffer(bytes.fromhex(digits), np.int8)
        for digits in re.findall(r"^output ([0-9a-f]*)$", text, re.MULTILINE)
    ]
    outputs = [
        [flat[start + number].reshape(shape) for number, shape in enumerate(shapes)]
        for start in range(0, len(flat), len(shapes))
    ]
    each = len(counts) // len(outputs)
    steps = [tuple(counts[start : start + each]) for start in range(0, len(counts), each)]
    return FirmwareRun(outputs, tuple(steps), opening, tuple(numbers("stack")), size)


def image_size(image: Path) -> ImageSize:
    """Return bytes of an image by purpose, from its symbols."""
    listed = subprocess.run(
        [need_tool("arm-none-eabi-nm"), "-S", str(image)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    code = constants = library = ram = 0
    allocators = []
    for line in listed.splitlines():
        parts = line.split()
        if _HEAP.fullmatch(parts[-1]):
            allocators.append(parts[-1])
        if len(parts) != 4 or parts[3].startswith("board_"):
            continue
        size, kind, name = int(parts[1], 16), parts[2].lower(), parts[3]
        if name in ("memcpy", "memset"):
            library += size
        elif kind == "t":
            code += size
        elif kind == "r":
            constants += size
        elif kind in "bd":
            ram += size
    return ImageSize(code, constants, library, ram, tuple(sorted(allocators)))


def _board_header(interface: Interface, runs: int, opens: bool, inputs: Path) -> str:
    lines = [
        '#include "model.h"', f"#define BOARD_ARENA_BYTES {interface.arena_bytes}",
        f"#define BOARD_RUNS {runs}u", f"#define BOARD_STEPS {interface.name.upper()}_STEPS",
        f"#define BOARD_INVOKE {interface.name}_invoke",
        f"#define BOARD_OPEN() {f'{interface.name}_open()' if opens else 0}",
    ]  # fmt: skip

    def places(kind: str, ports: Sequence[Port]) -> list[str]:
        pairs = ", ".join(f"{port.offset}, {port.nbytes}" for port in ports)
        return [
            f"#define BOARD_{kind.upper()}S {len(ports)}u",
            f"static const uint32_t board_{kind}_places[] = {{{pairs}}};",
        ]

    lines += [*places("input", interface.inputs), *places("output", interface.outputs)]
    lines.append(f"#define BOARD_INPUTS_FILE {json.dumps(str(inputs))}")
    return "\n".join([*lines, ""])


def _write(sources: Mapping[str, str], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (folder / name).write_text(text, "utf-8")
    return [str(folder / name) for name in sources if name.endswith(".c")]


def _compile(compiler: str, arguments: Sequence[str]) -> None:
    command = [need_tool(compiler), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(
            f"{compiler} did not finish within {_COMPILE_S} s",
            remedy="try again when the machine is less busy",
        ) from error
    if ran.returncode:
        raise ToolchainError(
            f"{compiler} failed to compile the firmware: {ran.stderr.strip()[:500]}"
        )
