"""Choice of the fastest kernel for a shape, by rule or by measurement.

The rule was measured on processors of each level; comments in `preferred` give the reasons. Results
of `slipstream.techniques.lowbit.autotune` on this machine take precedence.
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

# Up to this number of rows, a product is bound by reading the weights from memory.
FEW_ROWS = 8


@dataclass(frozen=True)
class Shape:
    """Shape of a product of activations [rows, k] and weights [n, k].

    Attributes:
        rows: number of rows in a typical call; None for many.
    """

    rows: int | None
    n: int
    k: int
    weight_bits: int
    activation_bits: int


def choose(shape: Shape, *, scheme: str = "auto", level: str = "auto") -> Kernel:
    """Choose the kernel for a shape.

    Args:
        scheme: name of a scheme; ``"auto"`` for the result of `autotune` for this shape, or else
            of the rule.
        level: an instruction set, or ``"auto"`` for the best of this processor.

    Raises:
        UnknownNameError: there is no such scheme or level.
        InvalidArgumentError: `scheme` does not support these widths at this level.
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
    supported = candidates(shape, allowed)
    for name in names:
        if name in supported:
            return supported[name]
    raise InvalidArgumentError(
        "scheme",
        f"'{scheme}' does not support {shape.weight_bits}-bit weights with "
        f"{shape.activation_bits}-bit activations at level '{allowed[0]}'",
        remedy="use one of: " + ", ".join(sorted(supported)),
    )


def candidates(shape: Shape, allowed: Sequence[InstructionSet]) -> dict[str, Kernel]:
    """Return the kernel for the best allowed level, by scheme that supports these widths."""
    supported: dict[str, Kernel] = {}
    for level in allowed:
        for kernel in kernels():
            if kernel.level is level and kernel.supports(shape.weight_bits, shape.activation_bits):
                supported.setdefault(kernel.scheme, kernel)
    return supported


def preferred(shape: Shape, level: InstructionSet) -> list[str]:
    """Return schemes in the order of the rule for `level`; the last supports all widths."""
    w, a = shape.weight_bits, shape.activation_bits
    if shape.rows is not None and shape.rows <= FEW_ROWS:
        # Only the bytes of the weights matter, and dense weights take the fewest.
        return ["dense"]
    schemes: list[str] = []
    # Tiles are untested on a processor that has them, so they need an explicit scheme or autotune.
    if level in (InstructionSet.AVX512, InstructionSet.AMX):
        # As many population counts or permutes per cycle as products of 64 bytes.
        if w * a <= 2 or w == a == 2:
            schemes = ["bit_serial"]
        elif w == 1:
            schemes = ["word_table"] if a > 6 else ["byte_table"]
    elif level in (InstructionSet.AVX512VNNI, InstructionSet.AVXVNNI):
        # Dot products match tables from 5 bits, and are faster for 2-bit weights.
        if w == a == 1 and shape.k >= 1024 and level is InstructionSet.AVX512VNNI:
            schemes = ["bit_serial"]
        elif w == 1 and a <= 4:
            schemes = ["byte_table"]
    elif level is InstructionSet.AVX512BW:
        # Without population count, full adders count bits, which needs long sums; a word permute
        # is two micro-operations here, and never faster.
        if w == a == 1 and shape.k >= 1024:
            schemes = ["bit_serial"]
        elif (w == 1 and a <= 6) or (w == 2 and a <= 3):
            schemes = ["byte_table"]
    elif level is InstructionSet.AVX2:
        if w == 1 and a <= 6:
            schemes = ["byte_table"]
    elif level is InstructionSet.NEON:
        # Without a dot product, packing two products into one multiplication is fastest.
        schemes = ["bit_serial"] if w * a <= 2 else ["ulppack"]
    elif level is InstructionSet.NEON_DOTPROD:
        if w * a <= 2:
            schemes = ["bit_serial"]
    elif w == a == 1:
        schemes = ["bit_serial"]
    elif w + a <= 10:
        schemes = ["ulppack"]
    return [*schemes, "dense"]


def table() -> list[tuple[str, str]]:
    """Return the rule for this processor as rows of widths, and their scheme and level."""
    allowed = cpu_features().levels
    by_kernel: dict[str, list[str]] = {}
    for w in range(1, 8):
        for a in range(1, 9):
            shape = Shape(None, 512, 512, w, a)
            supported = candidates(shape, allowed)
            kernel = next(
                (supported[n] for n in preferred(shape, allowed[0]) if n in supported), None
            )
            name = "PyTorch" if kernel is None else f"{kernel.scheme} on {kernel.level}"
            by_kernel.setdefault(name, []).append(f"W{w}A{a}")
    commonest = max(by_kernel, key=lambda name: len(by_kernel[name]))
    rows = [(", ".join(pairs), name) for name, pairs in by_kernel.items() if name != commonest]
    return [*rows, ("all others" if rows else "all widths", commonest)]


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
    """Return the key under which a shape's winner is stored."""
    rows = shape.rows or 256
    # Rounded up to a power of two, so that similar shapes share a winner.
    rounded = 1 << (rows - 1).bit_length()
    return (str(allowed[0]), rounded, shape.n, shape.k, shape.weight_bits, shape.activation_bits)


def winners_path() -> Path:
    """Return the database of winners, in the folder of operator timings."""
    from slipstream.durations.durations import cache_folder

    return cache_folder() / "lowbit.db"


def machine() -> str:
    """Return the key of this processor and set of kernels."""
    from slipstream.durations.durations import machine_key

    return f"{machine_key()}-{len(kernels())}"


@functools.cache
def winners() -> dict[Key, str]:
    """Return the stored winners for this machine and these kernels."""
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
        # The rule applies instead; `autotune` warns that it cannot store results.
        return {}
    return {tuple(row[:6]): row[6] for row in rows}


def _allowed(level: str) -> Sequence[InstructionSet]:
    if level == "auto":
        return cpu_features().levels
    if level not in list(InstructionSet):
        raise UnknownNameError("instruction set", level, ["auto", *InstructionSet])
    return [InstructionSet(level)]
