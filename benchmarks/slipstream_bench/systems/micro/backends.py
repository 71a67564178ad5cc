"""Rows of ``slipstream bench micro`` about back ends and processors: what interpreting costs beside
calls one after another, and the same bytes from every emulated processor."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slipstream.data import MissingDataError
from slipstream.errors import MissingExtraError
from slipstream.ship import ToolchainError
from slipstream.ship.firmware import (
    Run,
    Target,
    emit,
    export_firmware,
    random_inputs,
    read_firmware,
    run_emulated,
    targets,
    verify_firmware,
)
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

# Measured on the same board from tflite-micro's sources of 2026-08, with CMSIS-NN: 31 steps.
_PEER_A_STEP, _PEER_OPENING = 43, 2_680_000
_CORE_BYTES = 6 * 1024
_INPUTS_QUICK, _INPUTS_FULL = 2, 200
# Of inputs in one image; a board has 2 MiB for constants.
_IMAGE_BYTES = 1 << 20


def _ran(device: str, model: Path) -> tuple[Run, Run, int, list[str]]:
    """One kind of kernels called one after another, and interpreted; how many steps there are; what
    the interpreter's sources call that is not among them."""
    made = export_firmware(model, device=device, backend="interpreter")
    inputs = random_inputs(made.interface, 1)
    found = []
    for sources in (emit(made.program, made.arena), made.sources):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_emulated(sources, made.interface, inputs, Path(folder), made.target))
            foreign = _foreign(made.target, sources, Path(folder))
    return found[0], found[1], len(made.program.steps), foreign


def _foreign(target: Target, sources: Mapping[str, str], folder: Path) -> list[str]:
    """Functions called but not defined, but memcpy and memset."""
    paths = [str(folder / name) for name in sources if name.endswith(".c")]
    linked = str(folder / "linked.o")
    subprocess.run(
        [target.compiler, *target.flags, "-O2", "-r", "-nostdlib", "-o", linked, *paths], check=True
    )
    listed = subprocess.run(
        ["arm-none-eabi-nm", "-u", linked], capture_output=True, text=True, check=True
    )
    return sorted({line.split()[-1] for line in listed.stdout.splitlines()} - {"memcpy", "memset"})


def interpreter_bars(options: BenchOptions, model: Callable[[str], Path]) -> Iterator[Bar]:
    """What the interpreter costs on person_detect."""
    for device in ("cortex-m4", "cortex-m55"):
        rows = {
            f"interpreter on {device}: instructions a step": (60, "instructions"),
            f"interpreter on {device}: code of its core": (_CORE_BYTES, "B"),
            f"interpreter on {device}: library functions but memcpy, memset": (0, "functions"),
        }
        if not any(options.wants(bar, 20) for bar in rows):
            continue
        options.progress(next(iter(rows)))
        try:
            straight, ours, steps, foreign = _ran(device, model("person_detect"))
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            for bar, (most, unit) in rows.items():
                yield not_judged(bar, unit, f"<= {most}", error.what)
            continue
        assert straight.size is not None  # emulated runs link images
        assert ours.size is not None
        before, after = straight.instructions[0], ours.instructions[0]
        opening = f"before the first inference {ours.opening:,}"
        values = (
            ((after - before) / steps,
             f"{after:,} in all, {after / before - 1:.3%} more than the same kernels called in a "
             f"row; {opening}; tflite-micro: {_PEER_A_STEP}, {_PEER_OPENING:,}"),
            (ours.size.code - straight.size.code, f"{ours.size.code:,} B with kernels, "
             f"{straight.size.code:,} B straight; {ours.size.ram} B of variables"),
            (len(foreign), " ".join(foreign) or "so no heap: nothing that allocates is called"),
        )  # fmt: skip
        for (bar, (most, unit)), (value, detail) in zip(rows.items(), values, strict=True):
            if options.wants(bar):
                yield at_most(bar, value, most, unit, n=steps, detail=detail)


def emulated_bars(
    options: BenchOptions, networks: Callable[[], Iterator[tuple[str, bytes]]]
) -> Iterator[Bar]:
    """Bytes of all networks from emulated processors, both back ends, against tflite-micro."""
    sets = _INPUTS_FULL if options.full else _INPUTS_QUICK
    devices = [one.name for one in targets() if one.board]
    for device in devices if options.full else devices[:1]:
        bar = f"{device}: output bytes of all networks that differ from tflite-micro"
        if not options.wants(bar, 120):
            continue
        options.progress(bar)
        if not shutil.which("qemu-system-arm"):
            yield not_judged(bar, "bytes", "<= 0", "qemu-system-arm is not installed")
            continue
        compared, differing = 0, {}
        try:
            for name, model in networks():
                for backend in ("straight", "interpreter"):
                    found = _differing(name, model, device, backend, sets)
                    compared += found[1]
                    if found[0]:
                        differing[f"{name}, {backend}"] = found[0]
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            yield not_judged(bar, "bytes", "<= 0", error.what)
            continue
        yield at_most(
            bar, sum(differing.values()), 0, "bytes", n=sets,
            detail=f"of {compared:,}, both back ends" + (f"; {differing}" if differing else ""),
        )  # fmt: skip


def _differing(name: str, model: bytes, device: str, backend: str, sets: int) -> tuple[int, int]:
    """(bytes that differ, bytes compared) on the emulated processor."""
    with tempfile.TemporaryDirectory() as folder:
        made = export_firmware(model, name=name, device=device, backend=backend)
        made.write(Path(folder))
        exported = read_firmware(Path(folder))
        each = sum(port.nbytes for port in made.interface.inputs)
        batch = max(1, min(sets, _IMAGE_BYTES // each))
        differing = compared = 0
        for seed, start in enumerate(range(0, sets, batch)):
            found = verify_firmware(exported, sets=min(batch, sets - start), seed=seed)
            differing += sum(place.differing for place in found.places)
            compared += found.places[-1].compared
    return differing, compared
