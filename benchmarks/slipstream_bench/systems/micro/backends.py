"""Rows of ``slipstream bench micro`` on back ends and processors: cost of the interpreter over
straight calls, and equal bytes from every emulated processor."""

from __future__ import annotations

import functools
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slipstream.data import MissingDataError
from slipstream.errors import MissingExtraError
from slipstream.ship import ToolchainError
from slipstream.ship.firmware import (
    BACKENDS,
    FirmwareRun,
    Target,
    emit,
    export_firmware,
    random_inputs,
    reference_outputs,
    run_emulated,
    targets,
)
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

# Measured on the same board with tflite-micro's sources of 2026-08, with CMSIS-NN: 31 steps.
_PEER_A_STEP, _PEER_OPENING = 43, 2_680_000
_CORE_BYTES = 6 * 1024
_INPUTS_QUICK, _INPUTS_FULL = 2, 200


def _ran(device: str, model: Path) -> tuple[FirmwareRun, FirmwareRun, int, list[str]]:
    """Run the same kernels called in a row and interpreted; also return the number of steps and the
    undefined functions that the sources call."""
    made = export_firmware(model, device=device, backend="interpreter")
    inputs = random_inputs(made.interface, 1)
    found, foreign = [], []
    for sources in (emit(made.program, made.arena), made.sources):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_emulated(sources, made.interface, inputs, Path(folder), made.target))
            foreign += _foreign(made.target, sources, Path(folder))
    return found[0], found[1], len(made.program.steps), sorted(set(foreign))


def _foreign(target: Target, sources: Mapping[str, str], folder: Path) -> list[str]:
    """Return functions that are called but not defined, except memcpy and memset."""
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
    """Measure the interpreter's cost on person_detect."""
    for device in ("cortex-m4", "cortex-m55"):
        rows = {
            f"interpreter on {device}: instructions a step": (60, "instructions"),
            f"interpreter on {device}: code of its core": (_CORE_BYTES, "B"),
            f"interpreter on {device}: library functions but memcpy, memset": (0, "functions"),
            f"{device}: functions of a heap in the images": (0, "functions"),
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
        heap = straight.size.allocators + ours.size.allocators
        opening = f"before the first inference {ours.opening:,}"
        values = (
            ((after - before) / steps,
             f"{after:,} in all, {after / before - 1:.3%} more than the same kernels called in a "
             f"row; {opening}; tflite-micro: {_PEER_A_STEP}, {_PEER_OPENING:,}"),
            (ours.size.code - straight.size.code, f"{ours.size.code:,} B with kernels, "
             f"{straight.size.code:,} B straight; {ours.size.ram} B of variables"),
            (len(foreign), " ".join(foreign)),
            (len(heap), " ".join(heap) or "nm of both back ends' images: no malloc, free, sbrk"),
        )  # fmt: skip
        for (bar, (most, unit)), (value, detail) in zip(rows.items(), values, strict=True):
            if options.wants(bar):
                yield at_most(bar, value, most, unit, n=steps, detail=detail)


def emulated_bars(
    options: BenchOptions, networks: Callable[[], Iterator[tuple[str, bytes]]]
) -> Iterator[Bar]:
    """Yield a row per emulated processor on the output bytes of all networks; a full run resumes by
    row."""
    sets = _INPUTS_FULL if options.full else _INPUTS_QUICK
    devices = [target.name for target in targets() if target.board]
    for device, backend in itertools.product(devices if options.full else devices[:1], BACKENDS):
        bar = f"{device}, {backend}: output bytes of all networks that differ from tflite-micro"
        if not options.wants(bar, 60):
            continue
        differing, compared = {}, 0
        try:
            for name, model in networks():
                options.progress(f"{device}, {backend}: output bytes of {name}")
                firmware = export_firmware(model, name=name, device=device, backend=backend)
                expected = _expected(name, model, sets)
                inputs = random_inputs(firmware.interface, sets)
                with tempfile.TemporaryDirectory() as folder:
                    ran = run_emulated(
                        firmware.sources, firmware.interface, inputs, Path(folder), firmware.target
                    )
                output_bytes = b"".join(
                    output.tobytes() for outputs in ran.outputs for output in outputs
                )
                compared += len(expected)
                differing[name] = sum(a != b for a, b in zip(expected, output_bytes, strict=True))
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            yield not_judged(bar, "bytes", "<= 0", error.what)
            continue
        wrong = {name: count for name, count in differing.items() if count}
        yield at_most(
            bar, sum(wrong.values()), 0, "bytes", n=sets,
            detail=f"of {compared:,}, {len(differing)} networks" + (f"; {wrong}" if wrong else ""),
        )  # fmt: skip


@functools.cache
def _expected(name: str, model: bytes, sets: int) -> bytes:
    """Return the concatenated outputs of tflite-micro on random inputs."""
    interface = export_firmware(model, name=name).interface
    outputs = reference_outputs(model, interface, random_inputs(interface, sets))
    return b"".join(output.tobytes() for each in outputs for output in each)
