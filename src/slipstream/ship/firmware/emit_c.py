"""Emit a program as straight-line C: a sequence of calls, with every constant in flash.

Shapes, multipliers and offsets, which an interpreter computes at startup, are constants here; the
arena is the only memory used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files

import numpy as np

from slipstream.ship.firmware.arena import Arena
from slipstream.ship.firmware.interface import Interface, interface_of
from slipstream.ship.firmware.network import Array
from slipstream.ship.firmware.program import KernelCall, Program

_PER_LINE = 24
_HOOK = (
    "/* Called before each step and after the last; define it to profile steps. */",
    "#ifndef SLIP_STEP", "#define SLIP_STEP(number)", "#endif",
)  # fmt: skip


def emit(program: Program, arena: Arena) -> dict[str, str]:
    """Return files by name: ``model.h``, ``model.c``, and those of the called kernels."""
    interface = interface_of(program.network, arena)
    invoke = (
        "/* Reads the inputs at their offsets in the arena, writes the outputs at theirs. */",
        f"void {interface.name}_invoke(void *arena);",
    )
    sources = {
        "model.h": header(program, interface, invoke),
        "model.c": _source(program, arena, interface.name),
    }
    return sources | kernel_files(program)


def kernel_files(program: Program, others: Sequence[str] = ()) -> dict[str, str]:
    """Return files of the called kernels, and `others`, by name."""
    folder = files("slipstream.ship.firmware") / "kernels"
    names = {"slip_micro.h", *others, *(name for step in program.steps for name in step.sources)}
    return {name: (folder / name).read_text("utf-8") for name in sorted(names)}


def header(program: Program, interface: Interface, declared: Sequence[str]) -> str:
    """Return ``model.h``: sizes, offsets of inputs and outputs, and declarations."""
    name = interface.name
    lines = [
        f"/* {program.network.name}: {len(program.steps)} steps, {program.macs} MACs. */",
        f"#ifndef SLIP_MODEL_{name.upper()}_H", f"#define SLIP_MODEL_{name.upper()}_H", "",
        "#include <stdint.h>", "",
        "/* Bytes of an inference, aligned to 16. They are free between inferences. */",
        f"#define {name.upper()}_ARENA_BYTES {interface.arena_bytes}",
        f"#define {name.upper()}_STEPS {len(program.steps)}", "",
    ]  # fmt: skip
    for kind, ports in (("INPUT", interface.inputs), ("OUTPUT", interface.outputs)):
        lines.append(f"#define {name.upper()}_{kind}S {len(ports)}")
        for number, port in enumerate(ports):
            prefix = f"{name.upper()}_{kind}_{number}"
            lines += [
                f"/* int8{list(port.shape)}: {port.scale:.9g} * (code - {port.zero_point}) */",
                f"#define {prefix}_OFFSET {port.offset}", f"#define {prefix}_BYTES {port.nbytes}",
            ]  # fmt: skip
        lines.append("")
    return "\n".join([*lines, *declared, "", "#endif", ""])


def _source(program: Program, arena: Arena, name: str) -> str:
    lines = ['#include "model.h"', '#include "slip_micro.h"', "", *_HOOK, ""]
    lines += [
        "/* Each call is a separate function that ends in a jump, so that the stack does not",
        " * grow with the model. */",
    ]  # fmt: skip
    for number, step in enumerate(program.steps):
        lines += [
            *_constants(number, step),
            f"static __attribute__((noinline)) void call_{number}(int8_t *at) {{",
            f"  {_call(number, step, arena)}", "}", "",
        ]  # fmt: skip
    lines += [f"void {name}_invoke(void *arena) {{"]
    lines += [
        f"  SLIP_STEP({number}) call_{number}(arena);" for number in range(len(program.steps))
    ]
    return "\n".join([*lines, f"  SLIP_STEP({len(program.steps)})", "}", ""])


def _constants(number: int, step: KernelCall) -> Iterator[str]:
    for field, values in step.tables.items():
        kind = "int8_t" if values.dtype == np.int8 else "int32_t"
        array = f"{field}_{number}[{values.size}]"
        yield f"static const {kind} {array} __attribute__((aligned(4))) = {{"
        yield from rows(values)
        yield "};"
    fields = [f".{field} = {field}_{number}" for field in step.tables]
    fields += [f".{field} = {value}" for field, value in step.numbers.items()]
    yield f"static const {step.struct} step_{number} = {{"
    yield "  " + ", ".join(fields)
    yield "};"


def rows(values: Array) -> Iterator[str]:
    """Yield numbers as lines of C."""
    flat = [str(value) if value != -(2**31) else "INT32_MIN" for value in values.tolist()]
    for start in range(0, len(flat), _PER_LINE):
        yield "  " + ",".join(flat[start : start + _PER_LINE]) + ","


def _call(number: int, step: KernelCall, arena: Arena) -> str:
    arguments = [f"&step_{number}"]
    arguments += [f"at + {arena.tensors[index]}" for index in (*step.inputs, step.output)]
    if step.struct in ("slip_conv", "slip_depthwise"):
        arguments.append(f"at + {arena.scratch[number]}" if number in arena.scratch else "0")
    return f"{step.kernel}({', '.join(arguments)});"
