"""Several CUDA kernels in one: each on threads of its own, with a barrier of its own.

Every kernel becomes a device function in a namespace of its own, with all that it calls. There,
thread and block indices are those it had alone, ``__syncthreads`` is a barrier of its threads, and
arrays in shared memory stay apart. The fused kernel sends each thread into its function, so that a
``return`` ends that function alone. The user's files are read, never written.

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

MOST_THREADS, MOST_BARRIERS, WARP = 1024, 15, 32
_REGISTERS, _SM_THREADS = 65536, 2048
# Headers of CUDA's, which an emulated block neither has nor needs.
_CUDA_HEADER = re.compile(r"<(cuda|cooperative_groups|device_|vector_types|math_constants|sm_\d)")


@dataclass(frozen=True)
class Part:
    """One of the kernels, ready to be written.

    Attributes:
        launch: what was asked for.
        space: the namespace it lives in.
        start: the first of its threads.
        barrier: number of its barrier.
        offset: of its dynamic shared memory, bytes.
        kernel: the function.
        items: all it needs, in order.
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
        """How its function is named from outside."""
        return "::".join([self.space, *filter(None, self.kernel.spaces), self.kernel.name])

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.kernel.name

    @property
    def cells(self) -> dict[str, str | int]:
        """What a table says of it."""
        end = self.start + self.launch.threads - 1
        return {"threads": f"{self.start} to {end}", "barrier": self.barrier}

    def to_json(self) -> dict[str, str | int]:
        """The same for a program."""
        return {
            "kernel": self.kernel.name, "first_thread": self.start,
            "threads": self.launch.threads, "barrier": self.barrier,
        }  # fmt: skip


@dataclass(frozen=True)
class FusedKernel:
    """What was made.

    Attributes:
        name: of the kernel.
        source: CUDA C++ of it and all it needs; a plain C++ compiler takes it for an emulated
            block.
        parts: the kernels in it, in the order of their threads.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    name: str
    source: str
    parts: tuple[Part, ...]
    threads: int
    shared_bytes: int
    notes: ClassVar[tuple[str, ...]] = ()

    @property
    def launch_rule(self) -> str:
        """How it is to be launched, in a sentence."""
        blocks = ", ".join(str(math.prod(part.launch.grid)) for part in self.parts)
        return (
            f"{self.name}<<<max({blocks}), {self.threads}, {self.shared_bytes}>>>(arguments of "
            "each kernel in order, then each kernel's own grid as a dim3)"
        )


def resident_blocks(launches: Sequence[Launch], registers: Sequence[int]) -> int:
    """Blocks a multiprocessor shall hold of the fused kernel, so that it holds no fewer threads.

    Args:
        registers: per thread, of each kernel alone.
    """
    threads = sum(one.threads for one in launches)
    alone = [_REGISTERS // (r * one.threads) for one, r in zip(launches, registers, strict=True)]
    return max(min(*alone, _SM_THREADS // threads), 1)


def register_cap(blocks: int, threads: int) -> int:
    """Registers a thread may use where so many blocks shall be resident; as ptxas rounds."""
    return min(_REGISTERS // (blocks * threads) // 8 * 8, 255)


def fuse(launches: Sequence[Launch], name: str = "") -> FusedKernel:
    """One kernel of all of `launches`.

    Args:
        name: of the fused kernel; by default all names joined.

    Raises:
        KernelSourceError: a file cannot be read, or a kernel does what a fused one cannot.
        UnknownNameError: a file has no such kernel.
    """
    parts = _parts(launches)
    threads = sum(one.threads for one in launches)
    name = name or "_".join(part.kernel.name for part in parts)
    rewriters = [Rewriter(part) for part in parts]
    bodies = [_part_text(one) for one in rewriters]
    includes = dict.fromkeys(line for part in parts for line in _includes(part))
    shared = parts[-1].offset + _aligned(parts[-1].launch.shared)
    source = "\n".join(
        [_prologue(), *includes, *bodies, _fused(name, rewriters, threads)]
    )  # fmt: skip
    return FusedKernel(name, source, parts, threads, shared)


def alone(launch: Launch) -> FusedKernel:
    """The kernel as it is, for an emulated block: with indices and barriers of its own."""
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
    threads = sum(one.threads for one in launches)
    for one in launches:
        if one.threads % WARP:
            raise KernelSourceError(
                f"a block of {one.kernel} has {one.threads} threads, no multiple of {WARP}",
                where=str(one.path),
                remedy="barriers of a part of a block count whole warps: choose another block=",
            )
    if threads > MOST_THREADS:
        raise KernelSourceError(
            f"the blocks have {threads} threads together, more than {MOST_THREADS}",
            remedy="smaller blocks: k:block=256",
        )
    if len(launches) > MOST_BARRIERS:
        raise KernelSourceError(
            f"{len(launches)} kernels need as many barriers; a block has {MOST_BARRIERS}",
            remedy="fuse fewer at a time",
        )
    parts, start, offset = [], 0, 0
    for number, one in enumerate(launches, 1):
        items = read_items(one.path)
        kernel = find_kernel(items, one.kernel, one.path.name)
        space = f"slip_{number}_{one.kernel}"
        part = Part(one, space, start, number, offset, kernel, tuple(needed(items, kernel)))
        if one.shared == 0 and any(map(is_dynamic, part.items)):
            raise KernelSourceError(
                f"{one.kernel} has shared memory whose size is told when it is launched",
                where=kernel.tokens[0].where, remedy=f"say it: {one.kernel}:shared=BYTES",
            )  # fmt: skip
        parts.append(part)
        start += one.threads
        offset += _aligned(one.shared)
    return tuple(parts)


def _includes(part: Part) -> list[str]:
    lines = []
    for one in part.items:
        include = re.match(r"\s*#\s*include\s*(<.*)", one.tokens[0].text) if one.directive else None
        if include is not None:
            line = f"#include {include.group(1).strip()}"
            cuda = _CUDA_HEADER.match(include.group(1))
            lines.append(f"#ifdef __CUDACC__\n{line}\n#endif" if cuda else line)
    return lines


def _part_text(rewriter: Rewriter) -> str:
    """The namespace of one kernel."""
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
    """The kernel that sends every thread to its part."""
    templates, parameters, grids, halves = [], [], [], []
    for number, one in enumerate(rewriters, 1):
        part = one.part
        templates += one.template_parameters
        given = one.parameters()
        parameters += [text for text, _ in given]
        grids.append(f"dim3 slip_grid_{number}")
        end = part.start + part.launch.threads
        call = ", ".join(["slip_place", *(name for _, name in given)])
        halves.append(
            f"  if (slip_thread >= {part.start}u && slip_thread < {end}u) {{\n"
            f"    if (slip_block < slip::count(slip_grid_{number})) {{\n"
            f"      const slip::Place slip_place = slip::place(slip_grid_{number}, slip_block);\n"
            f"      {part.called}{one.arguments}({call});\n"
            "    }\n    return;\n  }"
        )
    head = f"template <{', '.join(templates)}>\n" if templates else ""
    listed = ",\n    ".join([*parameters, *grids])
    body = "\n".join(halves)
    return (
        f'#line 1 "{name}"\n{head}SLIP_KERNEL({threads}) {name}(\n    {listed}) {{\n'
        "  const unsigned slip_thread = threadIdx.x, slip_block = blockIdx.x;\n"
        f"{body}\n}}\n"
    )
