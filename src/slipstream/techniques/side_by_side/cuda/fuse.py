"""Fusion of CUDA kernels into one, each with separate threads and a separate barrier.

Every kernel becomes a device function in a separate namespace, with everything it calls. Its thread
and block indices are those of a separate launch, ``__syncthreads`` is a barrier of its threads, and
its shared memory is separate. The fused kernel calls the function of each thread's kernel, so that
a ``return`` only ends that function. The user's files are read, never written.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from slipstream.techniques.side_by_side.cuda.rewrite import Rewriter, is_dynamic
from slipstream.techniques.side_by_side.cuda.source import (
    Item,
    find_kernel,
    needed,
    read_items,
)
from slipstream.techniques.side_by_side.hfuse import KernelSourceError, Launch

MAX_THREADS, MAX_BARRIERS, WARP = 1024, 15, 32
_REGISTERS, _SM_THREADS = 65536, 2048
# CUDA headers, which an emulated block does not need.
_CUDA_HEADER = re.compile(r"<(cuda|cooperative_groups|device_|vector_types|math_constants|sm_\d)")


@dataclass(frozen=True)
class Part:
    """A kernel with its place in the fused kernel.

    Attributes:
        launch: the requested launch.
        space: namespace of its function.
        start: index of its first thread.
        barrier: number of its barrier.
        offset: offset of its dynamic shared memory, in bytes.
        kernel: the function.
        items: everything it needs, in order.
    """

    launch: Launch
    space: str
    start: int
    barrier: int
    offset: int
    kernel: Item
    items: tuple[Item, ...]

    @property
    def called(self) -> str:
        """Qualified name of its function."""
        return "::".join([self.space, *filter(None, self.kernel.spaces), self.kernel.name])

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.name

    @property
    def cells(self) -> dict[str, str | int]:
        """Cells of its table row, by column."""
        end = self.start + self.launch.threads - 1
        return {"threads": f"{self.start} to {end}", "barrier": self.barrier}

    def to_json(self) -> dict[str, str | int]:
        """Return a JSON-serializable dictionary."""
        return {
            "kernel": self.kernel.name, "first_thread": self.start,
            "threads": self.launch.threads, "barrier": self.barrier,
        }  # fmt: skip


@dataclass(frozen=True)
class FusedKernel:
    """A fused kernel.

    Attributes:
        name: name of the kernel.
        source: CUDA C++ of it and everything it needs; a C++ compiler compiles it for emulation.
        parts: its kernels, in the order of their threads.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    threads: int
    shared_bytes: int
    notes: ClassVar[tuple[str, ...]] = ()

    @property
    def launch_rule(self) -> str:
        """One-line description of its launch."""
        blocks = ", ".join(str(math.prod(part.launch.grid)) for part in self.parts)
        return (
            f"{self.name}<<<max({blocks}), {self.threads}, {self.shared_bytes}>>>(arguments of "
            "each kernel in order, then the grid of each kernel as a dim3)"
        )


