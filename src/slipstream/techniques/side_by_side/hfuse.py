"""Sources fused side by side: how a kernel is launched, told in a line, and what a check says.

CUDA C++ is in `cuda`, Triton in `triton`; both take launches and give what is here.
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
_BY_ATOMICS = 1e-6
SHAPE = "file.cu:kernel<TEMPLATE,...>:block=XxYxZ,grid=XxYxZ,shared=BYTES,ARGUMENT=VALUE,..."
PYTHON_SHAPE = "file.py:kernel:grid=XxYxZ,num_warps=N,ARGUMENT=VALUE,..."


class KernelSourceError(SlipstreamError):
    """A kernel's source cannot be read, or cannot be fused; `where` is file:line."""


class EmulatorError(UsageError):
    """A kernel cannot be run: what its arguments are is not known, or it leaves its arrays."""


@dataclass(frozen=True)
class Launch:
    """A kernel of a file, and how it is launched.

    Attributes:
        path: of the source.
        kernel: its name.
        template: its template arguments, as they are written between ``<>``.
        block, grid: threads of a block, blocks; x, y, z. Of Triton's kernels only the grid.
        shared: bytes of dynamic shared memory.
        values: for the check, of arguments by name: a number, or how many elements a pointer
            points to, for indices with what they stay below: ``1000<64``. Triton's pointers name
            their type, ``1000xi32<64``.
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
        """Of a block."""
        return math.prod(self.block)

    @property
    def python(self) -> bool:
        """Whether the source is Python, the kernel Triton's."""
        return self.path.suffix == ".py"


@dataclass(frozen=True)
class Emulated:
    """What came of a check.

    Attributes:
        schedules: orders that were tried.
        compared: bytes, of one order.
        differing: of them, the most in any order.
        trouble: what went wrong in the fused kernel, as a hanging barrier with its line; empty if
            nothing did.
        float_atomics: whether sums depend on the order, which are compared to 1e-6.
        ordered: what was put in order: threads, or programs.
    """

    schedules: int
    compared: int
    differing: int
    trouble: str
    float_atomics: bool
    ordered: str = "threads"

    @property
    def equal(self) -> bool:
        """Whether the fused kernel does what its kernels do one after the other."""
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
    """A launch from its line.

    Raises:
        UsageError: it is not of the shape that the message shows.
    """
    match = _LAUNCH.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' names no kernel of a file", remedy=f"for example {SHAPE}")
    path = Path(match["path"])
    shape = PYTHON_SHAPE if path.suffix == ".py" else SHAPE
    settings: dict[str, str] = {}
    for one in filter(None, (match["settings"] or "").split(",")):
        key, equals, value = one.partition("=")
        if not equals or not key.strip().isidentifier() or not value.strip():
            raise UsageError(f"'{one}' of '{text}' is no setting", remedy=f"for example {shape}")
        settings[key.strip()] = value.strip()
    grid = _extent(settings.pop("grid", "4"), "grid", text)
    if path.suffix == ".py":
        if match["template"]:
            raise UsageError(
                f"'{text}': a kernel of Triton has no <>", remedy=f"for example {shape}"
            )
        # There, block= and shared= are parameters like all others.
        return Launch(path, match["kernel"], grid=grid, values=settings)
    block = _extent(settings.pop("block", "256"), "block", text)
    shared = settings.pop("shared", "0")
    if not shared.isdigit():
        raise UsageError(f"shared={shared} of '{text}' is no number of bytes")
    return Launch(
        path, match["kernel"], match["template"] or "", block, grid, int(shared), settings
    )


def _extent(text: str, what: str, launch: str) -> Extent:
    if _EXTENT.fullmatch(text) is None or not all(map(int, text.split("x"))):
        raise UsageError(
            f"{what}={text} of '{launch}' is no extent",
            remedy=f"for example {what}=256 or {what}=32x8",
        )
    x, y, z = (*map(int, text.split("x")), 1, 1)[:3]
    return x, y, z


def differing(values: NDArray[np.generic], right: NDArray[np.generic], by_atomics: bool) -> int:
    """Bytes that differ; of sums by atomics only those that differ by more than rounding."""
    if values.tobytes() == right.tobytes():
        return 0
    if by_atomics and values.dtype.kind == "f":
        near = np.isclose(values, right, rtol=_BY_ATOMICS, atol=_BY_ATOMICS, equal_nan=True)
        return int((~near).sum()) * values.dtype.itemsize
    return int((values.view(np.uint8) != right.view(np.uint8)).sum())
