"""Checks and compilation of fused Triton kernels in child processes, without a GPU.

Triton's interpreter runs all programs sequentially on the CPU, which shows whether the fused kernel
computes the same, not how fast. Triton's compiler generates machine code for an absent GPU and
reports its resources.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child
from slipstream.errors import ChildDiedError, ChildError, MissingExtraError, UsageError
from slipstream.native import triton_module
from slipstream.techniques.side_by_side.cuda.resources import CompiledKernel, CudaCompilerError
from slipstream.techniques.side_by_side.hfuse import EmulationResult, EmulatorError
from slipstream.techniques.side_by_side.triton.arguments import Argument, arguments_of
from slipstream.techniques.side_by_side.triton.fuse import FusedPrograms, ProgramPart

_CHILD = "slipstream.techniques.side_by_side.triton._child"
_HERE = "slipstream.techniques.side_by_side.triton.check"
_LIMIT_S = 120.0
# The fused kernel has the maximum register count of its kernels. Above this ratio, a kernel with
# few registers may lose resident threads.
_MAX_REGISTER_RATIO = 1.5


@dataclass(frozen=True)
class ProgramResources:
    """Resources of a fused kernel and of its kernels.

    Attributes:
        arch: architecture, such as ``sm_90``.
        alone: resources of each kernel.
        evenly, in_order: resources of the fused kernel with its programs interleaved or in order.
        code_bytes: size of the machine code of the fused kernel, interleaved.
    """

    arch: str
    alone: tuple[CompiledKernel, ...]
    evenly: CompiledKernel
    in_order: CompiledKernel
    code_bytes: int

    def summary(self, fused: FusedPrograms) -> str:
        """Return a one-sentence summary."""
        warning = "; registers differ so much that fewer programs fit: do not fuse them"
        return (
            f"{self.arch}: {self.evenly.registers} registers, {self.evenly.spilled_bytes} B "
            f"spilled, {self.evenly.shared_bytes} B shared; with {fused.evenly}=False "
            f"{self.in_order.registers} registers, {self.in_order.spilled_bytes} B spilled"
        ) + (warning if self._crowded(fused) else "")

    def _crowded(self, fused: FusedPrograms) -> bool:
        """Whether the kernel with the fewest registers loses resident threads."""
        few, part = min(
            zip(self.alone, fused.parts, strict=True), key=lambda pair: pair[0].registers
        )
        threads = 32 * part.num_warps
        alone = few.resident(threads) * threads
        together = self.evenly.resident(fused.threads) * fused.threads
        return self.evenly.registers > _MAX_REGISTER_RATIO * few.registers and together < alone


def run_in_child(task: str, **arguments: Any) -> Any:
    """Run a function of the module that imports Triton; called in the child.

    Raises:
        MissingExtraError: Triton is not installed.
    """
    module = triton_module(_CHILD)
    if module is None:
        raise MissingExtraError("checking or compiling a Triton kernel", "triton", "triton")
    return getattr(module, task)(**arguments)


@contextmanager
def written(fused: FusedPrograms) -> Iterator[str]:
    """Yield a folder with a module of the fused kernel and one of each kernel alone."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        Path(folder, "fused.py").write_text(fused.source, encoding="utf-8")
        for number, part in enumerate(fused.parts, 1):
            Path(folder, f"alone_{number}.py").write_text(part.source, encoding="utf-8")
        yield folder


