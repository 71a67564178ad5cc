"""Emulation of kernels on the CPU, fused and alone, with a bytewise comparison of their memory.

No GPU is needed and nothing is timed: this checks whether the fused kernel computes the same. Every
thread of a block is a fiber of `slip_emulator.h`. Blocks run sequentially, in several orders of
their threads. Arrays end at a guard page.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from slipstream.codegen import load
from slipstream.techniques.side_by_side.cuda.fuse import FusedKernel, alone
from slipstream.techniques.side_by_side.cuda.rewrite import Rewriter, parameter_names
from slipstream.techniques.side_by_side.hfuse import (
    EmulationResult,
    EmulatorError,
    Launch,
    differing,
)

# C++17, the default of nvcc.
_FLAGS = (
    "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
)  # fmt: skip
_ENTRY = """
static void slip_body(void** arguments) {{ slip::call({kernel}, arguments); }}
extern "C" {{
int slip_describe(slip::Kind* kinds) {{ return slip::describe({kernel}, kinds); }}
void slip_run(void** arguments, const slip::Settings* settings, slip::Report* report) {{
  slip::run(slip_body, arguments, settings, report);
}}
}}
"""
_LIMIT_S = 60.0
_ELEMENTS, _SCALAR, _BELOW = 4096, 1000, 64
SCHEDULES = tuple(range(11))
"""In order, reversed, round-robin over warps, and eight random orders."""


class _Kind(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("bytes", "pointer", "constant", "floating", "arithmetic", "signed", "lanes")
    ]


class _Settings(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("schedule", ctypes.c_int),
        ("parts", ctypes.c_int), ("starts", ctypes.c_uint * 16), ("limit_s", ctypes.c_double),
    ]  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [
        ("failed", ctypes.c_int), ("float_atomics", ctypes.c_int), ("address", ctypes.c_uint64),
        ("text", ctypes.c_char * 2048),
    ]  # fmt: skip


@dataclass
class _Array:
    """Memory of an argument, between guard pages."""

    name: str
    address: int
    base: int
    whole: int
    values: NDArray[np.generic]
    first: NDArray[np.generic]
    written: bool


class _Program:
    """Compiled source with an entry point of its kernel."""

    def __init__(self, kernel: FusedKernel) -> None:
        self.kernel = kernel
        header = files(__package__).joinpath("slip_emulator.h").read_text(encoding="utf-8")
        source = kernel.source.replace('#include "slip_emulator.h"', header)
        self.library = load(source + _ENTRY.format(kernel=kernel.name), _FLAGS)
        self.library.slip_buffer.restype = ctypes.c_void_p
        self.library.slip_release.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def kinds(self) -> list[_Kind]:
        kinds = (_Kind * 64)()
        return list(kinds[: self.library.slip_describe(kinds)])

    def run(
        self, arguments: Sequence[ctypes.c_void_p], settings: _Settings
    ) -> tuple[str, int, bool]:
        """Return the failure, its address, and whether float atomics were used."""
        report = _Report()
        pointers = (ctypes.c_void_p * len(arguments))(*arguments)
        self.library.slip_run(pointers, ctypes.byref(settings), ctypes.byref(report))
        text = report.text.decode(errors="replace")
        if report.failed == 2:
            text = f"it did not finish within {_LIMIT_S:.0f} s"
        elif report.failed == 3:
            text = "a signal terminated it"
        return text if report.failed else "", report.address, bool(report.float_atomics)


class _Arguments:
    """Arguments of a kernel: scalars, and arrays that can be reset."""

    def __init__(self, launch: Launch, program: _Program, seed: int) -> None:
        names = parameter_names(program.kernel.parts[0].kernel)
        self._release: Callable[[int, int], None] = program.library.slip_release
        unknown = set(launch.values) - set(names)
        if unknown:
            raise EmulatorError(
                f"{launch.kernel} has no argument '{min(unknown)}'",
                remedy=f"it has {', '.join(names)}",
            )
        rng = np.random.default_rng(seed)
        self.arrays: list[_Array] = []
        self.pointers: list[ctypes.c_void_p] = []
        self._held: list[object] = []
        for name, kind in zip(names, program.kinds(), strict=True):
            self._add(program, name, kind, launch.values.get(name, ""), rng, launch)

    def _add(
        self, program: _Program, name: str, kind: _Kind, value: str, rng: np.random.Generator,
        launch: Launch,
    ) -> None:  # fmt: skip
        dtype = _dtype(kind)
        if dtype is None or (kind.lanes > 1 and not kind.pointer):
            raise EmulatorError(
                f"the emulator cannot create argument '{name}' of {launch.kernel}: it is neither a "
                "number nor an array of numbers",
                where=str(launch.path), remedy="pass its fields, or skip the check: --no-check"
            )  # fmt: skip
        if not kind.pointer:
            number = np.zeros(1, dtype)
            try:
                number[0] = dtype.type(value or (0.5 if kind.floating else _SCALAR))
            except (ValueError, OverflowError):
                raise EmulatorError(f"{name}={value} of {launch.kernel} is not {dtype}") from None
            self._held.append(number)
            self.pointers.append(ctypes.c_void_p(number.ctypes.data))
            return
        match = re.fullmatch(r"(\d+)(?:<(\d+))?", value or str(_ELEMENTS))
        if match is None or not int(match[1]):
            raise EmulatorError(
                f"{name}={value} of {launch.kernel} is not a number of elements",
                remedy=f"for example {name}=4096, or {name}=4096<64 for integers below 64",
            )
        count, below = int(match[1]) * kind.lanes, int(match[2] or _BELOW)
        base, whole = ctypes.c_void_p(), ctypes.c_int64()
        bytes_ = count * dtype.itemsize
        at = program.library.slip_buffer(
            ctypes.c_int64(bytes_), ctypes.byref(base), ctypes.byref(whole)
        )
        raw = (ctypes.c_ubyte * bytes_).from_address(at)
        values = np.frombuffer(raw, dtype)
        values[:] = (
            rng.random(count) if kind.floating else rng.integers(0, below, count)
        ).astype(dtype)  # fmt: skip
        array = _Array(name, at, base.value or 0, whole.value, values, values.copy(),
                       not kind.constant)  # fmt: skip
        self.arrays.append(array)
        pointer = ctypes.c_void_p(at)
        self._held.append(pointer)
        self.pointers.append(ctypes.c_void_p(ctypes.addressof(pointer)))

    def reset(self) -> None:
        """Restore the initial values of all arrays."""
        for array in self.arrays:
            array.values[:] = array.first

    def nearest(self, address: int) -> str:
        """Describe the array that is nearest to an address out of bounds."""
        if not address or not self.arrays:
            return ""
        array = min(self.arrays, key=lambda a: min(
            abs(address - a.address), abs(address - a.address - a.values.nbytes)))  # fmt: skip
        place = (address - array.address) // array.values.itemsize
        if abs(place) > 1 << 24:
            return ""
        return f": element {place} of '{array.name}', which has {len(array.values)}"

    def close(self) -> None:
        """Free the memory of all arrays."""
        for array in self.arrays:
            self._release(array.base, array.whole)
        self.arrays.clear()


def _dtype(kind: _Kind) -> np.dtype[np.generic] | None:
    if not kind.arithmetic:
        return None
    letter = "f" if kind.floating else "i" if kind.signed else "u"
    return np.dtype(f"{letter}{kind.bytes}") if kind.bytes in (1, 2, 4, 8) else None


@contextmanager
def _arguments(
    launches: Sequence[Launch], programs: Sequence[_Program]
) -> Iterator[list[_Arguments]]:
    arguments: list[_Arguments] = []
    try:
        for number, (launch, program) in enumerate(zip(launches, programs, strict=True)):
            arguments.append(_Arguments(launch, program, number))
        yield arguments
    finally:
        for kernel_arguments in arguments:
            kernel_arguments.close()


def _settings(grid: Sequence[int], block: Sequence[int], starts: Sequence[int]) -> _Settings:
    settings = _Settings(parts=len(starts), limit_s=_LIMIT_S)
    settings.grid[:], settings.block[:] = list(grid), list(block)
    settings.starts[: len(starts)] = list(starts)
    return settings


def emulate(
    fused: FusedKernel,
    *,
    schedules: Sequence[int] = SCHEDULES,
    report: Callable[[str], None] = lambda line: None,
) -> EmulationResult:
    """Run the kernels of `fused` sequentially and fused, and compare their memory.

    Args:
        schedules: orders of threads to try, of `SCHEDULES`.

    Raises:
        EmulatorError: a kernel alone fails, or an argument is unknown.
        CompileError: there is no C++ compiler, or compilation fails.
    """
    launches = [part.launch for part in fused.parts]
    for part in fused.parts:
        if part.kernel.tokens and Rewriter(part).template_parameters:
            raise EmulatorError(
                f"{part.kernel.name} is a template and needs arguments to run",
                where=part.kernel.tokens[0].where,
                remedy=f"for example {part.launch.path}:{part.kernel.name}<float>:block=256",
            )
    report("compiling")
    programs = [_Program(alone(launch)) for launch in launches]
    together = _Program(fused)
    trouble, max_differing, has_atomics = "", 0, False
    with _arguments(launches, programs) as arguments:
        expected = []
        for launch, program, args in zip(launches, programs, arguments, strict=True):
            report(f"running {launch.kernel} alone")
            settings = _settings(launch.grid, launch.block, [0])
            trouble, address, used = program.run(args.pointers, settings)
            if trouble:
                raise EmulatorError(
                    f"{launch.kernel} alone fails in the emulator: {trouble}"
                    f"{args.nearest(address)}",
                    where=str(launch.path),
                    remedy="pass a launch that it supports: "
                    f"{launch.kernel}:block=...,grid=...,ARGUMENT=NUMBER",
                )
            has_atomics |= used
            expected.append([array.values.copy() for array in args.arrays])
        grids = [(ctypes.c_uint * 3)(*launch.grid) for launch in launches]
        pointers = [pointer for args in arguments for pointer in args.pointers]
        pointers += [ctypes.c_void_p(ctypes.addressof(grid)) for grid in grids]
        blocks = max(int(np.prod(launch.grid)) for launch in launches)
        for count, schedule in enumerate(schedules):
            report(f"order {count + 1} of {len(schedules)}")
            for args in arguments:
                args.reset()
            settings = _settings(
                (blocks, 1, 1), (fused.threads, 1, 1), [part.start for part in fused.parts]
            )
            settings.schedule = schedule
            trouble, address, _ = together.run(pointers, settings)
            if trouble:
                trouble += "".join(args.nearest(address) for args in arguments[:1] if address)
                break
            mismatches = [
                differing(array.values, right, has_atomics)
                for args, rights in zip(arguments, expected, strict=True)
                for array, right in zip(args.arrays, rights, strict=True)
            ]
            max_differing = max(max_differing, sum(mismatches))
        compared = sum(array.values.nbytes for args in arguments for array in args.arrays)
    return EmulationResult(len(schedules), compared, max_differing, trouble, has_atomics)
