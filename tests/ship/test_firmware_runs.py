"""Firmware equals tflite-micro byte by byte, here and on emulated processors."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import INT8, MICRO_SPEECH, PERSON_DETECT, need_emulator, need_runtimes
from random_networks import RandomNetwork

from slipstream.errors import UsageError
from slipstream.ship import (
    DoesNotFitError,
    ModelFileError,
    ToolchainError,
    UnsupportedModelError,
)
from slipstream.ship.export import write_network
from slipstream.ship.firmware import (
    export_firmware,
    forecast,
    random_inputs,
    read_firmware,
    reference_outputs,
    run_emulated,
    run_here,
    verify_firmware,
)
from slipstream_bench.systems.micro.kernels import changed_bytes

Require = Callable[[str, bool, str], None]


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("overlap", [True, False])
def test_output_equals_tflite_micro(
    name: str, overlap: bool, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    export_firmware(shared_data / name, overlap=overlap).write(tmp_path / "fw")
    found = verify_firmware(read_firmware(tmp_path / "fw"), sets=5, emulate=False)
    assert found.equal
    assert found.places[0].compared >= 10


@pytest.mark.parametrize("against", ["tflite-micro", "litert"])
@pytest.mark.parametrize("kind", ["lookup", "mul", "concatenation", "mean", "transpose", "resize"])
def test_random_operators_of_straight_code_equal_other_runtimes(
    kind: str, against: str, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    network = RandomNetwork(7).network(30, [kind])
    firmware = export_firmware(write_network(network), name="random", device="host")
    inputs = random_inputs(firmware.interface, 3)
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    inputs.append([np.resize(codes, port.shape) for port in firmware.interface.inputs])
    here = run_here(firmware.sources, firmware.interface, inputs, tmp_path)
    expected = reference_outputs(firmware.model, firmware.interface, inputs, against)
    for ours, theirs in zip(here.outputs, expected, strict=True):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.tobytes() == b.tobytes(), network.operators[at]


def test_interpreter_refuses_kernels_of_straight_code_only() -> None:
    data = write_network(RandomNetwork(1).network(1, ["mul"]))
    with pytest.raises(UnsupportedModelError, match="slip_mul_int8") as refused:
        export_firmware(data, backend="interpreter")
    assert "straight" in refused.value.remedy
    notes = [note for table in forecast(export_firmware(data)).tables() for note in table.notes]
    assert any("slip_mul_int8" in note for note in notes)


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m7", "cortex-m55"])
def test_emulated_processors_equal_this_machine(
    device: str, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_emulator(require)
    firmware = export_firmware(shared_data / PERSON_DETECT, device=device)
    inputs = random_inputs(firmware.interface, 2)
    host = run_here(firmware.sources, firmware.interface, inputs, tmp_path / "here")
    emulated = run_emulated(
        firmware.sources, firmware.interface, inputs, tmp_path / "there", firmware.target
    )
    assert [[b.tobytes() for b in a] for a in host.outputs] == [
        [b.tobytes() for b in a] for a in emulated.outputs
    ]
    # The bars: tflite-micro with CMSIS-NN takes 22.93 M instructions and 82,292 B.
    assert max(emulated.instructions) <= 16_000_000
    assert emulated.size is not None
    assert firmware.arena.size + emulated.stack + emulated.size.ram <= 40 * 1024
    assert emulated.size.code <= 14 * 1024
    assert emulated.size.allocators == ()


def test_firmware_calls_only_memcpy_and_memset(shared_data: Path, tmp_path: Path) -> None:
    firmware = export_firmware(shared_data / MICRO_SPEECH)
    inputs = random_inputs(firmware.interface, 1)
    run_here(firmware.sources, firmware.interface, inputs, tmp_path, flags=["-fno-stack-protector"])
    listed = subprocess.run(
        ["nm", "-u", str(tmp_path / "model.so")], capture_output=True, text=True, check=True
    ).stdout
    called = {line.split()[-1].split("@")[0] for line in listed.splitlines() if " U " in line}
    assert called <= {"memcpy", "memset"}


def test_detects_a_heap_in_an_image(shared_data: Path, tmp_path: Path, require: Require) -> None:
    need_emulator(require)
    firmware = export_firmware(shared_data / MICRO_SPEECH)
    sources = dict(firmware.sources)
    sources["model.c"] = (
        "#include <stdlib.h>\nvoid *_sbrk(int n) { (void)n; return (void *)-1; }\n"
        + (
            sources["model.c"].replace(
                "call_0(arena);", "void *volatile heap = malloc(8); free(heap); call_0(arena);"
            )
        )
    )
    inputs = random_inputs(firmware.interface, 1)
    ran = run_emulated(sources, firmware.interface, inputs, tmp_path, firmware.target)
    assert ran.size is not None
    assert {"malloc", "free", "_sbrk"} <= set(ran.size.allocators)


MAIN = """
#include <stdlib.h>
#include "model.h"
int main(void) {
  int8_t *arena = aligned_alloc(16, RANDOM_ARENA_BYTES);
  for (int run = 0; run < 3; run++) {
    for (int i = 0; i < RANDOM_ARENA_BYTES; i++) arena[i] = (int8_t)(i * 7919 >> run);
    random_invoke(arena);
  }
  free(arena);
}
"""


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m55"])
def test_sanitizers_accept_random_operators(device: str, tmp_path: Path, require: Require) -> None:
    need_runtimes(require)
    data = write_network(RandomNetwork(2).network(24))
    firmware = export_firmware(data, name="random", device=device)
    for name, text in {**firmware.sources, "main.c": MAIN}.items():
        (tmp_path / name).write_text(text)
    program = str(tmp_path / "program")
    sources = [str(path) for path in tmp_path.glob("*.c")]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    subprocess.run(["gcc", "-std=c11", "-O1", *checks, "-o", program, *sources], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_reports_missing_bytes_and_their_operator(shared_data: Path) -> None:
    firmware = export_firmware(shared_data / PERSON_DETECT)
    with pytest.raises(DoesNotFitError) as refused:
        export_firmware(shared_data / PERSON_DETECT, ram_bytes=forecast(firmware).ram - 1)
    assert refused.value.missing_bytes == 1
    ram = forecast(firmware).ram
    assert f"{ram:,} B are required, but the device has {ram - 1:,} B" in refused.value.what
    assert "Conv2d_2_depthwise" in str(refused.value.where)
    with pytest.raises(DoesNotFitError, match="flash"):
        export_firmware(shared_data / PERSON_DETECT, flash_bytes=100_000)


def test_models_share_an_arena_between_inferences(
    shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    names = (PERSON_DETECT, MICRO_SPEECH, "mlperf_tiny/kws_ref_model.tflite")
    exports = [export_firmware(shared_data / name) for name in names]
    inputs = [random_inputs(firmware.interface, 3) for firmware in exports]
    alone = [
        run_here(
            firmware.sources, firmware.interface, arrays, tmp_path / firmware.network.name
        ).outputs
        for firmware, arrays in zip(exports, inputs, strict=True)
    ]
    # One program of all three, with an arena of the largest size.
    folders = [tmp_path / "program" / firmware.interface.name for firmware in exports]
    for firmware, folder in zip(exports, folders, strict=True):
        firmware.write(folder)
    included = "".join(f'#include "{folder.name}/model.h"\n' for folder in folders)
    sizes = [f"{firmware.interface.name.upper()}_ARENA_BYTES" for firmware in exports]
    main = folders[0].parent / "main.c"
    main.write_text(f"{included}const int bytes[] = {{{', '.join(sizes)}}};\n")
    kernels = {path.name: path for folder in folders for path in folder.glob("*.c")}
    del kernels["model.c"]
    models = [folder / "model.c" for folder in folders]
    library = str(tmp_path / "program.so")
    command = ["gcc", "-std=c11", "-O2", "-shared", "-fPIC", "-o", library, main, *models]
    subprocess.run([*map(str, command), *map(str, kernels.values())], check=True)
    code = ctypes.CDLL(library)
    needed = (ctypes.c_int * len(exports)).in_dll(code, "bytes")
    assert list(needed) == [firmware.arena.size for firmware in exports]
    memory = np.zeros(max(needed) + 16, np.int8)
    arena = memory[-memory.ctypes.data % 16 :][: max(needed)]
    for turn in range(3):
        for firmware, arrays, expected in zip(exports, inputs, alone, strict=True):
            source, target = firmware.interface.inputs[0], firmware.interface.outputs[0]
            arena[source.offset :][: source.nbytes] = arrays[turn][0].reshape(-1)
            code[f"{firmware.interface.name}_invoke"](ctypes.c_void_p(arena.ctypes.data))
            output = arena[target.offset :][: target.nbytes]
            assert output.tobytes() == expected[turn][0].tobytes()


@pytest.mark.parametrize("overlap", [True, False])
def test_unused_memory_is_never_read(overlap: bool, shared_data: Path) -> None:
    firmware = export_firmware(shared_data / PERSON_DETECT, overlap=overlap)
    assert changed_bytes(firmware, emulate=False) == 0


def test_detects_reads_of_unused_memory(shared_data: Path) -> None:
    firmware = export_firmware(shared_data / MICRO_SPEECH)
    # A plan in which no step reads the first step's output.
    regions = tuple(
        replace(region, last=region.first) if region.first == region.last - 1 else region
        for region in firmware.arena.regions
    )
    assert changed_bytes(
        replace(firmware, arena=replace(firmware.arena, regions=regions)), emulate=False
    )


@pytest.mark.parametrize("missing", ["gcc", "arm-none-eabi-gcc", "qemu-system-arm"])
def test_names_a_missing_tool_and_its_package(
    missing: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in {"gcc", "arm-none-eabi-gcc", "qemu-system-arm"} - {missing}:
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    firmware = export_firmware(shared_data / MICRO_SPEECH)

    def run() -> None:
        if missing == "gcc":
            run_here(firmware.sources, firmware.interface, [], tmp_path / "here")
        run_emulated(firmware.sources, firmware.interface, [], tmp_path / "there", firmware.target)

    with pytest.raises(ToolchainError, match=f"^{missing} is not installed") as refused:
        run()
    assert str(refused.value.remedy).startswith("apt-get install")


def test_a_compiler_that_hangs_is_named(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("slipstream.ship.firmware.build._COMPILE_S", 0.1)
    firmware = export_firmware(shared_data / PERSON_DETECT, device="cortex-m4")
    inputs = random_inputs(firmware.interface, 1)
    with pytest.raises(ToolchainError, match=r"gcc did not finish within 0\.1 s"):
        run_here(firmware.sources, firmware.interface, inputs, tmp_path / "here")


def test_rewrites_a_folder_without_stale_files(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fw"
    for device, kernel in (("cortex-m4", "conv.c"), ("cortex-m55", "conv_plain.c")):
        written = export_firmware(shared_data / MICRO_SPEECH, device=device).write(folder)
        assert sorted(folder.iterdir()) == written
        assert folder / kernel in written
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the firmware"):
        export_firmware(shared_data / MICRO_SPEECH).write(tmp_path / "file" / "fw")


def test_refuses_an_incomplete_folder(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fw"
    export_firmware(shared_data / MICRO_SPEECH).write(folder)
    (folder / "model.c").unlink()
    with pytest.raises(ModelFileError, match="incomplete"):
        read_firmware(folder)
