"""Launches of kernels to fuse, parsed from a line, and results of a check.

CUDA C++ is in `cuda`, Triton in `triton`; both take launches and return these results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError, UsageError

Extent = tuple[int, int, int]
_LAUNCH = re.compile(
    r"(?P<path>.+?\.\w+):(?P<kernel>[A-Za-z_]\w*)(?:<(?P<template>.*)>)?(?::(?P<settings>[^<>].*))?"
)
_EXTENT = re.compile(r"\d+(x\d+){0,2}")
_BLOCK, _GRID = (256, 1, 1), (4, 1, 1)
_ATOMICS_TOLERANCE = 1e-6
SYNTAX = "file.cu:kernel<TEMPLATE,...>:block=XxYxZ,grid=XxYxZ,shared=BYTES,ARGUMENT=VALUE,..."
PYTHON_SYNTAX = "file.py:kernel:grid=XxYxZ,num_warps=N,ARGUMENT=VALUE,..."


class KernelSourceError(SlipstreamError):
    """A kernel's source cannot be read or fused; `where` is file:line."""


class EmulatorError(UsageError):
    """A kernel cannot be emulated: an argument is unknown, or it accesses memory out of bounds."""


@dataclass(frozen=True)
class Launch:
    """A kernel of a file and its launch configuration.

    Attributes:
        path: source file.
        kernel: name of the kernel.
        template: template arguments, as written between ``<>``.
        block, grid: threads of a block and blocks, as x, y, z. Triton kernels only have a grid.
        shared: bytes of dynamic shared memory.
        values: arguments for the check, by name: a number, or the number of elements of a pointer,
            for indices with an upper bound: ``1000<64``. Triton pointers include the type:
            ``1000xi32<64``.
    """

    path: Path
    kernel: str
    template: str = ""
    block: Extent = _BLOCK
    grid: Extent = _GRID
    shared: int = 0
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return math.prod(self.block)

    @property
    def python(self) -> bool:
        """Whether it is a Triton kernel in a Python file."""
        return self.path.suffix == ".py"


@dataclass(frozen=True)
class EmulationResult:
    """Result of a check.

    Attributes:
        schedules: number of execution orders tried.
        compared: bytes compared per order.
        differing: maximum number of differing bytes of any order.
        trouble: failure of the fused kernel, such as a deadlocked barrier with its line; empty if
            there was none.
        float_atomics: whether sums depend on the order; they are compared to 1e-6.
        ordered: unit of the order: threads, or programs.
    """

    schedules: int
    compared: int
    differing: int
    trouble: str
    float_atomics: bool
    ordered: str = "threads"

    @property
    def equal(self) -> bool:
        """Whether the fused kernel gives the same result as its kernels run sequentially."""
        return not self.differing and not self.trouble

    def __str__(self) -> str:
        if self.trouble:
            return f"the fused kernel fails: {self.trouble}"
        orders = f"{self.schedules} orders of {self.ordered}"
        if self.differing:
            return f"{self.differing:,} of {self.compared:,} bytes differ, in {orders}"
        how = "equal to 1e-6 (float atomics)" if self.float_atomics else "equal byte by byte"
        return f"{self.compared:,} bytes {how}, in {orders}"


def parse_launch(text: str) -> Launch:
    """Parse a launch.

    Raises:
        UsageError: `text` does not have the syntax that the message shows.
    """
    match = _LAUNCH.fullmatch(text)
    if match is None:
        raise UsageError(
            f"'{text}' does not name a kernel of a file", remedy=f"for example {SYNTAX}"
        )
    path = Path(match["path"])
    syntax = PYTHON_SYNTAX if path.suffix == ".py" else SYNTAX
    settings: dict[str, str] = {}
    for setting in filter(None, (match["settings"] or "").split(",")):
        key, equals, value = setting.partition("=")
        if not equals or not key.strip().isidentifier() or not value.strip():
            raise UsageError(
                f"'{setting}' of '{text}' is not a setting", remedy=f"for example {syntax}"
            )
        settings[key.strip()] = value.strip()
    grid = _extent(settings.pop("grid", "4"), "grid", text)
    if path.suffix == ".py":
        if match["template"]:
            raise UsageError(
                f"'{text}': Triton kernels have no template arguments (<>)",
                remedy=f"for example {syntax}",
            )
        # In Triton, block= and shared= are ordinary parameters.
        return Launch(path, match["kernel"], grid=grid, values=settings)
    block = _extent(settings.pop("block", "256"), "block", text)
    shared = settings.pop("shared", "0")
    if not shared.isdigit():
        raise UsageError(f"shared={shared} of '{text}' is not a number of bytes")
    return Launch(
        path, match["kernel"], match["template"] or "", block, grid, int(shared), settings
    )


def _extent(text: str, what: str, launch: str) -> Extent:
    if _EXTENT.fullmatch(text) is None or not all(map(int, text.split("x"))):
        raise UsageError(
            f"{what}={text} of '{launch}' is not an extent",
            remedy=f"for example {what}=256 or {what}=32x8",
        )
    x, y, z = (*map(int, text.split("x")), 1, 1)[:3]
    return x, y, z


def differing(left: NDArray[np.generic], right: NDArray[np.generic], has_atomics: bool) -> int:
    """Return the number of differing bytes; sums by atomics may differ by rounding."""
    if left.tobytes() == right.tobytes():
        return 0
    if has_atomics and left.dtype.kind == "f":
        near = np.isclose(
            left, right, rtol=_ATOMICS_TOLERANCE, atol=_ATOMICS_TOLERANCE, equal_nan=True
        )
        return int((~near).sum()) * left.dtype.itemsize
    return int((left.view(np.uint8) != right.view(np.uint8)).sum())
