"""``slipstream bench micro``: firmware compared with tflite-micro, in bytes and instructions.

Instructions are those of an emulated processor (``qemu-system-arm``), the same in every run; they
are not cycles. Figures of tflite-micro with CMSIS-NN on the device are constants, measured on the
same emulated board, because no registry has its sources.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from slipstream.data import MissingDataError, get
from slipstream.errors import MissingExtraError
from slipstream.ship import ToolchainError
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.firmware import (
    Buffer,
    Firmware,
    FirmwareRun,
    export_firmware,
    forecast,
    greedy_plan,
    plan_memory,
    random_inputs,
    read_firmware,
    run_emulated,
    targets,
    verify_firmware,
)
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.micro.backends import emulated_bars, interpreter_bars
from slipstream_bench.systems.micro.converted import converted_bars
from slipstream_bench.systems.micro.kernels import kernel_bars, safety_bars
from slipstream_bench.systems.micro.models import MODELS, seeded
from slipstream_bench.systems.micro.trained import trained_bars

_MODELS = {
    "person_detect": ("mcu", "person_detect"),
    "micro_speech": ("mcu", "micro_speech_quantized"),
    "ad01": ("mlperf_tiny", "ad01_int8"),
    "kws": ("mlperf_tiny", "kws_ref_model"),
    "resnet large": ("mlperf_tiny", "pretrainedResnet_large_int8"),
    "resnet": ("mlperf_tiny", "pretrainedResnet_quant"),
    "wake word": ("mlperf_tiny", "str_ww_ref_model"),
    "vww": ("mlperf_tiny", "vww_96_int8"),
}
_PEER_INSTRUCTIONS, _PEER_RAM = 22.93, 82_292
_PEER = f"tflite-micro with CMSIS-NN: {_PEER_INSTRUCTIONS} M, {_PEER_RAM:,} B"
_KIB = 1024
_INPUTS_QUICK, _INPUTS_FULL = 10, 200
_PLANS_QUICK, _PLANS_FULL = 60, 500


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: 10 inputs, 60 plans, 1 processor's predictions; full: 200, 500, 3."""
    yield from _planner(options)
    yield from _equal(options)
    yield from _exported(options)
    yield from converted_bars(options, _tiny)
    yield from _emulated(options)
    yield from kernel_bars(options)
    yield from interpreter_bars(options, _model)
    yield from trained_bars(options)
    yield from _forecasts(options)
    yield from safety_bars(options, _networks)
    yield from emulated_bars(options, _networks)


def _model(name: str) -> Path:
    """Return the path of a model.

    Raises:
        MissingDataError: it is not on this machine.
    """
    data_set, stem = _MODELS[name]
    files = get("mcu") if data_set == "mcu" else get("mlperf_tiny")
    return files.paths[stem]


def _equal(options: BenchOptions) -> Iterator[Bar]:
    sets = _INPUTS_FULL if options.full else _INPUTS_QUICK
    for name in _MODELS:
        bar = f"{name}: output bytes that differ from tflite-micro"
        if not options.wants(bar, 10):
            continue
        options.progress(bar)
        try:
            with tempfile.TemporaryDirectory() as folder:
                made = export_firmware(_model(name))
                made.write(Path(folder))
                found = verify_firmware(read_firmware(Path(folder)), sets=sets, emulate=False)
        except (MissingDataError, MissingExtraError) as error:
            yield not_judged(bar, "bytes", "<= 0", error.what)
            continue
        place = found.places[0]
        yield at_most(
            bar, place.differing, 0, "bytes", n=sets,
            detail=f"{place.compared:,} bytes of {sets} random inputs, tensors overlapping",
        )  # fmt: skip


@functools.cache
def _tiny(name: str) -> bytes:
    """Return an architecture of MLPerf Tiny, exported from PyTorch."""
    model, inputs = seeded(name)
    return write_network(quantize_model(model, [inputs], name=name))


def _exported(options: BenchOptions) -> Iterator[Bar]:
    sets = _INPUTS_FULL if options.full else _INPUTS_QUICK
    for name in MODELS:
        for against in ("tflite-micro", "litert"):
            bar = f"{name} from PyTorch: output bytes that differ from {against}"
            if not options.wants(bar, 10):
                continue
            options.progress(bar)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    export_firmware(_tiny(name), name=name).write(Path(folder))
                    exported = read_firmware(Path(folder))
                    found = verify_firmware(exported, against=against, sets=sets, emulate=False)
            except MissingExtraError as error:
                yield not_judged(bar, "bytes", "<= 0", error.what)
                continue
            place = found.places[0]
            rounding = "; its fully connected layers round once, tflite-micro's twice"
            yield at_most(
                bar, place.differing, 0, "bytes", n=sets,
                detail=f"of {place.compared:,}{rounding if against == 'litert' else ''}",
            )  # fmt: skip


def _forecasts(options: BenchOptions) -> Iterator[Bar]:
    """Compare predictions with the emulator's counts, over all networks here."""
    devices = [target.name for target in targets() if target.board]
    for device in devices if options.full else devices[:1]:
        rows = {
            f"{device}: instructions predicted, worst error": 5.0,
            f"{device}: flash predicted, worst error": 3.0,
            f"{device}: RAM predicted, worst error": 0.0,
        }
        if not any(options.wants(bar, 60) for bar in rows):
            continue
        options.progress(next(iter(rows)))
        try:
            errors = [_errors(model, name, device) for name, model in _networks()]
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            yield from (
                not_judged(bar, "%", f"<= {most:g}", error.what) for bar, most in rows.items()
            )
            continue
        for (bar, most), found in zip(rows.items(), zip(*errors, strict=True), strict=True):
            if options.wants(bar):
                yield at_most(
                    bar, 100 * max(map(abs, found)), most, "%", n=len(errors),
                    detail="networks outside the fit of the costs",
                )  # fmt: skip


