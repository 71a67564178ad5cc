"""How a kernel is launched, told in a line: ``a.cu:reduce<float>:block=256,grid=8,n=1000``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import UsageError

Extent = tuple[int, int, int]
_LAUNCH = re.compile(
    r"(?P<path>.+?\.\w+):(?P<kernel>[A-Za-z_]\w*)(?:<(?P<template>.*)>)?(?::(?P<settings>[^<>].*))?"
)
_EXTENT = re.compile(r"\d+(x\d+){0,2}")
_BLOCK, _GRID = (256, 1, 1), (4, 1, 1)
SHAPE = "file.cu:kernel<TEMPLATE,...>:block=XxYxZ,grid=XxYxZ,shared=BYTES,ARGUMENT=VALUE,..."


@dataclass(frozen=True)
class Launch:
    """A kernel of a file, and how it is launched.

    Attributes:
        path: of the source.
        kernel: its name.
        template: its template arguments, as they are written between ``<>``.
        block, grid: threads of a block, blocks; x, y, z.
        shared: bytes of dynamic shared memory.
        values: for the emulator, of arguments by name: a number, or how many elements a pointer
            points to, for indices with what they stay below: ``1000<64``.
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


def parse_launch(text: str) -> Launch:
    """A launch from its line.

    Raises:
        UsageError: it is not of the shape that the message shows.
    """
    match = _LAUNCH.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' names no kernel of a file", remedy=f"as {SHAPE}")
    settings: dict[str, str] = {}
    for one in filter(None, (match["settings"] or "").split(",")):
        key, equals, value = one.partition("=")
        if not equals or not key.strip().isidentifier() or not value.strip():
            raise UsageError(f"'{one}' of '{text}' is no setting", remedy=f"as {SHAPE}")
        settings[key.strip()] = value.strip()
    block = _extent(settings.pop("block", "256"), "block", text)
    grid = _extent(settings.pop("grid", "4"), "grid", text)
    shared = settings.pop("shared", "0")
    if not shared.isdigit():
        raise UsageError(f"shared={shared} of '{text}' is no number of bytes")
    return Launch(
        Path(match["path"]), match["kernel"], match["template"] or "", block, grid, int(shared),
        settings,
    )  # fmt: skip


def _extent(text: str, what: str, launch: str) -> Extent:
    if _EXTENT.fullmatch(text) is None or not all(map(int, text.split("x"))):
        raise UsageError(
            f"{what}={text} of '{launch}' is no extent", remedy=f"as {what}=256 or {what}=32x8"
        )
    x, y, z = (*map(int, text.split("x")), 1, 1)[:3]
    return x, y, z