@contextmanager
def _child(folder: str, **environment: str) -> Iterator[Child]:
    # The user's cache stays untouched, and no device is queried.
    variables = {"TRITON_CACHE_DIR": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": "", **environment}
    with Child("Triton", environment=variables) as child:
        yield child


def described(part: ProgramPart) -> dict[str, Any]:
    """Return a kernel and its arguments as a message to the child."""
    return {
        "kernel": part.alone, "grid": part.launch.grid, "atomics": part.atomics,
        "arguments": [asdict(argument) for argument in arguments_of(part)],
    }  # fmt: skip


def emulate(
    fused: FusedPrograms, *, report: Callable[[str], None] = lambda line: None
) -> EmulationResult:
    """Run the kernels of `fused` sequentially and fused, and compare their memory.

    Raises:
        EmulatorError: a kernel alone fails, or an argument is unknown.
        MissingExtraError: Triton is not installed.
    """
    parts = [described(part) for part in fused.parts]
    running: int | None = 0

    def listen(message: dict[str, Any]) -> None:
        nonlocal running
        running = message["running"]
        name = "the fused kernel" if running is None else f"{fused.parts[running].name} alone"
        report(f"running {name}")

    with written(fused) as folder, _child(folder, TRITON_INTERPRET="1") as child:
        try:
            answer = child.call(
                f"{_HERE}:run_in_child", timeout_s=_LIMIT_S, on_message=listen,
                task="compare", folder=folder, fused=fused.name, parts=parts,
            )  # fmt: skip
        except ChildError as error:
            answer = {"failed": running, "trouble": _failure(error)}
    if answer.get("failed") is not None:
        part = fused.parts[answer["failed"]]
        raise EmulatorError(
            f"{part.name} alone fails in Triton's interpreter: {answer['trouble']}",
            where=str(part.launch.path),
            remedy=f"pass a launch that it supports: {part.name}:grid=...,ARGUMENT=...; if it uses "
            "something the interpreter lacks, such as libdevice, skip the check: --no-check",
        )
    by_float_atomics = any(
        part.atomics and any(argument.type[:2] in ("fp", "bf") for argument in arguments_of(part))
        for part in fused.parts
    )
    return EmulationResult(
        answer.get("orders", 0), answer.get("compared", 0), answer.get("differing", 0),
        answer["trouble"], by_float_atomics, ordered="programs",
    )  # fmt: skip


def _failure(error: ChildError) -> str:
    if not isinstance(error, ChildDiedError):
        return f"it did not finish within {_LIMIT_S:.0f} s (use a smaller grid and arrays)"
    segfault = f"signal {signal.Signals.SIGSEGV.name}" in error.what
    return "it accesses memory out of bounds" if segfault else error.what


def compile_fused(fused: FusedPrograms, arch: str = "sm_90") -> ProgramResources:
    """Compile a fused kernel and each of its kernels alone with Triton's compiler.

    Raises:
        CudaCompilerError: compilation of a kernel fails.
        EmulatorError: the type or value of an argument is unknown.
        MissingExtraError: Triton is not installed.
        UsageError: `arch` is not an architecture.
    """
    match = re.fullmatch(r"sm_(\d+)a?", arch)
    if match is None:
        raise UsageError(f"'{arch}' is not a GPU architecture", remedy="for example sm_90")
    parts = [arguments_of(part) for part in fused.parts]
    grids = [Argument("number", n, "i32") for part in fused.parts for n in part.launch.grid]
    fused_arguments = [argument for arguments in parts for argument in arguments] + grids
    jobs: list[tuple[str, str, Sequence[Argument], int, int, int]] = [
        (f"alone_{n}", part.alone, arguments, part.num_warps, part.num_stages, 0)
        for n, (part, arguments) in enumerate(zip(fused.parts, parts, strict=True), 1)
    ]
    jobs += [
        ("fused", fused.name, [*fused_arguments, Argument("constexpr", evenly)], fused.num_warps,
         fused.num_stages, len(grids) + 1)
        for evenly in (True, False)
    ]  # fmt: skip
    answers = []
    environment = {name: "" for name in ("TRITON_INTERPRET",) if name in os.environ}
    with written(fused) as folder, _child(folder, **environment) as child:
        for module, kernel, arguments, warps, stages, unspecialized in jobs:
            answer = child.call(
                f"{_HERE}:run_in_child", timeout_s=_LIMIT_S, task="machine_code",
                folder=folder, module=module, kernel=kernel,
                arguments=[asdict(argument) for argument in arguments], capability=int(match[1]),
                num_warps=warps, num_stages=stages, unspecialized=unspecialized,
            )  # fmt: skip
            if "trouble" in answer:
                raise CudaCompilerError(
                    f"Triton does not compile {kernel} for {arch}:\n{answer['trouble']}"
                )
            answers.append(answer)
    code_bytes = [answer.pop("code_bytes") for answer in answers]
    for answer in answers:
        answer["barriers"] = tuple(map(tuple, answer["barriers"]))
    *alone, interleaved, in_order = (CompiledKernel(**answer) for answer in answers)
    return ProgramResources(arch, tuple(alone), interleaved, in_order, code_bytes[-2])
