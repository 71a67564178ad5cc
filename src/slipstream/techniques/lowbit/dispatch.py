"""Which kernel multiplies a given shape fastest: by rule, or by trying.

The rule is what was measured on processors of each level; its reasons are in the comments of
`preferred`. What `slipstream.techniques.lowbit.autotune` found on this machine goes before it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import InvalidArgumentError, StoreError, UnknownNameError
from slipstream.native import InstructionSet, cpu_features
from slipstream.sqlite import errors_in_words, open_database
from slipstream.techniques.lowbit.bindings import Kernel, kernels

# Up to this many rows the weights' way from memory is what takes the time.
FEW_ROWS = 8


@dataclass(frozen=True)
class Shape:
    """A product whose kernel is to be chosen: activations [rows, k] by weights [n, k].

    Attributes:
        rows: in a typical call; None for many.
    """

    rows: int | None
    n: int
    k: int
    weight_bits: int
    activation_bits: int


def choose(shape: Shape, *, scheme: str = "auto", level: str = "auto") -> Kernel:
    """The kernel to take.

    Args:
        scheme: a scheme's name; ``"auto"`` for the one `autotune` found for this shape, or else
            the rule's.
        level: an instruction set, or ``"auto"`` for the best this processor has.

    Raises:
        UnknownNameError: there is no such scheme or level.
        InvalidArgumentError: `scheme` does not multiply these widths at this level.
    """
    allowed = _allowed(level)
    schemes = {kernel.scheme for kernel in kernels()}
    if scheme != "auto" and scheme not in schemes:
        raise UnknownNameError("scheme", scheme, ["auto", *schemes])
    if scheme != "auto":
        names = [scheme]
    elif tuned := winners().get(shape_key(shape, allowed)):
        names = [tuned]
    else:
        names = preferred(shape, allowed[0])
    able = candidates(shape, allowed)
    for name in names:
        if name in able:
            return able[name]
    raise InvalidArgumentError(
        "scheme",
        f"'{scheme}' does not multiply {shape.weight_bits}-bit weights by "
        f"{shape.activation_bits}-bit activations at level '{allowed[0]}'",
        remedy="here these do: " + ", ".join(sorted(able)),
    )


def candidates(shape: Shape, allowed: Sequence[InstructionSet]) -> dict[str, Kernel]:
    """Of each scheme that multiplies these widths, the kernel for the best allowed level."""
    able: dict[str, Kernel] = {}
    for level in allowed:
        for kernel in kernels():
            if kernel.level is level and kernel.supports(shape.weight_bits, shape.activation_bits):
                able.setdefault(kernel.scheme, kernel)
    return able


def preferred(shape: Shape, level: InstructionSet) -> list[str]:
    """Schemes in the order the rule for `level` wants them; the last multiplies everything."""
    w, a = shape.weight_bits, shape.activation_bits
    if shape.rows is not None and shape.rows <= FEW_ROWS:
        # Nothing but the bytes of the weights counts, and dense weights are fewest.
        return ["dense"]
    wanted: list[str] = []
    # Tiles have not run on their own processor yet: they are for who asks for them, or tries.
    if level in (InstructionSet.AVX512, InstructionSet.AMX):
        # As many population counts or permutes in a cycle as products of 64 bytes.
        if w * a <= 2 or w == a == 2:
            wanted = ["bit_serial"]
        elif w == 1:
            wanted = ["word_table"] if a > 6 else ["byte_table"]
    elif level in (InstructionSet.AVX512VNNI, InstructionSet.AVXVNNI):
        # Dot products are as fast as tables from 5 bits on, and faster for weights of 2.
        if w == a == 1 and shape.k >= 1024 and level is InstructionSet.AVX512VNNI:
            wanted = ["bit_serial"]
        elif w == 1 and a <= 4:
            wanted = ["byte_table"]
    elif level is InstructionSet.AVX512BW:
        # Without a population count ones are counted by full adders, which need long sums; word
        # permutes are two instructions in one here, and never pay.
        if w == a == 1 and shape.k >= 1024:
            wanted = ["bit_serial"]
        elif (w == 1 and a <= 6) or (w == 2 and a <= 3):
            wanted = ["byte_table"]
    elif level is InstructionSet.AVX2:
        if w == 1 and a <= 6:
            wanted = ["byte_table"]
    elif level is InstructionSet.NEON:
        # No dot product: packing two products into one multiplication is the fastest way.
        wanted = ["bit_serial"] if w * a <= 2 else ["ulppack"]
    elif level is InstructionSet.NEON_DOTPROD:
        if w * a <= 2:
            wanted = ["bit_serial"]
    elif w == a == 1:
        wanted = ["bit_serial"]
    elif w + a <= 10:
        wanted = ["ulppack"]
    return [*wanted, "dense"]


def table() -> list[tuple[str, str]]:
    """The rule for this processor in words: pairs of widths, and the scheme and level they get."""
    allowed = cpu_features().levels
    by_kernel: dict[str, list[str]] = {}
    for w in range(1, 8):
        for a in range(1, 9):
            shape = Shape(None, 512, 512, w, a)
            able = candidates(shape, allowed)
            kernel = next((able[n] for n in preferred(shape, allowed[0]) if n in able), None)
            name = "PyTorch" if kernel is None else f"{kernel.scheme} on {kernel.level}"
            by_kernel.setdefault(name, []).append(f"W{w}A{a}")
    most = max(by_kernel, key=lambda name: len(by_kernel[name]))
    rows = [(", ".join(pairs), name) for name, pairs in by_kernel.items() if name != most]
    return [*rows, ("all others" if rows else "all widths", most)]


Key = tuple[str, int, int, int, int, int]

MIGRATIONS = (
    """
    CREATE TABLE winner (
        machine TEXT NOT NULL, level TEXT NOT NULL, rows INTEGER NOT NULL, n INTEGER NOT NULL,
        k INTEGER NOT NULL, weight_bits INTEGER NOT NULL, activation_bits INTEGER NOT NULL,
        scheme TEXT NOT NULL,
        PRIMARY KEY (machine, level, rows, n, k, weight_bits, activation_bits)
    );
    """,
)


def shape_key(shape: Shape, allowed: Sequence[InstructionSet]) -> Key:
    """Under what a shape's winner is kept."""
    rows = shape.rows or 256
    # What is true of 200 rows is true of 256: to the next power of two.
    rounded = 1 << (rows - 1).bit_length()
    return (str(allowed[0]), rounded, shape.n, shape.k, shape.weight_bits, shape.activation_bits)


