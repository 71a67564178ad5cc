"""Run by test_hfuse_triton.py in a separate process, interpreted: fused and separate programs.

Separate kernels run from the whole imported file, so that the parts of it that fusion copies are
checked, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.techniques.side_by_side.hfuse import parse_launch
from slipstream.techniques.side_by_side.triton import FusedPrograms, fuse
from slipstream.techniques.side_by_side.triton._child import compare
from slipstream.techniques.side_by_side.triton.check import described, written
from slipstream_bench.systems.hfuse.kernels import PROGRAMS, programs

PAIRS = list(zip(PROGRAMS, (*PROGRAMS[5:], *PROGRAMS[:5]), strict=True))
HELPERS = """
import triton
import triton.language as lang
from scale import FACTOR as SCALE

FACTOR = lang.constexpr(3)

class Unused:
    pass

@triton.jit
def first(size: lang.constexpr):
    return lang.program_id(axis=0) * size

@triton.jit(noinline=True)
def scaled(value):
    return value * FACTOR + SCALE

@triton.jit
def here(size: lang.constexpr) -> lang.tensor:
    return (first(
        size) + lang.arange(0, size))
"""
SCALE = "import triton.language\nFACTOR = triton.language.constexpr(7)\n"
FIRST = """
from __future__ import annotations

import torch
import triton
import triton.language as tl

import helpers as h
from helpers import here

try:
    from nowhere import FACTOR
except ImportError:
    FACTOR = tl.constexpr(5)
DEVICE = torch.device("cpu")

def helper() -> int:
    return 1

STEP = tl.constexpr(helper())

@triton.autotune([triton.Config({"block": 64}), triton.Config({"block": 32})], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["block"] == 0})
@triton.jit
def twice(x: torch.Tensor, n: tl.int64, EVEN: tl.constexpr, block: tl.constexpr = 64) -> None:
    "Ä two-byte letter, before what is edited on its line"; at = here(block)
    if at.numel > 4096: return
    if EVEN:
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < n)
    tl.static_assert(block > 1, f"{block} {tl.float32}")
    value = h.scaled(value) + FACTOR * STEP
    tl.store(x + at, value, mask=at < n)
"""
SECOND = """
import triton
import triton.language as language
from triton import jit
tl = 2

@triton.jit
def here(start, x, h: language.constexpr = 4):
    return helper(start) * h + language.arange(0, h), x

@triton.jit
def helper(start):
    return start + language.program_id(2) * language.num_programs(0) + language.program_id(0)

@triton.jit
def add(left, right):
    return left + right

@jit(do_not_specialize=["n"])
def twice(x, n, axis: language.constexpr):
    if language.program_id(axis) == 1:
        return
    at, pointer = here(0, x)
    value = language.load(pointer + at, mask=at < n)
    language.store(x + at, value + language.reduce(value, 0, add), mask=at < n)
"""


def checked(fused: FusedPrograms) -> dict[str, Any]:
    with written(fused) as folder:
        for number, part in enumerate(fused.parts, 1):
            # Unchanged, but run directly: autotune would have to choose first.
            text = part.launch.path.read_text() + f"\n{part.alone} = {part.name}\n"
            text += f"while hasattr({part.alone}, 'configs') or hasattr({part.alone}, 'values'):\n"
            text += f"    {part.alone} = {part.alone}.fn\n"
            Path(folder, f"alone_{number}.py").write_text(text)
        parts = [described(part) for part in fused.parts]
        return compare(folder, fused.name, parts, report=lambda message: None)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pairs_leave_the_bytes_of_their_kernels(first: str, second: str) -> None:
    outcome = checked(fuse([programs(first), programs(second, 1)]))
    assert outcome["trouble"] == ""
    assert outcome["differing"] == 0
    assert outcome["compared"] > 1000
    assert outcome["orders"] == 2


def test_four_kernels_one_of_them_twice() -> None:
    names = ("transpose", "histogram", "transpose", "mean_pool")
    fused = fuse([programs(name, n % 2) for n, name in enumerate(names)], "four")
    assert fused.name == "four"
    assert fused.source.count("def transpose(") == 1
    outcome = checked(fused)
    assert (outcome["trouble"], outcome["differing"]) == ("", 0)


def test_a_fused_kernel_can_be_fused_again(tmp_path: Path) -> None:
    path = tmp_path / "fused.py"
    path.write_text(fuse([programs("histogram"), programs("transpose")], "both").source)
    grids = "4,grid_1_y=1,grid_1_z=1,grid_2_x=2,grid_2_y=3,grid_2_z=1"
    launches = (
        f"{path}:both:grid=10,histogram_x=900xi32<500,histogram_counts=32xi32,histogram_n=900,"
        "histogram_bins=32,histogram_block=256,transpose_x=1200xfp32,transpose_y=1200xfp32,"
        f"transpose_height=30,transpose_width=40,transpose_tile=16,grid_1_x={grids},EVENLY=True"
    )
    fused = fuse([programs("mean_pool", 1), parse_launch(launches)])
    outcome = checked(fused)
    assert (outcome["trouble"], outcome["differing"]) == ("", 0)
    assert outcome["compared"] > 12_000


def test_kernels_of_files_with_equal_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"helpers": HELPERS, "scale": SCALE, "a": FIRST, "b": SECOND}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    specs = ["a.py:twice:grid=4,x=250xfp32,n=250,EVEN=False", "b.py:twice:grid=3x2x2,x=64xi32,n=48"]
    launches = [parse_launch(f"{tmp_path}/{spec}") for spec in (specs[0], specs[1] + ",axis=1")]
    fused = fuse(launches)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("helpers", None)
    outcome = checked(fused)
    assert (outcome["trouble"], outcome["differing"]) == ("", 0)
    assert "Unused" not in fused.source
    assert "torch" not in fused.source
    assert 'twice_1_n: "i64"' in fused.source
    assert '"twice_2_n"' in fused.source
    assert "import helpers" not in fused.source
    assert [(tmp_path / f"{name}.py").read_text() for name in texts] == list(texts.values())


FAULTS = {
    "axes exchanged": ("slip_at % slip_x, slip_at // slip_x %", "slip_at // slip_x, slip_at %"),
    "one too far": ("slip_at_1 - slip_before_1", "slip_at_1 - slip_before_1 + 1"),
    "the other's grid": ("(grid_2_x, grid_2_y, grid_2_z), m", "(grid_1_x, grid_1_y, grid_1_z), m"),
    "an id of the whole grid": ("slip_ids[1]", "tl.program_id(0)"),
    "a count of the whole grid": ("slip_programs[0]", "tl.num_programs(0)"),
    "the other's turn": ("if slip_its_1:", "if not slip_its_1:"),
    "the other's argument": ("softmax_x, softmax_y", "mean_pool_x, softmax_y"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_kernel_is_detected(fault: str) -> None:
    fused = fuse([programs("softmax"), programs("mean_pool")])
    broken = replace(fused, source=fused.source.replace(*FAULTS[fault]))
    assert broken.source != fused.source
    with written(broken) as folder:
        parts = [described(part) for part in broken.parts]
        # In a fork, which it may crash by leaving its arrays.
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            outcome = compare(folder, broken.name, parts, report=lambda message: None)
            os._exit(0 if outcome["trouble"] or outcome["differing"] else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGSEGV)
