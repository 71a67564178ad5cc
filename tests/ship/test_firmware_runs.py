"""Generated firmware gives the bytes of tflite-micro, here and on emulated processors."""

from __future__ import annotations

import ctypes
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
    other_outputs,
    random_inputs,
    read_firmware,
    run_emulated,
    run_here,
    verify_firmware,
)
from slipstream_bench.systems.micro.kernels import changed_bytes

Require = Callable[[str, bool, str], None]


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("overlap", [True, False])
def test_every_output_byte_is_tflite_micro_s(
    name: str, overlap: bool, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    export_firmware(shared_data / name, overlap=overlap).write(tmp_path / "fw")
    found = verify_firmware(read_firmware(tmp_path / "fw"), sets=5, emulate=False)
    assert found.equal
    assert found.places[0].compared >= 10


@pytest.mark.parametrize("against", ["tflite-micro", "litert"])
@pytest.mark.parametrize("kind", ["lookup", "mul", "concatenation", "mean", "transpose", "resize"])
def test_random_operators_of_straight_code_give_every_byte(
    kind: str, against: str, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    network = RandomNetwork(7).network(30, [kind])
    made = export_firmware(write_network(network), name="random", device="host")
    inputs = random_inputs(made.interface, 3)
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    inputs.append([np.resize(codes, port.shape) for port in made.interface.inputs])
    here = run_here(made.sources, made.interface, inputs, tmp_path)
    expected = other_outputs(made.model, made.interface, inputs, against)
    for ours, theirs in zip(here.outputs, expected, strict=True):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.tobytes() == b.tobytes(), network.operators[at]


def test_what_only_straight_code_calls_is_refused_and_forecast_with_a_note() -> None:
    data = write_network(RandomNetwork(1).network(1, ["mul"]))
    with pytest.raises(UnsupportedModelError, match="slip_mul_int8") as refused:
        export_firmware(data, backend="interpreter")
    assert "straight" in refused.value.remedy
    notes = [note for table in forecast(export_firmware(data)).tables() for note in table.notes]
    assert any("slip_mul_int8" in note for note in notes)


@pytest.mark.parametrize("device", ["cortex-m4", "cortex-m7", "cortex-m55"])
def test_emulated_processors_give_the_same_bytes(
    device: str, shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_emulator(require)
    made = export_firmware(shared_data / PERSON_DETECT, device=device)
    inputs = random_inputs(made.interface, 2)
    here = run_here(made.sources, made.interface, inputs, tmp_path / "here")
    there = run_emulated(made.sources, made.interface, inputs, tmp_path / "there", made.target)
    assert [[b.tobytes() for b in a] for a in here.outputs] == [
        [b.tobytes() for b in a] for a in there.outputs
    ]
    # The bars: tflite-micro with CMSIS-NN takes 22.93 M instructions and 82,292 B.
    assert max(there.instructions) <= 16_000_000
    assert there.size is not None
    assert made.arena.size + there.stack + there.size.ram <= 40 * 1024
    assert there.size.code <= 14 * 1024
    assert there.size.allocators == ()


def test_firmware_calls_nothing_but_memcpy_and_memset(shared_data: Path, tmp_path: Path) -> None:
    made = export_firmware(shared_data / MICRO_SPEECH)
    inputs = random_inputs(made.interface, 1)
    run_here(made.sources, made.interface, inputs, tmp_path, flags=["-fno-stack-protector"])
    listed = subprocess.run(
        ["nm", "-u", str(tmp_path / "model.so")], capture_output=True, text=True, check=True
    ).stdout
    called = {line.split()[-1].split("@")[0] for line in listed.splitlines() if " U " in line}
    assert called <= {"memcpy", "memset"}


def test_a_heap_in_an_image_is_seen(shared_data: Path, tmp_path: Path, require: Require) -> None:
    need_emulator(require)
    made = export_firmware(shared_data / MICRO_SPEECH)
    sources = dict(made.sources)
    sources["model.c"] = (
        "#include <stdlib.h>\nvoid *_sbrk(int n) { (void)n; return (void *)-1; }\n"
        + (
            sources["model.c"].replace(
                "call_0(arena);", "void *volatile heap = malloc(8); free(heap); call_0(arena);"
            )
        )
    )
    inputs = random_inputs(made.interface, 1)
    ran = run_emulated(sources, made.interface, inputs, tmp_path, made.target)
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
def test_sanitizers_find_nothing_in_random_operators(
    device: str, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    data = write_network(RandomNetwork(2).network(24))
    made = export_firmware(data, name="random", device=device)
    for name, text in {**made.sources, "main.c": MAIN}.items():
        (tmp_path / name).write_text(text)
    program = str(tmp_path / "program")
    sources = [str(path) for path in tmp_path.glob("*.c")]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    subprocess.run(["gcc", "-std=c11", "-O1", *checks, "-o", program, *sources], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_does_not_fit_says_by_how_much_and_where(shared_data: Path) -> None:
    whole = export_firmware(shared_data / PERSON_DETECT)
    with pytest.raises(DoesNotFitError) as refused:
        export_firmware(shared_data / PERSON_DETECT, ram_bytes=forecast(whole).ram - 1)
    assert refused.value.missing_bytes == 1
    ram = forecast(whole).ram
    assert f"{ram:,} B are needed, the device has {ram - 1:,} B" in refused.value.what
    assert "Conv2d_2_depthwise" in str(refused.value.where)
    with pytest.raises(DoesNotFitError, match="flash"):
        export_firmware(shared_data / PERSON_DETECT, flash_bytes=100_000)


def test_models_of_one_program_share_an_arena_between_inferences(
    shared_data: Path, tmp_path: Path, require: Require
) -> None:
    need_runtimes(require)
    names = (PERSON_DETECT, MICRO_SPEECH, "mlperf_tiny/kws_ref_model.tflite")
    made = [export_firmware(shared_data / name) for name in names]
    inputs = [random_inputs(one.interface, 3) for one in made]
    alone = [
        run_here(one.sources, one.interface, given, tmp_path / one.network.name).outputs
        for one, given in zip(made, inputs, strict=True)
    ]
    # One program of all three, one arena as large as the largest.
    folders = [tmp_path / "program" / one.interface.name for one in made]
    for one, folder in zip(made, folders, strict=True):
        one.write(folder)
    included = "".join(f'#include "{folder.name}/model.h"\n' for folder in folders)
    sizes = [f"{one.interface.name.upper()}_ARENA_BYTES" for one in made]
    main = folders[0].parent / "main.c"
    main.write_text(f"{included}const int bytes[] = {{{', '.join(sizes)}}};\n")
    kernels = {path.name: path for folder in folders for path in folder.glob("*.c")}
    del kernels["model.c"]
    models = [folder / "model.c" for folder in folders]
    library = str(tmp_path / "program.so")
    command = ["gcc", "-std=c11", "-O2", "-shared", "-fPIC", "-o", library, main, *models]
    subprocess.run([*map(str, command), *map(str, kernels.values())], check=True)
    code = ctypes.CDLL(library)
    needed = (ctypes.c_int * len(made)).in_dll(code, "bytes")
    assert list(needed) == [one.arena.size for one in made]
    memory = np.zeros(max(needed) + 16, np.int8)
    arena = memory[-memory.ctypes.data % 16 :][: max(needed)]
    for turn in range(3):
        for one, given, wanted in zip(made, inputs, alone, strict=True):
            takes, gives = one.interface.inputs[0], one.interface.outputs[0]
            arena[takes.offset :][: takes.nbytes] = given[turn][0].reshape(-1)
            code[f"{one.interface.name}_invoke"](ctypes.c_void_p(arena.ctypes.data))
            left = arena[gives.offset :][: gives.nbytes]
            assert left.tobytes() == wanted[turn][0].tobytes()


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_read_where_nothing_lives(overlap: bool, shared_data: Path) -> None:
    made = export_firmware(shared_data / PERSON_DETECT, overlap=overlap)
    assert changed_bytes(made, emulate=False) == 0


def test_what_is_read_where_nothing_lives_is_seen(shared_data: Path) -> None:
    made = export_firmware(shared_data / MICRO_SPEECH)
    # A plan that believes that nobody reads the first step's output.
    regions = tuple(
        replace(one, last=one.first) if one.first == one.last - 1 else one
        for one in made.arena.regions
    )
    assert changed_bytes(replace(made, arena=replace(made.arena, regions=regions)), emulate=False)


@pytest.mark.parametrize("missing", ["gcc", "arm-none-eabi-gcc", "qemu-system-arm"])
def test_a_missing_tool_is_told_with_what_installs_it(
    missing: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in {"gcc", "arm-none-eabi-gcc", "qemu-system-arm"} - {missing}:
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    made = export_firmware(shared_data / MICRO_SPEECH)

    def run() -> None:
        if missing == "gcc":
            run_here(made.sources, made.interface, [], tmp_path / "here")
        run_emulated(made.sources, made.interface, [], tmp_path / "there", made.target)

    with pytest.raises(ToolchainError, match=f"^{missing} is not installed") as refused:
        run()
    assert str(refused.value.remedy).startswith("apt-get install")


def test_a_folder_is_written_again_without_what_was_there(
    shared_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "fw"
    for device, kernel in (("cortex-m4", "conv.c"), ("cortex-m55", "conv_plain.c")):
        written = export_firmware(shared_data / MICRO_SPEECH, device=device).write(folder)
        assert sorted(folder.iterdir()) == written
        assert folder / kernel in written
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        export_firmware(shared_data / MICRO_SPEECH).write(tmp_path / "file" / "fw")


def test_damaged_folders_are_told(shared_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fw"
    export_firmware(shared_data / MICRO_SPEECH).write(folder)
    (folder / "model.c").unlink()
    with pytest.raises(ModelFileError, match="not complete"):
        read_firmware(folder)
