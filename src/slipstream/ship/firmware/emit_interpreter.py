"""Emit a program as a model in flash and an interpreter that reads it.

The model can be replaced without recompiling, as long as it calls the same kernels.
"""

from __future__ import annotations

import numpy as np

from slipstream.ship.firmware.arena import Arena
from slipstream.ship.firmware.emit_c import header, kernel_files, rows
from slipstream.ship.firmware.interface import interface_of
from slipstream.ship.firmware.plan import KERNELS
from slipstream.ship.firmware.program import Program

# Arguments of kernels after the struct, in terms of kernels/interpreter.h.
_ARGUMENTS = {
    "slip_conv": "in, out, other", "slip_depthwise": "in, out, other", "slip_add": "in, other, out",
}  # fmt: skip


def emit_interpreter(program: Program, arena: Arena, model: bytes) -> dict[str, str]:
    """Return files by name: ``model.h``, ``model.c``, the interpreter, and the called kernels.

    Args:
        model: result of `planned_model`.
    """
    interface = interface_of(program.network, arena)
    name = interface.name
    declared = (
        '#include "interpreter.h"',
        "", "/* The .tflite with its plan. */", f"extern const uint8_t {name}_model[{len(model)}];",
        "", "/* Checks the model; call it once. */", f"slip_status {name}_open(void);",
        "", "/* Reads the inputs at their offsets in the arena, writes the outputs at theirs. */",
        f"slip_status {name}_invoke(void *arena);",
    )  # fmt: skip
    return {
        "model.h": header(program, interface, declared),
        "model.c": _source(program, name, model),
    } | kernel_files(program, ("interpreter.c", "interpreter.h"))


def _source(program: Program, name: str, model: bytes) -> str:
    lines = ['#include "model.h"', ""]
    called = {step.kernel: step.struct for step in program.steps}
    for kernel, kind in called.items():
        arguments = _ARGUMENTS.get(kind, "in, out")
        lines.append(
            f"static void call_{kernel}(const void *op, int8_t *in, int8_t *other, int8_t *out) {{"
        )
        if "other" not in arguments:
            lines.append("  (void)other;")
        lines += [f"  {kernel}(op, {arguments});", "}", ""]
    table = ", ".join(f"[{KERNELS.index(kernel)}] = call_{kernel}" for kernel in called)
    return "\n".join(
        [
            *lines, f"static const slip_kernel kernels[SLIP_KERNELS] = {{{table}}};", "",
            f"__attribute__((aligned(16))) const uint8_t {name}_model[{len(model)}] = {{",
            *rows(np.frombuffer(model, np.uint8)), "};", "",
            "static slip_model opened;", "",
            f"slip_status {name}_open(void) {{",
            f"  return slip_open(&opened, {name}_model, sizeof {name}_model, kernels);", "}", "",
            f"slip_status {name}_invoke(void *arena) {{",
            f"  slip_status status = opened.steps ? SLIP_OK : {name}_open();",
            f"  return status ? status : slip_invoke(&opened, arena, {name.upper()}_ARENA_BYTES);",
            "}", "",
        ]
    )  # fmt: skip
