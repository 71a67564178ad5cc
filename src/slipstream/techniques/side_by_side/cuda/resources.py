"""What nvcc and ptxas say of a fused kernel, where they are installed; neither needs a GPU."""

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
_LINES = 600
_USED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:, used (\d+) barriers)?([^\n]*)", re.DOTALL
)  # fmt: skip
_SHARED = re.compile(r"(\d+) bytes smem")
_BARRIER = re.compile(r"\b(?:bar|barrier)\.sync(?:\.aligned)?\s+([^;]+);")
_ENTRY_NAME = re.compile(r"\.visible \.entry (\w+)\(")


class CudaCompilerError(SlipstreamError):
    """A compiler does not take the source, or does not end."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs, as ptxas reports it.

    Attributes:
        registers: of a thread.
        spilled_bytes: stored for lack of registers, by a thread.
        shared_bytes: static shared memory of a block.
        barriers: (number, threads counted) of every barrier in the code; 0 threads for all.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    barriers: tuple[tuple[int, int], ...]

    def resident(self, threads: int, dynamic_bytes: int = 0, *, shared_limit: int = 233_472) -> int:
        """Blocks that a multiprocessor of this architecture holds at once.

        Args:
            threads: of a block.
            dynamic_bytes: of shared memory, beside the static.
            shared_limit: bytes of a multiprocessor; of an H100 by default.
        """
        warps = math.ceil(threads / 32)
        # Registers are given to a warp in portions of 256.
        of_warp = math.ceil(self.registers * 32 / 256) * 256
        by_registers = 65536 // of_warp // warps
        shared = self.shared_bytes + dynamic_bytes + 1024
        return min(by_registers, 2048 // (warps * 32), 32, shared_limit // shared)


@dataclass(frozen=True)
class Resources:
    """A fused kernel's needs beside those of its kernels.

    Attributes:
        arch: as ``sm_90``.
        alone: of each kernel.
        free, capped: of the fused one, without and with a bound on its registers.
        blocks: resident blocks that the bound is for.
        cap: registers of a thread that it allows.
    """

    arch: str
    alone: tuple[Compiled, ...]
    free: Compiled
    capped: Compiled
    blocks: int
    cap: int

    def summary(self, fused: FusedKernel) -> str:
        """In a sentence."""
        free, capped = self.free, self.capped
        return (
            f"{self.arch}: {free.registers} registers, {free.spilled_bytes} B spilled; with "
            f"-DSLIP_BLOCKS={self.blocks} {capped.registers} of at most {self.cap}, "
            f"{capped.spilled_bytes} B spilled; barriers: "
            f"{self.barrier_trouble(fused) or 'each kernel its own'}"
        )

    def barrier_trouble(self, fused: FusedKernel) -> str:
        """What is wrong with the barriers of the machine's code; empty if nothing is."""
        barriers = {part.barrier: part.launch.threads for part in fused.parts}
        for number, count in (*self.free.barriers, *self.capped.barriers):
            if barriers.get(number) != count:
                return f"bar.sync {number}, {count or 'all'} is none of the kernels' barriers"
        return ""


def why_no_nvcc() -> str | None:
    """Why sources cannot be compiled for a GPU here; None where they can."""
    return None if shutil.which("nvcc") else "nvcc is not installed"


def compiled(fused: FusedKernel, arch: str = "sm_90") -> Resources:
    """Compile a fused kernel and each of its kernels alone.

    Raises:
        CudaCompilerError: nvcc is missing, fails, or does not end in time.
    """
    alone = tuple(_compile(_single(part.launch), arch, 0) for part in fused.parts)
    launches = [part.launch for part in fused.parts]
    blocks = resident_blocks(launches, [one.registers for one in alone])
    free, capped = (_compile(fused, arch, bound) for bound in (0, blocks))
    return Resources(arch, alone, free, capped, blocks, register_cap(blocks, fused.threads))


def _single(launch: Launch) -> FusedKernel:
    return fuse([launch], f"slip_alone_{launch.kernel}")


def _compile(kernel: FusedKernel, arch: str, blocks: int) -> Compiled:
    if any(Rewriter(part).template_parameters for part in kernel.parts):
        raise CudaCompilerError(
            f"{kernel.name} is a template: it is compiled once it has arguments",
            remedy="name them: a.cu:k<float>",
        )
    return _compile_source(kernel.source, arch, blocks)


@functools.cache
def _compile_source(source: str, arch: str, blocks: int) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        file, ptx, cubin = (Path(folder) / f"fused.{end}" for end in ("cu", "ptx", "cubin"))
        file.write_text(source, encoding="utf-8")
        bound = [f"-DSLIP_BLOCKS={blocks}"] if blocks else []
        run_tool(["nvcc", f"-arch={arch}", "-std=c++17", "-ptx", *bound, str(file), "-o", str(ptx)])
        report = run_tool(["ptxas", f"-arch={arch}", "-v", str(ptx), "-o", str(cubin)])
        return parsed(report, ptx.read_text())


def run_tool(command: Sequence[str]) -> str:
    """What a compiler prints.

    Raises:
        CudaCompilerError: it is missing, fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise CudaCompilerError(
            f"{command[0]} is not installed", remedy="install the CUDA toolkit, or leave --arch out"
        ) from None
    except subprocess.TimeoutExpired:
        raise CudaCompilerError(f"{command[0]} did not end within {_TIMEOUT_S:.0f} s") from None
    output = done.stdout + done.stderr
    if done.returncode:
        raise CudaCompilerError(f"{command[0]} failed:\n{output.strip()[:_LINES]}")
    return output


def parsed(said: str, ptx: str) -> Compiled:
    """What ptxas reports of a kernel, and the barriers in its source.

    Raises:
        CudaCompilerError: it reports none.
    """
    usage = _USED.search(said)
    if usage is None or _ENTRY_NAME.search(ptx) is None:
        raise CudaCompilerError(f"ptxas reports no kernel:\n{said.strip()[:_LINES]}")
    shared = _SHARED.search(usage[6])
    barriers = []
    for one in _BARRIER.finditer(ptx):
        numbers = [int(part) for part in one[1].replace(" ", "").split(",") if part.isdigit()]
        barriers.append((numbers[0] if numbers else -1, numbers[1] if len(numbers) > 1 else 0))
    static = int(shared[1]) if shared else 0
    return Compiled(int(usage[4]), int(usage[2]), static, tuple(dict.fromkeys(barriers)))
