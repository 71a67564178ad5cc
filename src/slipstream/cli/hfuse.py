"""``slipstream hfuse``: fuse CUDA or Triton kernels horizontally, checked without a GPU."""

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
        EmulationResult,
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
            "memory; NAME=VALUE is an argument for the emulator: a number, or the number of "
            "elements behind a pointer (idx=4096<64: integers below 64). For Triton, "
            "file.py:kernel:grid=16x2,x=4096xfp32,idx=4096xi32<64,n=1000,BLOCK=128: pointers with "
            "their type; num_warps= and num_stages= of the launch. Or a recorded step, "
            "run.slipgraph: which of its kernels could be fused, with the predicted gain.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="FILE", help="File of the fused kernel: .cu or .py."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the result; by default all names joined.")
    ] = "",
    arch: Annotated[
        str,
        typer.Option(
            metavar="ARCH", help="Compile for this GPU with nvcc or Triton, and show resources."
        ),
    ] = "",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare it with its kernels, emulated."),
    ] = True,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device to predict a recorded step for.")
    ] = "h100",
    as_json: Json = False,
) -> None:
    """Fuse independent CUDA or Triton kernels into one that runs them side by side.

    In every block, each CUDA kernel keeps its own threads, barrier and shared memory; each Triton
    kernel keeps its own programs. A multiprocessor can then compute for one kernel while another
    waits for memory. This helps if one kernel is memory-bound, one is compute-bound, and both take
    about as long; otherwise it can be slower. Before you use it, time the separate and the fused
    kernels: CUDA with and without -DSLIP_BLOCKS=N, Triton with EVENLY=True (interleaves the
    programs of all kernels) and EVENLY=False (runs one kernel's programs after another's).

    The fused kernel runs on this processor, in an emulator or Triton's interpreter, and the memory
    it leaves is compared with that of the kernels run sequentially. If it differs, nothing is
    written.

        slipstream hfuse a.cu:reduce:block=256,n=4000 b.cu:scale:block=512 -o fused.cu --arch sm_90

        slipstream hfuse a.py:softmax:grid=8,... b.py:adam:grid=64,... -o fused.py --arch sm_90

    For a recorded step, list independent kernels by predicted gain:

        slipstream hfuse run.slipgraph --device h100
    """
    from slipstream.files import write_text
    from slipstream.techniques.side_by_side import cuda, triton
    from slipstream.techniques.side_by_side.hfuse import parse_launch

    if len(kernels) == 1 and kernels[0].endswith(".slipgraph"):
        _show_pairs(Path(kernels[0]), device, as_json)
        return
    if len(kernels) < 2:
        raise UsageError(
            "got one kernel, but fusion needs at least two",
            remedy="for example a.cu:k1 b.cu:k2, or a recorded step: run.slipgraph",
        )
    if output is None:
        raise UsageError("-o is missing", remedy="for example -o fused.cu")
    if name and not name.isidentifier():
        raise UsageError(f"--name {name} is not an identifier", remedy="--name fused")
    launches = [parse_launch(text) for text in kernels]
    python = {launch.python for launch in launches}
    if len(python) > 1:
        raise UsageError(
            "CUDA C++ and Triton (.py) kernels cannot be fused into one",
            remedy="fuse the CUDA kernels and the Triton kernels separately",
        )
    need_place(output, *((".py",) if True in python else (".cu", ".cuh", ".cpp")))
    _need_other_than(output, [launch.path for launch in launches])
    emulated: EmulationResult | None
    resources: Resources | ProgramResources | None = None
    fused: FusedKernel | FusedPrograms
    summary = ""
    with progress("fusing") as report:
        if True in python:
            fused = programs = triton.fuse(launches, name)
            _need_other_than(output, programs.files)
            emulated = triton.emulate(programs, report=report) if check else None
            if arch:
                report(f"Triton's compiler for {arch}")
                resources = triton.compile_fused(programs, arch)
                summary = resources.summary(programs)
        else:
            fused = threads = cuda.fuse(launches, name)
            emulated = cuda.emulate(threads, report=report) if check else None
            if arch and (reason := cuda.why_no_nvcc()) is not None:
                note(f"not compiled for {arch}: {reason}")
            elif arch:
                report(f"nvcc for {arch}")
                resources = cuda.compile_fused(threads, arch)
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


def _show_pairs(recorded: Path, device: str, as_json: bool) -> None:
    from slipstream.verbs.devices.pairs import StepPairs
    from slipstream.verbs.request import load_recording

    with progress("pairs"):
        pairs = StepPairs.of(load_recording(recorded, note), device)
    emit_result(pairs, *([pairs.table()] if pairs.rows else []), as_json=as_json)
    if not pairs.rows:
        note(str(pairs))


def _need_other_than(output: Path, sources: Sequence[Path]) -> None:
    for source in sources:
        if output.exists() and source.exists() and output.samefile(source):
            raise UsageError(
                f"'{output}' is a source", remedy=f"name another file: -o fused{output.suffix}"
            )


def _table(
    fused: FusedKernel | FusedPrograms,
    emulated: EmulationResult | None,
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
    emulated: EmulationResult | None,
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