def winners_path() -> Path:
    """The file in which winners are kept, beside the timings of operators."""
    from slipstream.durations.durations import cache_folder

    return cache_folder() / "lowbit.db"


def machine() -> str:
    """The processor and build that winners are of."""
    from slipstream.durations.durations import machine_key

    return f"{machine_key()}-{len(kernels())}"


@functools.cache
def winners() -> dict[Key, str]:
    """What was found before, on this machine and with these kernels."""
    path = winners_path()
    try:
        if not path.is_file():
            return {}
        with errors_in_words(path):
            connection = open_database(path, MIGRATIONS)
            try:
                rows = connection.execute(
                    "SELECT level, rows, n, k, weight_bits, activation_bits, scheme "
                    "FROM winner WHERE machine = ?",
                    (machine(),),
                ).fetchall()
            finally:
                connection.close()
    except (OSError, StoreError):
        # A choice by rule serves as well; `autotune` says that nothing can be kept.
        return {}
    return {tuple(row[:6]): row[6] for row in rows}


def _allowed(level: str) -> Sequence[InstructionSet]:
    if level == "auto":
        return cpu_features().levels
    if level not in list(InstructionSet):
        raise UnknownNameError("instruction set", level, ["auto", *InstructionSet])
    return [InstructionSet(level)]
