"""Resources of a fused kernel, reported by nvcc and ptxas if installed; no GPU is needed."""

from __future__ import annotations

import functools
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.techniques.side_by_side.cuda.fuse import (
    FusedKernel,
    fuse,
    register_cap,
    resident_blocks,
)
from slipstream.techniques.side_by_side.cuda.rewrite import Rewriter
from slipstream.techniques.side_by_side.hfuse import Launch

_TIMEOUT_S = 300.0
_MAX_OUTPUT = 600  # characters
_USED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:, used (\d+) barriers)?([^\n]*)", re.DOTALL
)  # fmt: skip
_SHARED = re.compile(r"(\d+) bytes smem")
_BARRIER = re.compile(r"\b(?:bar|barrier)\.sync(?:\.aligned)?\s+([^;]+);")
_ENTRY_NAME = re.compile(r"\.visible \.entry (\w+)\(")


class CudaCompilerError(SlipstreamError):
    """A compiler rejects the source, or does not finish in time."""


@dataclass(frozen=True)
class CompiledKernel:
    """Resources of a kernel, as ptxas reports them.

    Attributes:
        registers: registers per thread.
        spilled_bytes: bytes per thread stored for lack of registers.
        shared_bytes: static shared memory per block.
        barriers: (number, thread count) of every barrier in the code; a count of 0 is all threads.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    barriers: tuple[tuple[int, int], ...]

    def resident(self, threads: int, dynamic_bytes: int = 0, *, shared_limit: int = 233_472) -> int:
        """Return the number of blocks that are resident on a multiprocessor.

        Args:
            threads: threads per block.
            dynamic_bytes: dynamic shared memory per block.
            shared_limit: shared memory of a multiprocessor, in bytes; by default of an H100.
        """
        warps = math.ceil(threads / 32)
        # Registers are allocated to warps in units of 256.
        warp_registers = math.ceil(self.registers * 32 / 256) * 256
        by_registers = 65536 // warp_registers // warps
        shared = self.shared_bytes + dynamic_bytes + 1024
        return min(by_registers, 2048 // (warps * 32), 32, shared_limit // shared)


@dataclass(frozen=True)
class Resources:
    """Resources of a fused kernel and of its kernels.

    Attributes:
        arch: architecture, such as ``sm_90``.
        alone: resources of each kernel.
        free, capped: resources of the fused kernel, without and with a limit on its registers.
        blocks: resident blocks from which the limit follows.
        cap: register limit per thread.
    """

    arch: str
    alone: tuple[CompiledKernel, ...]
    free: CompiledKernel
    capped: CompiledKernel
    blocks: int
    cap: int

    def summary(self, fused: FusedKernel) -> str:
        """Return a one-sentence summary."""
        free, capped = self.free, self.capped
        return (
            f"{self.arch}: {free.registers} registers, {free.spilled_bytes} B spilled; with "
            f"-DSLIP_BLOCKS={self.blocks} {capped.registers} of at most {self.cap}, "
            f"{capped.spilled_bytes} B spilled; barriers: "
            f"{self.barrier_trouble(fused) or 'one per kernel'}"
        )

    def barrier_trouble(self, fused: FusedKernel) -> str:
        """Return the first wrong barrier in the machine code; empty if all are right."""
        barriers = {part.barrier: part.launch.threads for part in fused.parts}
        for number, count in (*self.free.barriers, *self.capped.barriers):
            if barriers.get(number) != count:
                return f"bar.sync {number}, {count or 'all'} does not belong to any kernel"
        return ""


def why_no_nvcc() -> str | None:
    """Return why sources cannot be compiled for a GPU here; None if they can."""
    return None if shutil.which("nvcc") else "nvcc is not installed"


def compile_fused(fused: FusedKernel, arch: str = "sm_90") -> Resources:
    """Compile a fused kernel and each of its kernels alone.

    Raises:
        CudaCompilerError: nvcc is missing, fails, or times out.
    """
    alone = tuple(_compile(_single(part.launch), arch, 0) for part in fused.parts)
    launches = [part.launch for part in fused.parts]
    blocks = resident_blocks(launches, [kernel.registers for kernel in alone])
    free, capped = (_compile(fused, arch, bound) for bound in (0, blocks))
    return Resources(arch, alone, free, capped, blocks, register_cap(blocks, fused.threads))


def _single(launch: Launch) -> FusedKernel:
    return fuse([launch], f"slip_alone_{launch.kernel}")


def _compile(kernel: FusedKernel, arch: str, blocks: int) -> CompiledKernel:
    if any(Rewriter(part).template_parameters for part in kernel.parts):
        raise CudaCompilerError(
            f"{kernel.name} is a template and needs arguments to be compiled",
            remedy="pass them: a.cu:k<float>",
        )
    return _compile_source(kernel.source, arch, blocks)


@functools.cache
def _compile_source(source: str, arch: str, blocks: int) -> CompiledKernel:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        file, ptx, cubin = (Path(folder) / f"fused.{end}" for end in ("cu", "ptx", "cubin"))
        file.write_text(source, encoding="utf-8")
        bound = [f"-DSLIP_BLOCKS={blocks}"] if blocks else []
        run_tool(["nvcc", f"-arch={arch}", "-std=c++17", "-ptx", *bound, str(file), "-o", str(ptx)])
        report = run_tool(["ptxas", f"-arch={arch}", "-v", str(ptx), "-o", str(cubin)])
        return parsed(report, ptx.read_text())


def run_tool(command: Sequence[str]) -> str:
    """Run a compiler and return its output.

    Raises:
        CudaCompilerError: it is missing, fails, or times out.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise CudaCompilerError(
            f"{command[0]} is not installed", remedy="install the CUDA toolkit, or omit --arch"
        ) from None
    except subprocess.TimeoutExpired:
        raise CudaCompilerError(f"{command[0]} did not finish within {_TIMEOUT_S:.0f} s") from None
    output = result.stdout + result.stderr
    if result.returncode:
        raise CudaCompilerError(f"{command[0]} failed:\n{output.strip()[:_MAX_OUTPUT]}")
    return output


def parsed(report: str, ptx: str) -> CompiledKernel:
    """Parse the report of ptxas on a kernel, and the barriers in its PTX.

    Raises:
        CudaCompilerError: the report does not contain a kernel.
    """
    usage = _USED.search(report)
    if usage is None or _ENTRY_NAME.search(ptx) is None:
        raise CudaCompilerError(f"ptxas did not report a kernel:\n{report.strip()[:_MAX_OUTPUT]}")
    shared = _SHARED.search(usage[6])
    barriers = []
    for barrier in _BARRIER.finditer(ptx):
        numbers = [int(part) for part in barrier[1].replace(" ", "").split(",") if part.isdigit()]
        barriers.append((numbers[0] if numbers else -1, numbers[1] if len(numbers) > 1 else 0))
    static = int(shared[1]) if shared else 0
    return CompiledKernel(int(usage[4]), int(usage[2]), static, tuple(dict.fromkeys(barriers)))