def _networks() -> Iterator[tuple[str, bytes]]:
    yield from ((name, _model(name).read_bytes()) for name in _MODELS)
    yield from ((name, _tiny(name)) for name in MODELS)


def _errors(model: bytes, name: str, device: str) -> tuple[float, float, float]:
    """Return relative errors of instructions, flash, and RAM with the stack."""
    made = export_firmware(model, name=name, device=device)
    found = forecast(made)
    inputs = random_inputs(made.interface, 1)
    with tempfile.TemporaryDirectory() as folder:
        ran = run_emulated(made.sources, made.interface, inputs, Path(folder), made.target)
    assert ran.size is not None  # an emulated run links an image
    ram = made.arena.size + ran.stack + ran.size.ram
    return (
        found.instructions / ran.instructions[0] - 1, found.flash / ran.size.flash - 1,
        found.ram / ram - 1,
    )  # fmt: skip


@functools.cache
def _person_detect(device: str, overlap: bool) -> tuple[Firmware, FirmwareRun]:
    made = export_firmware(_model("person_detect"), device=device, overlap=overlap)
    inputs = random_inputs(made.interface, 1)
    with tempfile.TemporaryDirectory() as folder:
        ran = run_emulated(made.sources, made.interface, inputs, Path(folder), made.target)
    return made, ran


def _ram(device: str, overlap: bool) -> int:
    made, ran = _person_detect(device, overlap)
    assert ran.size is not None  # an emulated run links an image
    return made.arena.size + ran.stack + ran.size.ram


def _emulated(options: BenchOptions) -> Iterator[Bar]:
    missing = [tool for tool in ("arm-none-eabi-gcc", "qemu-system-arm") if not shutil.which(tool)]

    def millions(device: str) -> float:
        return max(_person_detect(device, True)[1].instructions) / 1e6

    def code() -> int:
        size = _person_detect("cortex-m4", True)[1].size
        assert size is not None
        return size.code

    rows = {
        "person_detect on Cortex-M4: instructions": (
            lambda: millions("cortex-m4"), 16.0, "M", _PEER,
        ),
        "person_detect: RAM without overlap": (
            lambda: _ram("cortex-m4", False), 56 * _KIB, "B", f"arena, variables, stack; {_PEER}",
        ),
        "person_detect: RAM with overlap": (
            lambda: _ram("cortex-m4", True), 40 * _KIB, "B", f"arena, variables, stack; {_PEER}",
        ),
        "person_detect: code": (code, 14 * _KIB, "B", "model and kernels, no constants"),
        "person_detect: instructions before the first inference": (
            lambda: _person_detect("cortex-m4", True)[1].opening, 2000, "instructions",
            "straight calls have nothing to open; tflite-micro: 2.68 M",
        ),
        "person_detect on Cortex-M55: instructions over Cortex-M4's": (
            lambda: millions("cortex-m55") / millions("cortex-m4"), 0.45, "x", "",
        ),
    }  # fmt: skip
    for bar, (measure, target, unit, detail) in rows.items():
        if not options.wants(bar, 20):
            continue
        options.progress(bar)
        if missing:
            yield not_judged(bar, unit, f"<= {target:g}", f"{missing[0]} is not installed")
            continue
        try:
            yield at_most(bar, measure(), target, unit, detail=detail)
        except MissingDataError as error:
            yield not_judged(bar, unit, f"<= {target:g}", error.what)


def _random_buffers(dice: np.random.Generator, count: int, steps: int) -> list[Buffer]:
    made = []
    for _ in range(count):
        first = int(dice.integers(steps))
        last = min(steps - 1, first + int(dice.choice([0, 1, 1, 2, 3, 5, 10, 20])))
        made.append(Buffer(int(dice.integers(16, 5000)), first, last))
    return made


def _planner(options: BenchOptions) -> Iterator[Bar]:
    count = _PLANS_FULL if options.full else _PLANS_QUICK
    proved_bar, greedy_bar = "planner: proved optimal", "planner: plans above greedy"
    if options.wants(proved_bar, 20) or options.wants(greedy_bar, 20):
        options.progress(proved_bar)
        dice = np.random.default_rng(0)
        proved = above = 0
        gap = 0.0
        for _ in range(count):
            buffers = _random_buffers(dice, int(dice.integers(5, 61)), int(dice.integers(5, 61)))
            plan = plan_memory(buffers)
            proved += plan.optimal
            above += plan.peak > greedy_plan(buffers).peak
            gap = max(gap, plan.peak / plan.bound - 1)
        detail = f"random lifetimes, at most 60 buffers, 1 s each; widest gap {gap:.2%}"
        if options.wants(proved_bar):
            yield at_least(proved_bar, 100 * proved / count, 99, "%", n=count, detail=detail)
        if options.wants(greedy_bar):
            yield at_most(greedy_bar, above, 0, "plans", n=count)
    bar = "planner: 1,000 buffers"
    if options.wants(bar, 10):
        options.progress(bar)
        buffers = _random_buffers(np.random.default_rng(1), 1000, 500)
        seconds = float(times_s(lambda: plan_memory(buffers), settle=0)[0])
        plan, greedy = plan_memory(buffers), greedy_plan(buffers)
        yield at_most(
            bar, seconds, 10, "s",
            detail=f"{plan.peak:,} B; bound {plan.bound:,}, greedy {greedy.peak:,}",
        )  # fmt: skip
