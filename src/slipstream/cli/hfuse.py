"""``slipstream hfuse``: CUDA kernels in one, checked without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, need_place, note, progress
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.tables import Table
    from slipstream.techniques.side_by_side.cuda import Emulated, FusedKernel, Resources


def command(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL KERNEL...",
            help="file.cu:kernel, or with its launch: a.cu:k1<float>:block=32x8,grid=16,n=1000. "
            "block= and grid= are threads and blocks; shared= the bytes of extern __shared__ "
            "memory; an argument's name gives the emulator its value: a number, or how many "
            "elements a pointer points to (idx=4096<64: whole numbers below 64).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", metavar="FILE.cu", help="Where the fused kernel goes.")
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the fused kernel; by default all names joined.")
    ] = "",
    arch: Annotated[
        str,
        typer.Option(metavar="ARCH", help="Compile for this GPU with nvcc, and tell its report."),
    ] = "",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Run it against its kernels in an emulated block."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Fuse independent CUDA kernels into one whose blocks run them side by side.

    Each kernel keeps threads, barrier and shared memory of its own, so that a multiprocessor
    computes for one while another waits for memory. That pays where one is bound by memory and
    one by arithmetic and both take about as long; else it may well be slower: time both, the
    kernels alone and the fused one, compiled with and without -DSLIP_BLOCKS=N, before you use it.

    The fused kernel is run on this processor, thread by thread, and its memory is compared with
    what the kernels leave one after the other. Nothing is written where it differs.

        slipstream hfuse a.cu:reduce:block=256,n=4000 b.cu:scale:block=512 -o fused.cu --arch sm_90
    """
    from slipstream.files import write_text
    from slipstream.techniques.side_by_side.cuda import (
        compiled,
        emulate,
        fuse,
        parse_launch,
        why_no_nvcc,
    )

    if len(kernels) < 2:
        raise UsageError(
            "one kernel has nothing to be fused with", remedy="name two: a.cu:k1 b.cu:k2"
        )
    if name and not name.isidentifier():
        raise UsageError(f"--name {name} is no name of a kernel")
    need_place(output, ".cu", ".cuh", ".cpp")
    launches = [parse_launch(one) for one in kernels]
    for one in launches:
        if output.exists() and one.path.exists() and output.samefile(one.path):
            raise UsageError(f"'{output}' is a source", remedy="name another file: -o fused.cu")
    emulated: Emulated | None = None
    resources: Resources | None = None
    with progress("fusing") as say:
        fused = fuse(launches, name)
        if check:
            emulated = emulate(fused, say=say)
        if arch and (reason := why_no_nvcc()) is not None:
            note(f"not compiled for {arch}: {reason}")
        elif arch:
            say(f"nvcc for {arch}")
            resources = compiled(fused, arch)
    if emulated is None or emulated.equal:
        write_text(output, fused.source)
    emit(
        _table(fused, emulated, resources, output),
        _payload(fused, emulated, resources, output),
        as_json=as_json,
    )
    if emulated is not None and not emulated.equal:
        note(f"{output} was not written")
        raise typer.Exit(1)


def _table(
    fused: FusedKernel, emulated: Emulated | None, resources: Resources | None, output: Path
) -> Table:
    from slipstream.tables import Column, Table

    title = f"{fused.name} in {output}: {fused.threads} threads"
    columns = [Column("kernel"), Column("threads"), Column("barrier", align="right")]
    alone = resources.alone if resources else ()
    if resources:
        columns += [Column("registers", align="right"), Column("shared", align="right")]
    rows, notes = [], []
    for number, part in enumerate(fused.parts):
        end = part.start + part.launch.threads - 1
        row: list[Any] = [part.kernel.name, f"{part.start} to {end}", part.barrier]
        if resources:
            row += [alone[number].registers, f"{alone[number].shared_bytes} B"]
        rows.append(row)
    notes.append(f"launch: {fused.launch_rule}")
    notes.append(str(emulated) if emulated else "not checked: --no-check")
    if resources:
        free, capped = resources.free, resources.capped
        notes.append(
            f"{resources.arch}: {free.registers} registers, {free.spilled_bytes} B spilled; with "
            f"-DSLIP_BLOCKS={resources.blocks} {capped.registers} of at most {resources.cap}, "
            f"{capped.spilled_bytes} B spilled; barriers: "
            f"{resources.barrier_trouble(fused) or 'each kernel its own'}"
        )
    return Table(columns, rows, title=title, notes=notes)


def _payload(
    fused: FusedKernel, emulated: Emulated | None, resources: Resources | None, output: Path
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "kernel": fused.name,
        "output": str(output),
        "threads": fused.threads,
        "shared_bytes": fused.shared_bytes,
        "launch": fused.launch_rule,
        "parts": [
            {
                "kernel": part.kernel.name, "first_thread": part.start,
                "threads": part.launch.threads, "barrier": part.barrier,
            }
            for part in fused.parts
        ],
        "emulated": None if emulated is None else {**asdict(emulated), "equal": emulated.equal},
        "resources": None if resources is None else asdict(resources),
    }  # fmt: skip