def resident_blocks(launches: Sequence[Launch], registers: Sequence[int]) -> int:
    """Return the resident blocks of the fused kernel at which no kernel loses resident threads.

    Args:
        registers: registers per thread of each kernel alone.
    """
    threads = sum(launch.threads for launch in launches)
    alone = [
        _REGISTERS // (count * launch.threads)
        for launch, count in zip(launches, registers, strict=True)
    ]
    return max(min(*alone, _SM_THREADS // threads), 1)


def register_cap(blocks: int, threads: int) -> int:
    """Return the register limit per thread for `blocks` resident blocks, as ptxas rounds it."""
    return min(_REGISTERS // (blocks * threads) // 8 * 8, 255)


def fuse(launches: Sequence[Launch], name: str = "") -> FusedKernel:
    """Fuse the kernels of `launches`.

    Args:
        name: name of the fused kernel; by default all names joined.

    Raises:
        KernelSourceError: a file cannot be read, or a kernel uses something a fused one cannot.
        UnknownNameError: a file does not have the kernel.
    """
    parts = _parts(launches)
    threads = sum(launch.threads for launch in launches)
    name = name or "_".join(part.kernel.name for part in parts)
    rewriters = [Rewriter(part) for part in parts]
    bodies = [_part_text(rewriter) for rewriter in rewriters]
    includes = dict.fromkeys(line for part in parts for line in _includes(part))
    shared = parts[-1].offset + _aligned(parts[-1].launch.shared)
    source = "\n".join(
        [_prologue(), *includes, *bodies, _fused(name, rewriters, threads)]
    )  # fmt: skip
    return FusedKernel(name, source, parts, threads, shared)


def alone(launch: Launch) -> FusedKernel:
    """Return the unchanged kernel, for an emulated block."""
    (part,) = _parts([launch])
    rewriter = Rewriter(part, native=True)
    source = "\n".join([_prologue(), *_includes(part), _part_text(rewriter)])
    called = part.called + rewriter.arguments
    return FusedKernel(called, source, (part,), launch.threads, _aligned(launch.shared))


def _prologue() -> str:
    return files(__package__).joinpath("prologue.cuh").read_text(encoding="utf-8")


def _aligned(count: int) -> int:
    return -(-count // 128) * 128


def _parts(launches: Sequence[Launch]) -> tuple[Part, ...]:
    threads = sum(launch.threads for launch in launches)
    for launch in launches:
        if launch.threads % WARP:
            raise KernelSourceError(
                f"{launch.kernel} has {launch.threads} threads per block, not a multiple of {WARP}",
                where=str(launch.path),
                remedy="choose another block=; barriers of a part of a block need whole warps",
            )
    if threads > MAX_THREADS:
        raise KernelSourceError(
            f"the blocks have {threads} threads in total, more than {MAX_THREADS}",
            remedy="use smaller blocks: k:block=256",
        )
    if len(launches) > MAX_BARRIERS:
        raise KernelSourceError(
            f"{len(launches)} kernels need as many barriers, but a block has {MAX_BARRIERS}",
            remedy="fuse fewer kernels",
        )
    parts, start, offset = [], 0, 0
    for number, launch in enumerate(launches, 1):
        items = read_items(launch.path)
        kernel = find_kernel(items, launch.kernel, launch.path.name)
        space = f"slip_{number}_{launch.kernel}"
        part = Part(launch, space, start, number, offset, kernel, tuple(needed(items, kernel)))
        if launch.shared == 0 and any(map(is_dynamic, part.items)):
            raise KernelSourceError(
                f"{launch.kernel} uses dynamic shared memory of unknown size",
                where=kernel.tokens[0].where, remedy=f"pass it: {launch.kernel}:shared=BYTES",
            )  # fmt: skip
        parts.append(part)
        start += launch.threads
        offset += _aligned(launch.shared)
    return tuple(parts)


def _includes(part: Part) -> list[str]:
    lines = []
    for item in part.items:
        include = (
            re.match(r"\s*#\s*include\s*(<.*)", item.tokens[0].text) if item.directive else None
        )
        if include is not None:
            line = f"#include {include.group(1).strip()}"
            cuda = _CUDA_HEADER.match(include.group(1))
            lines.append(f"#ifdef __CUDACC__\n{line}\n#endif" if cuda else line)
    return lines


def _part_text(rewriter: Rewriter) -> str:
    """Return the namespace of a kernel."""
    part = rewriter.part
    lines, macros = [f"namespace {part.space} {{"], []
    for item in part.items:
        if item.directive == "include":
            continue
        if item.directive == "define":
            macros += list(item.names)
        first = item.tokens[0]
        text = rewriter.kernel() if item is part.kernel else rewriter.item(item)
        if not text:
            continue
        opened = "".join(f"namespace {space} {{ " for space in item.spaces)
        lines.append(f'#line {first.line} "{first.file}"')
        lines.append(f"{opened}{text}{' }' * len(item.spaces)}" if opened else text)
    return "\n".join([*lines, *(f"#undef {name}" for name in macros), f"}}  // {part.space}"])


def _fused(name: str, rewriters: Sequence[Rewriter], threads: int) -> str:
    """Return the kernel that dispatches threads to its parts."""
    templates, parameters, grids, branches = [], [], [], []
    for number, rewriter in enumerate(rewriters, 1):
        part = rewriter.part
        templates += rewriter.template_parameters
        part_parameters = rewriter.parameters()
        parameters += [text for text, _ in part_parameters]
        grids.append(f"dim3 slip_grid_{number}")
        end = part.start + part.launch.threads
        call = ", ".join(["slip_place", *(name for _, name in part_parameters)])
        branches.append(
            f"  if (slip_thread >= {part.start}u && slip_thread < {end}u) {{\n"
            f"    if (slip_block < slip::count(slip_grid_{number})) {{\n"
            f"      const slip::Place slip_place = slip::place(slip_grid_{number}, slip_block);\n"
            f"      {part.called}{rewriter.arguments}({call});\n"
            "    }\n    return;\n  }"
        )
    template = f"template <{', '.join(templates)}>\n" if templates else ""
    signature = ",\n    ".join([*parameters, *grids])
    body = "\n".join(branches)
    return (
        f'#line 1 "{name}"\n{template}SLIP_KERNEL({threads}) {name}(\n    {signature}) {{\n'
        "  const unsigned slip_thread = threadIdx.x, slip_block = blockIdx.x;\n"
        f"{body}\n}}\n"
    )
