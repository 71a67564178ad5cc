"""``slipstream hfuse``: CUDA or Triton kernels in one, checked without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, emit_result, need_place, note, progress
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.tables import Table
    from slipstream.techniques.side_by_side.cuda import (
        Emulated,
        FusedKernel,
        Part,
        Resources,
    )
    from slipstream.techniques.side_by_side.triton import (
        FusedPrograms,
        ProgramPart,
        ProgramResources,
    )


def command(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL KERNEL...",
            help="file.cu:kernel, or with its launch: a.cu:k1<float>:block=32x8,grid=16,n=1000. "
            "block= and grid= are threads and blocks; shared= the bytes of extern __shared__ "
            "memory; an argument's name gives the emulator its value: a number, or how many "
            "elements a pointer points to (idx=4096<64: integers below 64). Of Triton, "
            "file.py:kernel:grid=16x2,x=4096xfp32,idx=4096xi32<64,n=1000,BLOCK=128: pointers with "
            "their type; num_warps= and num_stages= as it is launched. Or a recorded step, "
            "run.slipgraph: which of its kernels could be fused so, and for how much.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="FILE", help="Where the fused kernel goes: .cu or .py."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the fused kernel; by default all names joined.")
    ] = "",
    arch: Annotated[
        str,
        typer.Option(
            metavar="ARCH", help="Compile for this GPU, with nvcc or Triton, and tell its report."
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Run it against its kernels, emulated."),
    ] = True,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="On which a recorded step is looked at.")
    ] = "h100",
    as_json: Json = False,
) -> None:
    """Fuse independent CUDA or Triton kernels into one that runs them side by side.

    Each CUDA kernel keeps threads, barrier and shared memory of its own in every block; each Triton
    kernel programs of its own. A multiprocessor so computes for one while another waits for memory.
    That pays where one is bound by memory and one by arithmetic and both take about as long; else
    it may well be slower: before you use it, time the kernels alone and the fused one, CUDA's with
    and without -DSLIP_BLOCKS=N, Triton's with EVENLY=True (programs of all kernels in turn, until
    all end) and False (one kernel's after the other's).

    The fused kernel is run on this processor, by an emulator or Triton's interpreter, and its
    memory is compared with what the kernels leave one after the other. Nothing is written where it
    differs.

        slipstream hfuse a.cu:reduce:block=256,n=4000 b.cu:scale:block=512 -o fused.cu --arch sm_90

        slipstream hfuse a.py:softmax:grid=8,... b.py:adam:grid=64,... -o fused.py --arch sm_90

    Of a recorded step it tells which kernels do not wait for each other and would gain most:

        slipstream hfuse run.slipgraph --device h100
    """
    from slipstream.files import write_text
    from slipstream.techniques.side_by_side import cuda, triton
    from slipstream.techniques.side_by_side.hfuse import parse_launch

    if len(kernels) == 1 and kernels[0].endswith(".slipgraph"):
        _tell_pairs(Path(kernels[0]), device, as_json)
        return
    if len(kernels) < 2:
        raise UsageError(
            "one kernel has nothing to be fused with",
            remedy="name two: a.cu:k1 b.cu:k2, or a recorded step: run.slipgraph",
        )
    if output is None:
        raise UsageError("the fused kernel has no place to go", remedy="-o fused.cu")
    if name and not name.isidentifier():
        raise UsageError(f"--name {name} is no name of a kernel")
    launches = [parse_launch(one) for one in kernels]
    python = {one.python for one in launches}
    if len(python) > 1:
        raise UsageError(
            "kernels of CUDA C++ and of Triton (.py) run in no one kernel",
            remedy="fuse those of each apart",
        )
    need_place(output, *((".py",) if True in python else (".cu", ".cuh", ".cpp")))
    _need_no_source(output, [one.path for one in launches])
    emulated: Emulated | None
    resources: Resources | ProgramResources | None = None
    fused: FusedKernel | FusedPrograms
    summary = ""
    with progress("fusing") as report:
        if True in python:
            fused = programs = triton.fuse(launches, name)
            _need_no_source(output, programs.files)
            emulated = triton.emulate(programs, report=report) if check else None
            if arch:
                report(f"Triton's compiler for {arch}")
                resources = triton.compiled(programs, arch)
                summary = resources.summary(programs)
        else:
            fused = threads = cuda.fuse(launches, name)
            emulated = cuda.emulate(threads, report=report) if check else None
            if arch and (reason := cuda.why_no_nvcc()) is not None:
                note(f"not compiled for {arch}: {reason}")
            elif arch:
                report(f"nvcc for {arch}")
                resources = cuda.compiled(threads, arch)
                summary = resources.summary(threads)
    if emulated is None or emulated.equal:
        write_text(output, fused.source)
    emit(
        _table(fused, emulated, resources, summary, output),
        _payload(fused, emulated, resources, output),
        as_json=as_json,
    )
    if emulated is not None and not emulated.equal:
        note(f"{output} was not written")
        raise typer.Exit(1)


def _tell_pairs(recorded: Path, device: str, as_json: bool) -> None:
    from slipstream.verbs.devices.pairs import StepPairs
    from slipstream.verbs.request import load_recording

    with progress("pairs"):
        pairs = StepPairs.of(load_recording(recorded, note), device)
    emit_result(pairs, *([pairs.table()] if pairs.rows else []), as_json=as_json)
    if not pairs.rows:
        note(str(pairs))


def _need_no_source(output: Path, sources: Sequence[Path]) -> None:
    for one in sources:
        if output.exists() and one.exists() and output.samefile(one):
            raise UsageError(
                f"'{output}' is a source", remedy=f"name another file: -o fused{output.suffix}"
            )


def _table(
    fused: FusedKernel | FusedPrograms,
    emulated: Emulated | None,
    resources: Resources | ProgramResources | None,
    summary: str,
    output: Path,
) -> Table:
    from slipstream.tables import Column, Table

    title = f"{fused.name} in {output}: {fused.threads} threads"
    columns = [Column("kernel"), *(Column(name, align="right") for name in fused.parts[0].cells)]
    alone = resources.alone if resources else ()
    if resources:
        columns += [Column("registers", align="right"), Column("shared", align="right")]
    rows, notes = [], []
    parts: Sequence[Part | ProgramPart] = fused.parts
    for number, part in enumerate(parts):
        row: list[Any] = [part.name, *part.cells.values()]
        if resources:
            row += [alone[number].registers, f"{alone[number].shared_bytes} B"]
        rows.append(row)
    notes.append(f"launch: {fused.launch_rule}")
    notes += fused.notes
    notes.append(str(emulated) if emulated else "not checked: --no-check")
    notes += filter(None, [summary])
    return Table(columns, rows, title=title, notes=notes)


def _payload(
    fused: FusedKernel | FusedPrograms,
    emulated: Emulated | None,
    resources: Resources | ProgramResources | None,
    output: Path,
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "kernel": fused.name,
        "output": str(output),
        "threads": fused.threads,
        "shared_bytes": fused.shared_bytes,
        "launch": fused.launch_rule,
        "parts": [part.to_json() for part in fused.parts],
        "emulated": None if emulated is None else {**asdict(emulated), "equal": emulated.equal},
        "resources": None if resources is None else asdict(resources),
    }  # fmt: skip
