"""Fused CUDA kernels: the same bytes in an emulated block, detected faults, invalid input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.codegen import why_no_compiler
from slipstream.errors import SlipstreamError, UsageError
from slipstream.techniques.side_by_side.cuda import (
    KernelSourceError,
    compile_fused,
    emulate,
    fuse,
    parse_launch,
    register_cap,
    resident_blocks,
    why_no_nvcc,
)
from slipstream_bench.systems.hfuse.kernels import NAMES, SPLITS, launch, pairs

needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))

REDUCE = """
#include "helpers.cuh"
__global__ void reduce(const float* x, float* y, int n) {
  __shared__ float s[128];
  s[threadIdx.x] = threadIdx.x < n ? x[blockIdx.x * blockDim.x + threadIdx.x] : 0.0f;
  WAIT();
  halve(s);
  if (threadIdx.x == 0) y[blockIdx.x] = s[0];
}
"""
HELPERS = """
#ifndef HELPERS
#define HELPERS
#define WAIT() __syncthreads()
__device__ void halve(float* s) {
  for (unsigned d = blockDim.x / 2; d > 0; d /= 2) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    WAIT();
  }
}
#endif
"""
SCALE = """
#include "helpers.cuh"
__global__ void scale(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
int main() { return 0; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with two kernels and a header they share."""
    for name, text in (("r.cu", REDUCE), ("s.cu", SCALE), ("helpers.cuh", HELPERS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def kernel(folder: Path, body: str, more: str = "", head: str = "") -> str:
    """Write a file with one kernel, named after it."""
    path = folder / "bad.cu"
    path.write_text(f"{head}\n__global__ void bad(float* x, int n) {{\n{body}\n}}\n")
    return f"{path}:bad:block=128{more}"


@needs_compiler
@pytest.mark.parametrize(
    ("first", "second", "split"),
    [
        ("block_sums", "scan", 0), ("transpose", "histogram", 1), ("stencil", "softmax", 2),
        ("reverse", "powers<float, 5>", 2), ("dot", "compact", 0), ("statistics", "scale4", 1),
    ],
)  # fmt: skip
def test_pairs_leave_the_bytes_of_their_kernels(first: str, second: str, split: int) -> None:
    found = emulate(fuse([launch(first, split), launch(second, (split + 1) % SPLITS)]))
    assert found.equal, str(found)
    assert found.compared > 1000
    assert found.float_atomics == (first == "dot")


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), list(pairs()))
def test_every_pair_leaves_the_bytes_of_its_kernels(first: str, second: str) -> None:
    found = emulate(fuse([launch(first), launch(second, 1)]), schedules=(0, 1, 3))
    assert found.equal, str(found)


@needs_compiler
def test_three_kernels_share_a_block() -> None:
    made = fuse([launch(name) for name in ("block_sums", "scan", "odd_even")], "three")
    assert made.name == "three"
    assert made.threads == 384
    assert emulate(made, schedules=(0, 1, 2, 3)).equal


@needs_compiler
def test_kernels_of_files_with_a_common_header(sources: Path) -> None:
    launches = [f"{sources}/r.cu:reduce:block=128,n=128", f"{sources}/s.cu:scale:block=64,n=250"]
    made = fuse([parse_launch(spec) for spec in launches])
    assert "main" not in made.source
    found = emulate(made)
    assert found.equal, str(found)


@needs_compiler
def test_a_parameter_may_have_a_type_of_the_file(tmp_path: Path) -> None:
    launches = []
    for name, factor in (("twice", 2), ("thrice", 3)):
        path = tmp_path / f"{name}.cu"
        path.write_text(
            f"typedef float Number;\n__global__ void {name}(Number* x, int n) {{\n"
            "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
            f"  if (i < n) x[i] *= {factor};\n}}\n"
        )
        launches.append(parse_launch(f"{path}:{name}:block=64,n=250"))
    found = emulate(fuse(launches))
    assert found.equal, str(found)


FAULTS: dict[str, Callable[[str], str]] = {
    "the other's barrier": lambda s: s.replace("SLIP_BARRIER(2, 256)", "SLIP_BARRIER(1, 128)"),
    "another number": lambda s: s.replace("SLIP_BARRIER(1, 128)", "SLIP_BARRIER(3, 128)", 1),
    "too many threads": lambda s: s.replace("SLIP_BARRIER(2, 256)", "SLIP_BARRIER(2, 288)"),
    "too few threads": lambda s: s.replace("SLIP_BARRIER(2, 256)", "SLIP_BARRIER(2, 128)"),
    "no whole warps": lambda s: s.replace("SLIP_BARRIER(1, 128)", "SLIP_BARRIER(1, 100)"),
    "a barrier left out": lambda s: s.replace("SLIP_BARRIER(1, 128)", "(void)0", 1),
    "no such barrier": lambda s: s.replace("SLIP_BARRIER(1, 128)", "SLIP_BARRIER(16, 128)"),
    "all threads": lambda s: s.replace("SLIP_BARRIER(1, 128)", "__syncthreads()"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_barrier_is_detected(fault: str) -> None:
    made = fuse([launch("block_sums"), launch("scan", 1)])
    broken = replace(made, source=FAULTS[fault](made.source))
    assert broken.source != made.source
    found = emulate(broken)
    assert not found.equal
    if fault == "too many threads":
        assert "hangs" in found.trouble
    if fault not in ("too few threads", "a barrier left out"):
        assert re.search(r"kernels\.cu:\d+", found.trouble)


@needs_compiler
def test_threads_beyond_an_array_are_named(tmp_path: Path) -> None:
    bad = kernel(tmp_path, "x[blockIdx.x * blockDim.x + threadIdx.x] = n;", ",x=500")
    with pytest.raises(UsageError, match=r"\b500\b.*'x'.*\b500\b"):
        emulate(fuse([parse_launch(bad), launch("relu")]))


@needs_compiler
def test_an_endless_loop_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["slipstream.techniques.side_by_side.cuda.emulate"]
    monkeypatch.setattr(module, "_LIMIT_S", 0.5)
    bad = kernel(tmp_path, "volatile int on = 1; while (on) x[0] = 1;")
    with pytest.raises(UsageError, match="did not finish"):
        emulate(fuse([parse_launch(bad), launch("relu")]))


@pytest.mark.parametrize(
    ("body", "head", "what"),
    [
        ("if (__syncthreads_count(n)) x[0] = 1;", "", "counts"),
        ('asm volatile("bar.sync 1, 64;");', "", "assembly"),
        ('unsigned t; asm("mov.u32 %0, %tid.x;" : "=r"(t));', "", "assembly"),
        ("auto g = cooperative_groups::this_grid(); g.sync();", "", "cooperative"),
        ("bad<<<1, 32>>>(x, n);", "", "launch"),
        ("x[0] = f(n);", "__device__ float f(int n) { return n ? f(n - 1) : 0; }", "itself"),
        ("x[0] = at(n);", "__device__ int at(int n);\n__device__ int (*p)(int) = at;\n"
         "__device__ int at(int n) { return blockIdx.x; }\n#define USE p", "as a value"),
        ("x[0] = S{}.f();", "struct S { __device__ int f() { return blockIdx.x; } };", "member"),
    ],
)  # fmt: skip
def test_code_unsupported_in_a_shared_block_is_named(
    tmp_path: Path, body: str, head: str, what: str
) -> None:
    kernels = [parse_launch(kernel(tmp_path, body, head=head)), launch("relu")]
    with pytest.raises(KernelSourceError, match=what) as error:
        fuse(kernels)
    assert re.fullmatch(r"bad\.cu:\d+", str(error.value.where))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a.cu", "does not name a kernel"), ("a.cu:k:block", "not a setting"),
        ("a.cu:k:block=0", "not an extent"),
        ("a.cu:k:grid=1x2x3x4", "not an extent"), ("a.cu:k:shared=x", "not a number"),
    ],
)  # fmt: skip
def test_invalid_launches_are_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_launch(text)


def test_invalid_blocks_are_refused(sources: Path) -> None:
    scale = f"{sources}/s.cu:scale"
    for specs, what in (
        ([f"{scale}:block=100", f"{scale}:block=32"], "multiple of 32"),
        ([f"{scale}:block=768", f"{scale}:block=512"], "more than 1024"),
        ([f"{scale}:block=32"] * 16, "barriers"),
        ([f"{sources}/none.cu:scale", scale], "cannot be read"),
        ([f"{sources}/s.cu:scales", scale], "did you mean scale"),
    ):
        with pytest.raises(SlipstreamError) as error:
            fuse([parse_launch(spec) for spec in specs])
        assert what in str(error.value)
    (sources / "s.cu").write_text("__global__ void scale(float* x) { if (x) {")
    with pytest.raises(KernelSourceError, match="never closed"):
        fuse([parse_launch(scale), parse_launch(scale)])


def test_the_bound_on_registers() -> None:
    def sized(threads: int) -> object:
        return parse_launch(f"a.cu:k:block={threads}")

    # Im2col and upsample of the paper: 49 and 43 registers, 512 threads each.
    assert resident_blocks([sized(512), sized(512)], [49, 43]) == 2  # type: ignore[list-item]
    assert register_cap(2, 1024) == 32
    assert resident_blocks([sized(128), sized(128)], [130, 96]) == 3  # type: ignore[list-item]
    assert register_cap(3, 256) == 80


@pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))
def test_nvcc_finds_a_barrier_for_each_kernel() -> None:
    made = fuse([launch("block_sums"), launch("scan", 1)])
    found = compile_fused(made, "sm_90")
    assert found.barrier_trouble(made) == ""
    assert set(found.free.barriers) == {(1, 128), (2, 256)}
    assert found.free.registers <= max(kernel.registers for kernel in found.alone) + 8
    assert found.capped.registers <= found.cap
    assert found.free.shared_bytes == sum(kernel.shared_bytes for kernel in found.alone)
    broken = replace(made, source=made.source.replace("SLIP_BARRIER(1, 128)", "__syncthreads()"))
    from slipstream.techniques.side_by_side.cuda import resources

    wrong = replace(found, free=resources._compile(broken, "sm_90", 0))
    assert re.search(r"\bbar\.sync \d+", wrong.barrier_trouble(made))


@needs_compiler
def test_the_command_writes_checked_kernels(
    sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.cli._main import _command

    monkeypatch.chdir(sources)
    arguments = ["hfuse", "r.cu:reduce:block=128,n=128", "s.cu:scale:block=64,n=250"]
    assert _command([*arguments, "-o", "fused.cu", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["emulated"]["equal"]
    assert [part["first_thread"] for part in payload["parts"]] == [0, 128]
    assert "reduce_scale" in Path("fused.cu").read_text()
    with pytest.raises(UsageError, match="is a source"):
        _command([*arguments, "-o", "s.cu"])
    with pytest.raises(UsageError, match=r"\bone kernel\b"):
        _command([*arguments[:2], "-o", "f.cu"])
    assert Path("s.cu").read_text() == SCALE


def test_kernels_have_distinct_names() -> None:
    assert len(NAMES) == 20
    assert len(list(pairs())) == 190
