"""Fused Triton kernels run against their kernels, and compiled, in child processes; without a GPU.

Triton's own interpreter runs every program on this processor, one after the other: whether the
fused kernel computes the same, not how fast. Its compiler makes machine code for a GPU that is not
here, and tells what that needs.
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
from slipstream.techniques.side_by_side.cuda.resources import Compiled, CudaCompilerError
from slipstream.techniques.side_by_side.hfuse import Emulated, EmulatorError
from slipstream.techniques.side_by_side.triton.arguments import Argument, arguments_of
from slipstream.techniques.side_by_side.triton.fuse import FusedPrograms, ProgramPart

_CHILD = "slipstream.techniques.side_by_side.triton._child"
_HERE = "slipstream.techniques.side_by_side.triton.check"
_LIMIT_S = 120.0
# Registers are the most of any kernel: above this, one that needs few pays for one that needs many.
_UNEQUAL = 1.5


@dataclass(frozen=True)
class ProgramResources:
    """A fused kernel's needs beside those of its kernels.

    Attributes:
        arch: as ``sm_90``.
        alone: of each kernel.
        evenly, in_order: of the fused one, as it deals its programs out.
        code_bytes: of the one machine code that has all kernels, dealt out evenly.
    """

    arch: str
    alone: tuple[Compiled, ...]
    evenly: Compiled
    in_order: Compiled
    code_bytes: int

    def summary(self, fused: FusedPrograms) -> str:
        """In a sentence."""
        apart = "; registers differ so much that fewer programs fit: better apart"
        return (
            f"{self.arch}: {self.evenly.registers} registers, {self.evenly.spilled_bytes} B "
            f"spilled, {self.evenly.shared_bytes} B shared; with {fused.evenly}=False "
            f"{self.in_order.registers} registers, {self.in_order.spilled_bytes} B spilled"
        ) + (apart if self._crowded(fused) else "")

    def _crowded(self, fused: FusedPrograms) -> bool:
        """Whether the kernel of fewest registers loses threads on a multiprocessor."""
        few, part = min(zip(self.alone, fused.parts, strict=True), key=lambda one: one[0].registers)
        threads = 32 * part.num_warps
        alone = few.resident(threads) * threads
        together = self.evenly.resident(fused.threads) * fused.threads
        return self.evenly.registers > _UNEQUAL * few.registers and together < alone


def run_in_child(task: str, **arguments: Any) -> Any:
    """Called in the child: a function of the module that imports Triton.

    Raises:
        MissingExtraError: Triton is not installed.
    """
    module = triton_module(_CHILD)
    if module is None:
        raise MissingExtraError("checking or compiling a Triton kernel", "triton", "triton")
    return getattr(module, task)(**arguments)


@contextmanager
def written(fused: FusedPrograms) -> Iterator[str]:
    """A folder with the fused kernel's module, and one for each kernel alone."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        Path(folder, "fused.py").write_text(fused.source, encoding="utf-8")
        for number, part in enumerate(fused.parts, 1):
            Path(folder, f"alone_{number}.py").write_text(part.source, encoding="utf-8")
        yield folder


@contextmanager
def _child(folder: str, **environment: str) -> Iterator[Child]:
    # Nothing is left in the user's cache, and no device is asked.
    variables = {"TRITON_CACHE_DIR": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": "", **environment}
    with Child("Triton", environment=variables) as child:
        yield child


def described(part: ProgramPart) -> dict[str, Any]:
    """A kernel and what it is given, as the child is told it."""
    return {
        "kernel": part.alone, "grid": part.launch.grid, "atomics": part.atomics,
        "arguments": [asdict(one) for one in arguments_of(part)],
    }  # fmt: skip


def emulate(fused: FusedPrograms, *, report: Callable[[str], None] = lambda line: None) -> Emulated:
    """Run the kernels of `fused` one after the other and fused, and compare their memory.

    Raises:
        EmulatorError: a kernel alone fails, or what it is to be given is not known.
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
            answer = {"failed": running, "trouble": _why_it_ended(error)}
    if answer.get("failed") is not None:
        part = fused.parts[answer["failed"]]
        raise EmulatorError(
            f"{part.name} alone fails in Triton's interpreter: {answer['trouble']}",
            where=str(part.launch.path),
            remedy=f"give it what it expects: {part.name}:grid=...,ARGUMENT=...; what the "
            "interpreter has not, as libdevice, goes unchecked: --no-check",
        )
    by_float_atomics = any(
        part.atomics and any(one.type[:2] in ("fp", "bf") for one in arguments_of(part))
        for part in fused.parts
    )
    return Emulated(
        answer.get("orders", 0), answer.get("compared", 0), answer.get("differing", 0),
        answer["trouble"], by_float_atomics, ordered="programs",
    )  # fmt: skip


def _why_it_ended(error: ChildError) -> str:
    if not isinstance(error, ChildDiedError):
        return f"it did not end within {_LIMIT_S:.0f} s (a smaller grid and arrays check the same)"
    left = f"signal {signal.Signals.SIGSEGV.name}" in error.what
    return "it leaves its arrays" if left else error.what


def compiled(fused: FusedPrograms, arch: str = "sm_90") -> ProgramResources:
    """Compile a fused kernel and each of its kernels alone, with Triton's own compiler.

    Raises:
        CudaCompilerError: it does not take one of them.
        EmulatorError: the type or value of an argument is not known.
        MissingExtraError: Triton is not installed.
        UsageError: `arch` is none.
    """
    match = re.fullmatch(r"sm_(\d+)a?", arch)
    if match is None:
        raise UsageError(f"'{arch}' is no GPU", remedy="as sm_90")
    parts = [arguments_of(part) for part in fused.parts]
    grids = [Argument("number", n, "i32") for part in fused.parts for n in part.launch.grid]
    both = [one for some in parts for one in some] + grids
    jobs: list[tuple[str, str, Sequence[Argument], int, int, int]] = [
        (f"alone_{n}", part.alone, some, part.num_warps, part.num_stages, 0)
        for n, (part, some) in enumerate(zip(fused.parts, parts, strict=True), 1)
    ]
    jobs += [
        ("fused", fused.name, [*both, Argument("constexpr", dealt)], fused.num_warps,
         fused.num_stages, len(grids) + 1)
        for dealt in (True, False)
    ]  # fmt: skip
    answers = []
    environment = {name: "" for name in ("TRITON_INTERPRET",) if name in os.environ}
    with written(fused) as folder, _child(folder, **environment) as child:
        for module, kernel, arguments, warps, stages, unspecialized in jobs:
            answer = child.call(
                f"{_HERE}:run_in_child", timeout_s=_LIMIT_S, task="machine_code",
                folder=folder, module=module, kernel=kernel,
                arguments=[asdict(one) for one in arguments], capability=int(match[1]),
                num_warps=warps, num_stages=stages, unspecialized=unspecialized,
            )  # fmt: skip
            if "trouble" in answer:
                raise CudaCompilerError(
                    f"Triton does not compile {kernel} for {arch}:\n{answer['trouble']}"
                )
            answers.append(answer)
    code_bytes = [answer.pop("code_bytes") for answer in answers]
    needs = [Compiled(**{**one, "barriers": tuple(map(tuple, one["barriers"]))}) for one in answers]
    *alone, evenly, in_order = needs
    return ProgramResources(arch, tuple(alone), evenly, in_order, code_bytes[-2])
