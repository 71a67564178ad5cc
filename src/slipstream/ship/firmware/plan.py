"""Encode a program's plan as words that the interpreter reads from a model's metadata.

Each step stores its kernel, offsets in the arena, and its struct. Tables that the file already
holds, as most weights, are referenced there; those it lacks (rescaling, biases with zero points
folded in, weights with rows padded to multiples of four) follow the steps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.firmware.arena import Arena
from slipstream.ship.firmware.interface import interface_of
from slipstream.ship.firmware.program import KernelCall, Program
from slipstream.ship.firmware.writer import write_network

NAME = "slipstream.plan"
KERNELS = (
    "slip_conv_2d", "slip_conv_plain", "slip_depthwise_2d", "slip_depthwise_any",
    "slip_average_pool", "slip_max_pool", "slip_add_int8", "slip_softmax_int8",
)  # fmt: skip
"""Kernels in the order of kernels/interpreter.h."""

# Formats of the numbers in structs of kernels/slip_micro.h, which follow the tables.
_FORMATS = {
    "slip_conv": "7H8B4bBx", "slip_depthwise": "6H8B4bB3x", "slip_pool": "5H6B2b",
    "slip_add": "12i", "slip_softmax": "5i", "slip_lookup": "i", "slip_mul": "9i",
    "slip_concat": "3i", "slip_mean": "6i", "slip_transpose": "6H6B4b2x", "slip_repeat": "5i",
}  # fmt: skip
_TABLES = ("weights", "bias", "rescale")
_MAGIC, _STEP_WORDS, _ALIGN = b"SLP1", 16, 16


def struct_bytes(kind: str) -> int:
    """Return bytes of a struct with 32-bit pointers."""
    tables = {
        "slip_conv": len(_TABLES),
        "slip_depthwise": len(_TABLES),
        "slip_lookup": 1,
        "slip_transpose": len(_TABLES),
    }
    return 4 * tables.get(kind, 0) + struct.calcsize("<" + _FORMATS[kind])


def model_with_plan(program: Program, arena: Arena, *, vectors: bool) -> bytes:
    """Return the model as a ``.tflite`` file whose metadata holds the plan of its program.

    Args:
        vectors: as for `lower`.

    Raises:
        UnsupportedModelError: a step calls a kernel that only straight-line C supports.
    """
    unsupported = sorted({step.kernel for step in program.steps} - set(KERNELS))
    if unsupported:
        raise UnsupportedModelError(
            f"the interpreter does not support {', '.join(unsupported)}",
            where=f"model '{program.network.name}'",
            remedy="pass --backend straight",
        )
    missing = dict.fromkeys(missing_tables(program), 0)
    size = 4 * (6 + _STEP_WORDS * len(program.steps))
    size += 8 * (len(program.network.inputs) + len(program.network.outputs))
    for table in missing:
        missing[table] = size = -(-size // 4) * 4
        size += len(table)
    # Offsets in the file are fixed once the plan has its size.
    blank = _MAGIC + bytes(size - len(_MAGIC))
    model = bytearray(write_network(program.network, {NAME: blank}) + bytes(_room(program)))
    start = model.index(blank)
    before, after = bytes(model[:start]), bytes(model[start + size :])
    places = {table: start + offset for table, offset in missing.items()}
    for table, read in (pair for step in program.steps for pair in _tables(step)):
        if table not in places:
            at = _place(after, read, len(table))
            places[table] = start + size + at if at >= 0 else _place(before, read, len(table))
    model[start : start + size] = _packed(program, arena, vectors, places, missing, size)
    return bytes(model)


def missing_tables(program: Program) -> list[bytes]:
    """Return the tables of a program that its model's file does not hold, without duplicates."""
    file = write_network(program.network) + bytes(_room(program))
    tables = {table: read for step in program.steps for table, read in _tables(step)}
    return [table for table, read in tables.items() if _place(file, read, len(table)) < 0]


def _room(program: Program) -> int:
    """Return bytes to append to a file, so that the last group of channels can be read."""
    return max(
        (len(table) - len(read) for step in program.steps for table, read in _tables(step)),
        default=0,
    )


def _tables(step: KernelCall) -> list[tuple[bytes, bytes]]:
    """Return each table, and the part of it whose values matter.

    Padding channels of a group of four read weights too, but their outputs are never written, so
    any bytes of the file will do.
    """
    tables = []
    for name, table in step.tables.items():
        content = np.ascontiguousarray(table).tobytes()
        filled = name == "weights" and step.kernel == "slip_conv_plain"
        count = step.numbers["out_c"] * step.numbers["depth"] if filled else len(content)
        tables.append((content, content[:count]))
    return tables


def _place(file: bytes, table: bytes, size: int) -> int:
    """Return the word-aligned offset of a table with `size` bytes after it; -1 if there is none."""
    at = file.find(table)
    while at >= 0 and (at % 4 or at + size > len(file)):
        at = file.find(table, at + 1)
    return at


def _packed(
    program: Program, arena: Arena, vectors: bool, places: Mapping[bytes, int],
    missing: Mapping[bytes, int], size: int,
) -> bytes:  # fmt: skip
    interface = interface_of(program.network, arena)
    words = _MAGIC + struct.pack(
        "<5I", vectors, arena.size, len(program.steps), len(interface.inputs),
        len(interface.outputs),
    )  # fmt: skip
    for number, step in enumerate(program.steps):
        at = [arena.tensors[index] for index in step.inputs]
        other = at[1] if len(at) > 1 else arena.scratch.get(number, 0)
        numbers = list(step.numbers.values())
        fields = struct.pack(
            "<4I", KERNELS.index(step.kernel), at[0], other, arena.tensors[step.output]
        )
        fields += b"".join(struct.pack("<I", places[table]) for table, _ in _tables(step))
        fields += struct.pack("<" + _FORMATS[step.struct], *numbers)
        words += fields.ljust(4 * _STEP_WORDS, b"\0")
    for port in (*interface.inputs, *interface.outputs):
        words += struct.pack("<2I", port.offset, port.nbytes)
    image = bytearray(words.ljust(size, b"\0"))
    for table, offset in missing.items():
        image[offset : offset + len(table)] = table
    return bytes(image)
