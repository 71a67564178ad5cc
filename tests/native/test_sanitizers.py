"""Address and undefined-behaviour sanitizers find nothing in kernels that this CPU runs.

Each family has a program that gives its kernels random sizes, in arrays exactly as large as they
must be, and fails where two of them differ in a bit.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sanitized import NATIVE, SANITIZERS, build
from slipstream.native import InstructionSet
from slipstream.techniques.distributed.adasum import kernels as adasum
from slipstream.techniques.distributed.compression import kernels as compress
from slipstream.techniques.embedding.kernels import robe, tt

# By family: the levels of this build and CPU, and the files of `native/src` its kernels need.
FAMILIES: Mapping[str, tuple[Callable[[], Mapping[InstructionSet, int]], tuple[str, ...]]] = {
    "adasum": (adasum.kernels, ("adasum/adasum.cpp",)),
    "compress": (compress.kernels, ("compress/compress.cpp",)),
    "robe": (robe.kernels, ("robe/robe.cpp", "bags.cpp", "threads.cpp")),
    "tt": (tt.kernels, ("tt/tt.cpp", "tt/micro_batch.cpp", "bags.cpp", "threads.cpp")),
}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_sanitizers_find_nothing(
    family: str, tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    kernels, needed = FAMILIES[family]
    levels = [str(level) for level in reversed(kernels())]
    require("native", bool(levels) and shutil.which("g++") is not None, "no kernels, or no g++")
    program = build(
        tmp_path, family, levels, Path(__file__).parent / f"{family}_main.cpp",
        *(NATIVE / "src" / name for name in needed), flags=SANITIZERS,
    )  # fmt: skip
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "fine\n"
